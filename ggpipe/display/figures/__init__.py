"""Results as plots and timelines."""
