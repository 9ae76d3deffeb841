"""Batching: which rows go into the next run."""
