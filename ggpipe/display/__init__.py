"""What the user sees: the live view on the terminal while ranks work, and the numbers afterwards.

`live` draws while a request runs, `tables` shows and writes results, `figures` draws plots and timelines.
"""
