"""Measurements of requests: `stats` as they are taken, `activity` by rank, `summary` pooled, `occupancy` live."""
