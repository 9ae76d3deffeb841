"""Simulate a request on a virtual cluster: `core`'s scheduler and drafter, unchanged, on virtual time.

`simulation_spec` holds what is simulated, `sweep` simulates it in several modes and with several values, `simulator`
runs one request. The virtual cluster is built in `virtual_cluster`; `cores`, `network`, `stage`, `pipeline`, `groups`
and `costs` are its parts, `clock` is its time, `text` what the target writes.
"""
