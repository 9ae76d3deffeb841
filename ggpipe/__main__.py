"""`python -m ggpipe`."""

from ggpipe.cli import main

main()
