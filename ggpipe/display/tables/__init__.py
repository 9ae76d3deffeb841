"""Results as tables and files, one module for each command."""
