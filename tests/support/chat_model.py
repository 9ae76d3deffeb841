"""Chat fine-tunes of the demo target: the same model with further tokens behind its own."""

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np

from scripts.models.quantize import copy_header, finish

_CONTROL = 3  # gguf.TokenType


def recommend(src: Path, dst: Path, values: Mapping[str, float | str]) -> Path:
    """Write `src` to `dst` with these values under `general.sampling.`."""
    reader = gguf.GGUFReader(src)
    writer = copy_header(reader, dst)
    for key, value in values.items():
        kinds = {str: gguf.GGUFValueType.STRING, int: gguf.GGUFValueType.INT32, float: gguf.GGUFValueType.FLOAT32}
        writer.add_key_value(f"general.sampling.{key}", value, kinds[type(value)])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return dst


def add_tokens(src: Path, dst: Path, texts: Sequence[str], like: int, chat_template: str = "") -> Path:
    """Write `src` to `dst` with a control token for each text, after all others.

    The model reads and writes each of them as it does the token `like`, so it draws them about as often. It has the
    given chat template, or none.
    """
    reader = gguf.GGUFReader(src)
    architecture = reader.fields["general.architecture"].contents()
    writer = gguf.GGUFWriter(dst, architecture)
    for key, field in reader.fields.items():
        value = field.contents()
        if key == "tokenizer.ggml.tokens":
            value = [*value, *texts]
        elif key == "tokenizer.ggml.token_type":
            value = [*value, *[_CONTROL] * len(texts)]
        elif key == f"{architecture}.vocab_size":
            value += len(texts)
        if not key.startswith(("GGUF.", "general.architecture", "tokenizer.chat_template")):
            sub_type = field.types[1] if len(field.types) > 1 else None
            writer.add_key_value(key, value, field.types[0], sub_type)
    if chat_template:
        writer.add_chat_template(chat_template)
    for tensor in reader.tensors:
        data = tensor.data
        if tensor.name in ("token_embd.weight", "output.weight"):
            data = np.concatenate([data, *[data[like : like + 1]] * len(texts)])
        writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    finish(writer)
    return dst
