"""What a text may be: grammars and JSON schemas."""
