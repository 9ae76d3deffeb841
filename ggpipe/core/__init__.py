"""Pure scheduling: events in, actions out. No I/O, no clock, no threads, no numpy, no randomness."""
