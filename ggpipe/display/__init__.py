"""What the user sees: the live view on the terminal while ranks work, and the numbers afterwards."""
