"""The display while a request runs."""
