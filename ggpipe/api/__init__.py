"""ggpipe as a library: `ggpipe.Engine` starts the ranks, serves requests, and ends the ranks."""
