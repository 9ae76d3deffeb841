"""Settings of embeddings."""

from __future__ import annotations

from typing import Literal

Pooling = Literal["none", "mean", "cls", "last"]
"""What an embedding is of the hidden states of a text's tokens: all, the mean, the first one, the last one."""
MOST_NORM = 1024
"""By which embeddings are normalized."""
