"""Plan a deployment: search for the fastest placement and split of a model on a cluster.

`planner` drives the search. `placements` lists possible ranks, `splits` their layers; `candidates` estimates both with
a formula, `evaluate` with short simulations. `auto` plans for ranks that have started, `profile_cache` keeps their
profile.
"""
