"""Messages between ranks: over MPI, or inside one process."""
