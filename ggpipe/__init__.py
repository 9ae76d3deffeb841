"""ggpipe: one GGUF model over several CPU-only machines."""

__version__ = "0.1.0"
