"""Embeddings: vectors pooled from the last hidden states of an input's tokens.

libllama's graph marks the last hidden state as a result, so the last rank keeps it (`find_hidden` in
`native/backend.cpp`). If a run's rows need nothing else, the graph ends there. The head adds the rows in the order
of their positions, so a vector does not depend on how the prompt was divided into runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from ggpipe.config.embeddings import Pooling
from ggpipe.errors import SettingError

Vector = NDArray[np.float32]


def chosen(pooling: Pooling | None, of_model: str) -> Pooling:
    """The pooling that the user chose, or else the model's own (`of_model`, from its metadata).

    Raises SettingError if it is unknown, or if neither names one.
    """
    known: tuple[Pooling, ...] = get_args(Pooling)
    for one in known:
        if one == (pooling or of_model):
            return one
    choices = ", ".join(known)
    if pooling is None:
        says = f"the model's file says {of_model}" if of_model else "the model's file does not say how"
        raise SettingError("pooling", f"is missing, and {says}", f"give one of {choices}")
    raise SettingError("pooling", f"must be one of {choices}, got {pooling}")


class Pooled:
    """Pools hidden states, which arrive in the order of their tokens."""

    def __init__(self, pooling: Pooling) -> None:
        self._pooling = pooling
        self._rows: list[Vector] = []
        self._sum: NDArray[np.float64] | None = None
        self._n = 0

    def add(self, row: Vector) -> None:
        """Add the hidden state of the next token, of shape (n_embd,)."""
        self._n += 1
        match self._pooling:
            case "mean":
                self._sum = row.astype(np.float64) if self._sum is None else self._sum + row
            case "cls":
                self._rows = self._rows or [row.copy()]
            case "last":
                self._rows = [row.copy()]
            case "none":
                self._rows.append(row.copy())

    @property
    def vectors(self) -> tuple[Vector, ...]:
        """One vector of shape (n_embd,), or with pooling `none` one per token. The vectors are empty if the model has
        no hidden states."""
        if self._sum is not None:
            return ((self._sum / self._n).astype(np.float32),)
        return tuple(self._rows)


def normalized(vector: Sequence[float] | Vector, norm: int) -> Vector:
    """Normalize a vector of shape (n_embd,) as llama.cpp's `--embd-normalize` does.

    `norm`: -1 returns it unchanged, 0 scales the largest absolute value to 32760, 1 and above divide by the p-norm of
    that order. A vector of zeros stays unchanged.
    """
    values = np.asarray(vector, np.float32)
    sizes = np.abs(values).astype(np.float64)
    if norm < 0 or not sizes.any():
        return values
    length = sizes.max() / 32760 if norm == 0 else (sizes**norm).sum() ** (1 / norm)
    return values * np.float32(1 / length)
