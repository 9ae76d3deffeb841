"""Scripts for those who work on ggpipe: benchmarks, experiments, models to measure with."""
