"""Models in libllama's quantized types."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path

import gguf
import llama_cpp
import numpy as np

from ggpipe.llama.libllama import start


def quantize(src: Path, dst: Path, file_type: str, *, pure: bool = False, n_threads: int = 1) -> Path:
    """Write `src`, a single file, to `dst` as a llama.cpp file type: F16, Q8_0, Q4_0, Q4_K_M, ...

    Unless `pure`, libllama gives some matrices another type; matrices whose rows are no multiple of 256 get one with
    smaller blocks. Types that need the columns' importance are told that all are equally important. Raises RuntimeError
    when libllama refuses.
    """
    start()
    params = llama_cpp.llama_model_quantize_default_params()
    params.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type.upper()}")
    params.nthread = n_threads
    params.allow_requantize = True
    params.pure = pure
    if file_type.startswith(("IQ1", "IQ2", "IQ3_XXS")):
        importance = _uniform_importance(src)  # which `params` does not keep
        params.imatrix = importance
    if llama_cpp.llama_model_quantize(os.fsencode(src), os.fsencode(dst), ctypes.byref(params)):
        raise RuntimeError(f"libllama cannot write {src} as {file_type}")
    return dst


def _uniform_importance(path: Path) -> ctypes.Array[llama_cpp.llama_model_imatrix_data]:
    """An entry for each matrix of a model, and one without a name."""
    entry = llama_cpp.llama_model_imatrix_data
    shapes = {tensor.name: tensor.shape.tolist() for tensor in gguf.GGUFReader(path).tensors}
    sizes = {name: shape[0] * math.prod(shape[2:]) for name, shape in shapes.items() if len(shape) > 1}
    ones = np.ctypeslib.as_ctypes(np.ones(max(sizes.values()), np.float32))
    data = ctypes.cast(ones, ctypes.POINTER(ctypes.c_float))  # which keeps `ones`, as the entries keep `data`
    return (entry * (len(sizes) + 1))(*(entry(name.encode(), data, size) for name, size in sizes.items()))
