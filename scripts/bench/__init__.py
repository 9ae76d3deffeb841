"""Benchmarks: what a stage costs, what speculation gains, whether the simulator and the planner are right."""
