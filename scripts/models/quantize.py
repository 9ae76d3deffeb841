"""Models in libllama's quantized types."""

from __future__ import annotations

import ctypes
import math
import os
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggpipe.llama.libllama import ggml, start

_FILE_TYPES = {"Q1_0": 40, "Q2_0": 41}
"""Of libllama, but not of llama-cpp-python."""
_NVFP4 = 40  # in ggml
_NVFP4_COLUMNS, _NVFP4_BYTES = 64, 36  # of a block
_F32 = gguf.GGMLQuantizationType.F32
_quantize_rows = ggml(
    "ggml_quantize_chunk", ctypes.c_size_t, ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64,
    ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p,
)  # fmt: skip


def quantize(src: Path, dst: Path, file_type: str, *, pure: bool = False, n_threads: int = 1) -> Path:
    """Write `src`, a single file, to `dst` as a llama.cpp file type: F16, Q8_0, Q4_0, Q4_K_M, ... Or as NVFP4,
    always `pure` and without scales of whole matrices.

    Unless `pure`, libllama gives some matrices another type; matrices whose rows are no multiple of 256 get one with
    smaller blocks. Types that need the columns' importance are told that all are equally important. Raises RuntimeError
    when libllama refuses.
    """
    start()
    if file_type == "NVFP4":  # which libllama does not write
        return _as_nvfp4(src, dst)
    params = llama_cpp.llama_model_quantize_default_params()
    name = file_type.upper()
    params.ftype = _FILE_TYPES.get(name) or getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{name}")
    params.nthread = n_threads
    params.allow_requantize = True
    params.pure = pure
    if file_type.startswith(("IQ1", "IQ2", "IQ3_XXS")):
        importance = _uniform_importance(src)  # which `params` does not keep
        params.imatrix = importance
    if llama_cpp.llama_model_quantize(os.fsencode(src), os.fsencode(dst), ctypes.byref(params)):
        raise RuntimeError(f"libllama cannot write {src} as {file_type}")
    return dst


def nvfp4(weights: NDArray[np.float32]) -> NDArray[np.uint8]:
    """Weights in NVFP4: (..., columns) to (..., bytes)."""
    weights = np.ascontiguousarray(weights, np.float32)
    n_columns = weights.shape[-1]
    blocks = np.empty((*weights.shape[:-1], n_columns // _NVFP4_COLUMNS * _NVFP4_BYTES), np.uint8)
    _quantize_rows(_NVFP4, weights.ctypes.data, blocks.ctypes.data, 0, weights.size // n_columns, n_columns, None)
    return blocks


def copy_header(reader: gguf.GGUFReader, dst: Path) -> gguf.GGUFWriter:
    """A writer of a file with the metadata of another one, but for empty arrays, which cannot be written."""
    writer = gguf.GGUFWriter(dst, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        if not key.startswith(("GGUF.", "general.architecture")) and field.contents() != []:
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, field.contents(), field.types[0], sub_type)
    return writer


def finish(writer: gguf.GGUFWriter) -> None:
    """Write all that was added."""
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _as_nvfp4(src: Path, dst: Path) -> Path:
    reader = gguf.GGUFReader(src)
    writer = copy_header(reader, dst)
    for tensor in reader.tensors:
        if len(tensor.shape) > 1 and tensor.tensor_type != _F32 and tensor.shape[0] % _NVFP4_COLUMNS == 0:
            weights = gguf.dequantize(tensor.data, tensor.tensor_type)
            writer.add_tensor(tensor.name, nvfp4(weights), raw_dtype=gguf.GGMLQuantizationType.NVFP4)
        else:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return dst


def _uniform_importance(path: Path) -> ctypes.Array[llama_cpp.llama_model_imatrix_data]:
    """An entry for each matrix of a model, and one without a name."""
    entry = llama_cpp.llama_model_imatrix_data
    shapes = {tensor.name: tensor.shape.tolist() for tensor in gguf.GGUFReader(path).tensors}
    sizes = {name: shape[0] * math.prod(shape[2:]) for name, shape in shapes.items() if len(shape) > 1}
    ones = np.ctypeslib.as_ctypes(np.ones(max(sizes.values()), np.float32))
    data = ctypes.cast(ones, ctypes.POINTER(ctypes.c_float))  # which keeps `ones`, as the entries keep `data`
    return (entry * (len(sizes) + 1))(*(entry(name.encode(), data, size) for name, size in sizes.items()))
