"""Settings of embeddings."""

from __future__ import annotations

from typing import Literal

Pooling = Literal["none", "mean", "cls", "last"]
"""How hidden states become an embedding: one vector per token, their mean, the first token's, or the last token's."""
MOST_NORM = 1024
"""Largest order of the norm by which embeddings are normalized."""
