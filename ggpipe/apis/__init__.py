"""One file per API: request bodies and replies as data. HTTP is in `server`, since batch files use the same bodies."""
