"""Starts ranks: hostfiles, mpirun, and the environment variables of launchers."""
