"""GGUF files that llama.cpp loads: architecture "llama" for models, "eagle3" for heads; matrices Q8_0, norms F32."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from scripts.models.demo_pair.corpus import CHAT_TEMPLATE, TURN
from scripts.models.demo_pair.eagle import Head
from scripts.models.demo_pair.llama import CONTEXT_TOKENS, NORM_EPSILON, Model, Shape
from scripts.models.demo_pair.tokens import SPECIAL, rebuild_tokenizer
from scripts.models.demo_pair.workspace import InputError, replacing

with contextlib.suppress(ImportError):  # --help works without
    import gguf
    import torch
    from tokenizers import Tokenizer

if TYPE_CHECKING:
    from torch import Tensor


def write_model(model: Model, tokenizer: Tokenizer, path: Path) -> None:
    """Write a model with its tokenizer, and with the chat template where the tokenizer has ChatML's tokens."""
    _write(path, "llama", model.shape, tokenizer, model.weights, {})


def write_head(head: Head, target: Model, tokenizer: Tokenizer, path: Path) -> None:
    """Write an EAGLE-3 head with the target's embeddings, so that any rank can hold it."""
    weights = {**head.weights, "token_embd.weight": target.weights["token_embd.weight"]}
    extra: dict[str, int | list[int]] = {"target_layers": list(head.taps), "target_hidden_size": head.shape.width}
    _write(path, "eagle3", head.shape, tokenizer, weights, extra)


def _write(
    path: Path,
    architecture: str,
    shape: Shape,
    tokenizer: Tokenizer,
    weights: Mapping[str, Tensor],
    extra: Mapping[str, int | list[int]],
) -> None:
    with replacing(path) as part:
        writer = gguf.GGUFWriter(part, architecture)
        writer.add_name(path.stem)
        writer.add_block_count(shape.layers)
        writer.add_context_length(CONTEXT_TOKENS)
        writer.add_embedding_length(shape.width)
        writer.add_feed_forward_length(shape.wide)
        writer.add_head_count(shape.heads)
        writer.add_head_count_kv(shape.kv_heads)
        writer.add_layer_norm_rms_eps(NORM_EPSILON)
        writer.add_rope_dimension_count(shape.head_width)
        writer.add_rope_freq_base(shape.rope_base)
        for name, value in extra.items():
            if isinstance(value, int):
                writer.add_uint32(f"{architecture}.{name}", value)
            else:
                writer.add_array(f"{architecture}.{name}", value)
        _add_tokenizer(writer, tokenizer)
        for name, tensor in weights.items():
            kind = gguf.GGMLQuantizationType.Q8_0 if tensor.ndim == 2 else gguf.GGMLQuantizationType.F32
            writer.add_tensor(name, gguf.quants.quantize(tensor.detach().numpy(), kind), raw_dtype=kind)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    bpe = json.loads(tokenizer.to_str())["model"]
    tokens = sorted(bpe["vocab"], key=bpe["vocab"].__getitem__)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in bpe["merges"]]
    control, normal = gguf.TokenType.CONTROL, gguf.TokenType.NORMAL
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("gpt-2")
    writer.add_token_list(tokens)
    writer.add_token_types([control if token in SPECIAL else normal for token in tokens])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(0)
    writer.add_add_bos_token(True)
    if TURN in tokens:
        writer.add_eot_token_id(SPECIAL.index("<|im_end|>"))
        writer.add_chat_template(CHAT_TEMPLATE)


def read_model(path: Path) -> tuple[Model, Tokenizer]:
    """A model that write_model wrote, its weights as Q8_0 left them, and its tokenizer. Raises InputError, OSError."""
    fields, shape, weights = _read(path, "llama")
    tokens, merges = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.merges"]
    return Model(shape, weights), rebuild_tokenizer(tokens, merges, [token for token in SPECIAL if token in tokens])


def read_head(path: Path) -> Head:
    """A head that write_head wrote. Raises InputError, OSError."""
    fields, shape, weights = _read(path, "eagle3")
    return Head(shape, tuple(fields["eagle3.target_layers"]), weights)


def _read(path: Path, architecture: str) -> tuple[dict[str, Any], Shape, dict[str, Tensor]]:
    try:
        reader = gguf.GGUFReader(path)
        fields = {name: field.contents() for name, field in reader.fields.items()}
        shape = Shape(
            vocabulary=len(fields["tokenizer.ggml.tokens"]),
            width=fields[f"{architecture}.embedding_length"],
            layers=fields[f"{architecture}.block_count"],
            heads=fields[f"{architecture}.attention.head_count"],
            kv_heads=fields[f"{architecture}.attention.head_count_kv"],
            wide=fields[f"{architecture}.feed_forward_length"],
            rope_base=fields[f"{architecture}.rope.freq_base"],
        )
    except (KeyError, ValueError) as exc:
        raise InputError(f"{path} was not written by this script: {exc}") from exc
    return fields, shape, {tensor.name: _floats(tensor) for tensor in reader.tensors}


def _floats(tensor: gguf.ReaderTensor) -> Tensor:
    values = gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
    return torch.from_numpy(np.ascontiguousarray(values))
