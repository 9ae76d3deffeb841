"""A model whose tokens have other numbers: the same model with another vocabulary."""

from __future__ import annotations

import random
from pathlib import Path

import gguf
import numpy as np

from scripts.models.quantize import finish

_NORMAL = 1  # gguf.TokenType
_BY_TOKEN = ("tokens", "token_type", "scores")


def renumbered(src: Path, dst: Path) -> Path:
    """Write `src` to `dst` with its tokens in another order, the special ones left out."""
    reader = gguf.GGUFReader(src)
    kinds = reader.fields["tokenizer.ggml.token_type"].contents()
    normal = [token for token, kind in enumerate(kinds) if kind == _NORMAL]
    order = np.arange(len(kinds))
    order[normal] = random.Random(1).sample(normal, len(normal))
    writer = gguf.GGUFWriter(dst, reader.fields["general.architecture"].contents())
    for key, field in reader.fields.items():
        value = field.contents()
        if key.rpartition(".")[2] in _BY_TOKEN:
            value = [value[token] for token in order]
        if not key.startswith(("GGUF.", "general.architecture")):
            writer.add_key_value(key, value, field.types[0], field.types[1] if len(field.types) > 1 else None)
    for tensor in reader.tensors:
        data = tensor.data[order] if tensor.name in ("token_embd.weight", "output.weight") else tensor.data
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return dst
