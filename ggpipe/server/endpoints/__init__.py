"""The endpoints, by subject. Their paths are in `app.py`."""
