"""The KV cache as the scheduler knows it: what is kept in it, and which sequences hold which cells."""
