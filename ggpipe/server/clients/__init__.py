"""Who may ask, and how much of a client is taken: keys, origins, connections, bodies."""
