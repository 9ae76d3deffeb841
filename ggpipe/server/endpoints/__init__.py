"""What is answered, by subject; `app.py` has their paths."""
