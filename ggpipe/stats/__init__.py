"""Measurements of requests: `records` as they are taken, `activity` by rank, `summary` pooled, `occupancy` live."""
