"""Constraints on the output: grammars and JSON schemas."""
