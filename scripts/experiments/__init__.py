"""PipeInfer's settings in the simulator, as a report."""
