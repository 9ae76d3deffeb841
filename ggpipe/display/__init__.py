"""What the user sees on the terminal and in files of results.

`live` draws while a request runs, `tables` prints and writes results, `figures` draws plots and timelines.
"""
