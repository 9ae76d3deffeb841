"""Drafters in an engine: how the head reaches them, and what drives those with a model."""
