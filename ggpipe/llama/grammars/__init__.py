"""Grammars on a model's vocabulary: which tokens may come next."""
