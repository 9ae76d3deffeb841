"""Statistics of requests: raw `records`, `activity` by rank, pooled in `summary` and `traffic`, live `occupancy`."""
