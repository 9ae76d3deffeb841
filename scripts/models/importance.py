"""Importance of weights, without which libllama's quantizer refuses types of less than 3 bits."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

_Entry = llama_cpp.llama_model_imatrix_data


class UniformImportance:
    """All columns of all matrices of a model count the same. It must outlive the parameters that refer to it."""

    def __init__(self, path: Path) -> None:
        """`path`: the model that is quantized, in one file."""
        shapes = {
            tensor.name: tensor.shape.tolist() for tensor in gguf.GGUFReader(path).tensors if len(tensor.shape) > 1
        }
        sizes = {name: shape[0] * math.prod(shape[2:]) for name, shape in shapes.items()}
        self._ones = np.ones(max(sizes.values()), np.float32)
        data = self._ones.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self.entries = (_Entry * (len(sizes) + 1))(*(_Entry(name.encode(), data, n) for name, n in sizes.items()))
        """For `llama_model_quantize_params.imatrix`; the last one has no name."""
