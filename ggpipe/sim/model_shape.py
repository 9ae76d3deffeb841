"""What a GGUF's header says of a model's size: its shape, with nothing loaded."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ggpipe.engine.libllama import native
from ggpipe.engine.model_file import ModelFile
from ggpipe.sim.shapes import ModelShape

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_HEAD = ("output", "cls")
_RECURRENT = ("ssm_", "time_mix_", "shortconv.")
_ATTENTION = ("attn_k.", "attn_kv_a_mqa.")


def shape_of(model_file: ModelFile, cache_type_k: str = "f16", cache_type_v: str = "f16") -> ModelShape:
    """The shape of a model whose KV cache has these types, as -ctk and -ctv name them."""
    n_layer = model_file.n_layer
    layer_bytes, expert_bytes = [0] * n_layer, [0] * n_layer
    names: list[list[str]] = [[] for _ in range(n_layer)]
    embedding_bytes = head_bytes = 0
    for name, tensor in model_file.tensors.items():
        match = _LAYER.fullmatch(name)
        layer = int(match[1]) if match else n_layer
        if match and layer < n_layer:
            layer_bytes[layer] += tensor.size
            names[layer].append(match[2])
            if "_exps." in name:
                expert_bytes[layer] += tensor.size
        elif name.startswith(_HEAD):
            head_bytes += tensor.size
        else:
            embedding_bytes += tensor.size
    if model_file.tied_output and "token_embd.weight" in model_file.tensors:
        head_bytes += model_file.tensors["token_embd.weight"].size
    header = _Header(model_file)
    has_experts = any(expert_bytes)
    return ModelShape(
        str(model_file.metadata.get("general.name") or model_file.paths[0].stem),
        tuple(layer_bytes),
        embedding_bytes,
        head_bytes,
        _parameters_per_byte(model_file),
        header.number("embedding_length"),
        tuple(header.cell_bytes(layer, names[layer], cache_type_k, cache_type_v) for layer in range(n_layer)),
        model_file.array_lengths.get("tokenizer.ggml.tokens", 0) or header.number("vocab_size"),
        tuple(expert_bytes) if has_experts else (),
        header.number("expert_count") if has_experts else 0,
        max(header.per_layer("expert_used_count", 0)) if has_experts else 0,
    )


class _Header:
    """An architecture's own metadata."""

    def __init__(self, model_file: ModelFile) -> None:
        self._metadata = model_file.metadata
        self._prefix = model_file.architecture
        self._n_layer = model_file.n_layer

    def number(self, key: str, default: int = 0) -> int:
        """A whole number; of an array the largest."""
        return max(self.per_layer(key, default))

    def per_layer(self, key: str, default: int) -> tuple[int, ...]:
        """A setting that may be one for all layers, or one for each."""
        value = self._metadata.get(f"{self._prefix}.{key}")
        if isinstance(value, tuple) and len(value) >= self._n_layer:
            return value[: self._n_layer]
        return (value if isinstance(value, int) else default,) * self._n_layer

    def cell_bytes(self, layer: int, tensors: Iterable[str], cache_type_k: str, cache_type_v: str) -> float:
        """KV cache of a token in a layer (libllama's llama_kv_cache)."""
        if layer >= self._n_layer - self.number("attention.shared_kv_layers") or _is_recurrent(tensors):
            return 0.0
        n_head = self.per_layer("attention.head_count", 0)
        n_head_kv = self.per_layer("attention.head_count_kv", -1)[layer]
        if n_head_kv < 0:
            n_head_kv = n_head[layer]
        own_size = self.number("embedding_length") // n_head[0] if n_head[0] else 0
        slides = self.per_layer("attention.sliding_window_pattern", 0)  # only as an array of truths it names layers
        suffix = "_swa" if slides[layer] is True else ""
        values = [cache_type_bytes(cache_type_k) * self._head_size("key", suffix, own_size)]
        if not self.number("attention.key_length_mla"):  # with latent attention, V is a part of K
            values.append(cache_type_bytes(cache_type_v) * self._head_size("value", suffix, own_size))
        return n_head_kv * sum(values)

    def _head_size(self, kind: str, suffix: str, own_size: int) -> int:
        size = self.number(f"attention.{kind}_length", own_size)
        return self.number(f"attention.{kind}_length{suffix}", size)


def cache_type_bytes(name: str) -> float:
    """Bytes of a number in a KV cache of this type."""
    n, n_bytes = native.type_sizes()[name]
    return n_bytes / n


def _is_recurrent(tensors: Iterable[str]) -> bool:
    tensors = list(tensors)
    has_state = any(tensor.startswith(_RECURRENT) for tensor in tensors)
    return has_state and not any(tensor.startswith(_ATTENTION) for tensor in tensors)


def _parameters_per_byte(model_file: ModelFile) -> float:
    sizes = native.type_sizes()
    n_bytes = parameters = 0.0
    for tensor in model_file.tensors.values():
        n, size = sizes[tensor.type]
        n_bytes += tensor.size
        parameters += tensor.size * n / size
    return parameters / n_bytes
