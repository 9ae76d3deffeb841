"""What is shown while a request runs."""
