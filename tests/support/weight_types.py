"""Types of weights, with those that the gguf package cannot unpack."""

from __future__ import annotations

import enum

import numpy as np
from gguf import GGML_QUANT_SIZES
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize
from numpy.typing import NDArray


class FewBits(enum.IntEnum):
    """Types of one or two bits, by their numbers in ggml."""

    Q1_0 = 41
    Q2_0 = 42

    @property
    def n_bits(self) -> int:
        """Of a weight."""
        return 1 if self is FewBits.Q1_0 else 2

    def dequantize(self, weights: NDArray[np.uint8]) -> NDArray[np.float32]:
        """The weights as numbers: (rows, columns)."""
        blocks = weights.reshape(len(weights), -1, 18)
        scales = blocks[:, :, :2].copy().view(np.float16).astype(np.float32)
        shifts = np.arange(0, 8, self.n_bits, dtype=np.uint8)
        numbers = blocks[:, :, 2:, None] >> shifts & ((1 << self.n_bits) - 1)
        signed = numbers.astype(np.float32) - 1 if self.n_bits > 1 else 2 * numbers.astype(np.float32) - 1
        return (signed.reshape(*blocks.shape[:2], -1) * scales).reshape(len(weights), -1)


Kind = Type | FewBits


def block_of(kind: Kind) -> tuple[int, int]:
    """Columns and bytes of a block."""
    return (128 // kind.n_bits, 18) if isinstance(kind, FewBits) else GGML_QUANT_SIZES[kind]


def dequantized(weights: NDArray[np.uint8], kind: Kind) -> NDArray[np.float32]:
    """The weights as numbers: (rows, columns)."""
    return kind.dequantize(weights) if isinstance(kind, FewBits) else dequantize(weights, kind)
