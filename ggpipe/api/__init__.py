"""ggpipe as a library: `ggpipe.Engine` starts ranks, serves requests, and ends the ranks."""
