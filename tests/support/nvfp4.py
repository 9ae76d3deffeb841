"""Models whose weights are NVFP4, with the scales of whole matrices that belong to it. libllama cannot write them."""

from pathlib import Path

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize

from scripts.models.quantize import copy_header, finish, nvfp4

_COLUMNS = 64  # of a block
_DIVIDED = ("attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down", "output")


def as_nvfp4(src: Path, dst: Path, as_float: bool = False) -> Path:
    """Write a model of floats to `dst` with its large matrices in NVFP4, each divided by a scale of its own, as are
    those of each expert. `as_float`: the same numbers as floats instead, without scales."""
    reader = gguf.GGUFReader(src)
    writer = copy_header(reader, dst)
    rng = np.random.default_rng(5)
    for tensor in reader.tensors:
        name = tensor.name.split(".")[-2].removesuffix("_exps")
        if name not in _DIVIDED or tensor.data.shape[-1] % _COLUMNS:
            writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
            continue
        scales = rng.uniform(0.5, 2, tensor.data.shape[:-2] or (1,)).astype(np.float32)
        factors = scales[:, None, None] if tensor.data.ndim > 2 else scales
        blocks = nvfp4((tensor.data / factors).astype(np.float32))
        if as_float:
            writer.add_tensor(tensor.name, dequantize(blocks, Type.NVFP4) * factors)
        else:
            writer.add_tensor(tensor.name, blocks, raw_dtype=Type.NVFP4)
            writer.add_tensor(tensor.name.replace(".weight", ".scale"), scales)
    finish(writer)
    return dst
