"""Descriptions of clusters and models, and their files.

`spec` describes a cluster: `toml` reads it from a cluster file, `from_profile` derives it from a `profile`. `links` and
`model_shape` are parts of it, `memory` is what ranks need. `recording` has recorded outputs; `decode` checks all files.
"""
