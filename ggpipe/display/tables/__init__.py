"""Results as tables and files, with one module per command."""
