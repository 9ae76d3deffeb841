"""Starting ranks: hostfiles, mpirun, what launchers put into the environment."""
