"""What an architecture's metadata say: of one layer its KV cache, and the room that libllama computes in; of the model
which embeddings it gives.

Formulas were fitted to what libllama allocates for models of 16 architectures; tests/test_memory.py compares them.
"""

from __future__ import annotations

import ctypes
import re
from collections.abc import Mapping
from dataclasses import replace

from ggpipe.cluster.model_shape import FLOAT_BYTES
from ggpipe.config.embeddings import Pooling
from ggpipe.core.row_work import Attention
from ggpipe.errors import Setting, UsageError
from ggpipe.llama.gguf import ModelFile, TensorInfo, type_name
from ggpipe.llama.libllama import ggml, lib

_LAYER = re.compile(r"blk\.(\d+)\.(.+)")
_RECURRENT = ("ssm_", "time_mix_", "shortconv.")
_INDEXER = "indexer."
_ATTENTION = ("attn_k.", "attn_kv_a_mqa.")
_SLIDING_PERIODS = {
    "afmoe": 4,
    "cohere2": 4,
    "cohere2moe": -4,
    "exaone-moe": 4,
    "exaone4": 4,
    "gemma-embedding": 6,
    "gemma2": 2,
    "gemma3": 6,
    "gemma3n": 5,
    "gpt-oss": 2,
    "laguna": -4,
    "llama4": 4,
    "mellum": 4,
    "modern-bert": -3,
    "muse-glimmer": 4,
    "olmo2": 4,
    "plamo3": 8,
    "smallthinker": -4,
}
"""One of this many layers has no sliding window: the last, or the first if the number is negative (libllama's
load_swa_pattern). Files may have a number of their own, or a value for each layer."""
_MASK_BYTES = 2
_POOLINGS = ("none", "mean", "cls", "last", "rank")  # by libllama's numbers
_NOT_CAUSAL = ("gemma-embedding",)
_MOST_NUMBERS = 12 << 20  # of the vectors of a text's tokens, 4 bytes each
_MIN_STATES, _MAX_STATES = 4, 8
"""Kept prefixes of recurrent models: each takes the memory of a state, all layers' together."""
_STATES_SHARE = 8
_WITH_INDEXER = 4  # tokens of a compressed cell of layers that have an indexer
"""They take this part of the weights' memory, within those limits."""


class ModelHeader:
    """Metadata by layer, and the tensors of each."""

    def __init__(self, model_file: ModelFile, with_mtp: bool = False) -> None:
        """`with_mtp`: MTP layers count as layers, after the others. Otherwise they are left out."""
        self._metadata = model_file.metadata
        self._prefix = model_file.architecture
        self._n_bytes = model_file.n_bytes
        self.n_layer = model_file.n_blocks if with_mtp else model_file.n_layer
        self.width = self.number("embedding_length")
        self.layers: list[dict[str, TensorInfo]] = [{} for _ in range(self.n_layer)]
        """Tensors of each layer, by their names within it."""
        self.others: dict[str, TensorInfo] = {}
        for name, tensor in model_file.tensors.items():
            match = _LAYER.fullmatch(name)
            layer = int(match[1]) if match else 0
            if match and layer < self.n_layer:
                self.layers[layer][match[2]] = tensor
            elif layer < model_file.n_layer or layer >= model_file.n_blocks:
                self.others[name] = tensor

    def number(self, key: str, default: int = 0) -> int:
        """A whole number; of an array the largest."""
        return max(self.per_layer(key, default))

    def per_layer(self, key: str, default: int) -> tuple[int, ...]:
        """A setting with one value for all layers, or one value per layer."""
        value = self._metadata.get(f"{self._prefix}.{key}")
        if isinstance(value, tuple) and len(value) >= self.n_layer:
            return value[: self.n_layer]
        return (value if isinstance(value, int) else default,) * self.n_layer

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a state that cannot be rolled back."""
        return any(map(self.state_bytes, range(self.n_layer)))

    @property
    def pooling(self) -> str:
        """How its embeddings are made, as llama.cpp names it; nothing where the file does not say."""
        number = self.number("pooling_type", -1)
        return _POOLINGS[number] if 0 <= number < len(_POOLINGS) else ""

    @property
    def is_causal(self) -> bool:
        """Whether no token depends on later ones. (libllama knows more exceptions, which it calls diffusion models.)"""
        return self._prefix not in _NOT_CAUSAL and self._metadata.get(f"{self._prefix}.attention.causal") is not False

    def check_embedding(self, n_tokens: int, pooling: Pooling) -> None:
        """Raises UsageError if the model cannot make embeddings of this many tokens."""
        if pooling == "none" and n_tokens * self.width > _MOST_NUMBERS:
            raise UsageError(
                f"{n_tokens} vectors are too many for an answer: give {_MOST_NUMBERS // self.width} tokens at "
                "most, or take another ",
                Setting("pooling"),
                " than none",
            )

    def cell_bytes(self, layer: int, cache_type_k: str, cache_type_v: str) -> float:
        """KV cache of a token in a layer (libllama's llama_kv_cache)."""
        if layer >= self.n_layer - self.number("attention.shared_kv_layers") or self._is_recurrent(layer):
            return 0.0
        if self._collects:
            ratio, widths = self._ratio(layer), self._widths(layer)
            return sum(widths) / ratio * number_bytes(cache_type_k) if ratio else 0.0  # else only those of a window
        k, v = self._kv_width(layer)
        return k * number_bytes(cache_type_k) + (0 if self._is_latent else v * number_bytes(cache_type_v))

    def attention(self, layer: int) -> Attention:
        """Floating-point operations of a layer's attention. What models compute besides, to pool or to compress cells,
        is not counted."""
        if self._is_recurrent(layer):
            return Attention(cell=0.0)
        n_head = self.per_layer("attention.head_count", 0)[layer]
        k, v = self._head_size("key", layer), self._head_size("value", layer)
        if self._collects:
            return self._attention_to_collected(layer, 2 * n_head * (k + v))
        attention = Attention(cell=2 * n_head * (k + v), most_cells=self._most_cells(layer), index=self._index(layer))
        if not self._is_latent or attention.most_cells:  # sparse attention never expands latent vectors
            return attention
        own_k, own_v = self.number("attention.key_length_mla"), self.number("attention.value_length_mla")
        n_expanded = own_k - self.number("rope.dimension_count") + own_v
        return replace(attention, long_cell=2 * n_head * (own_k + own_v), expansion=2 * n_head * n_expanded * v)

    def _attention_to_collected(self, layer: int, work: float) -> Attention:
        """The same where cells hold several tokens each. `work`: of a cell."""
        ratio, n_window = self._ratio(layer), self.number("attention.sliding_window")
        if not ratio:
            return Attention(cell=work, most_cells=n_window)
        n_selected = self.number("attention.indexer.top_k") if ratio == _WITH_INDEXER else 0
        return Attention(
            cell=work / ratio,
            most_cells=n_selected * ratio,
            index=self._index(layer) / ratio,
            near_cell=work,
            n_near=n_window,
        )

    def _most_cells(self, layer: int) -> int:
        """Cells that a token sees in a layer; 0: all."""
        if self._slides(layer):
            return self.number("attention.sliding_window")
        if not any(name.startswith(_INDEXER) for tensors in self.layers for name in tensors):
            return 0
        return self.number("attention.indexer.top_k") * max(self.number("attention.indexer.block_size"), 1)

    def _index(self, layer: int) -> int:
        """Floating-point operations for a row and a cell, to select what the row sees."""
        if not any(name.startswith(_INDEXER) for name in self.layers[layer]):
            return 0
        return 2 * self.number("attention.indexer.head_count") * self.number("attention.indexer.key_length")

    def _slides(self, layer: int) -> bool:
        """Whether a token sees only a window of the context in a layer."""
        pattern = self._metadata.get(f"{self._prefix}.attention.sliding_window_pattern")
        if isinstance(pattern, tuple):
            return layer < len(pattern) and bool(pattern[layer])
        if self._prefix not in _SLIDING_PERIODS:
            return False
        period = _SLIDING_PERIODS[self._prefix]
        n = pattern if isinstance(pattern, int) and pattern > 0 else abs(period)
        return layer % n != (0 if period < 0 else n - 1)

    def expert_bytes(self, layer: int) -> int:
        """Weights of a layer's experts, of which a token uses only some."""
        return sum(tensor.size for name, tensor in self.layers[layer].items() if "_exps." in name)

    def state_bytes(self, layer: int) -> int:
        """A sequence's recurrent state in a layer (libllama's n_embd_s and n_embd_r), or where tokens are collected
        (llama_dsv4_comp_state)."""
        if self._collects:
            ratio = self._ratio(layer)
            overlap = 2 if ratio == _WITH_INDEXER else 1  # cells overlap
            return FLOAT_BYTES * 2 * overlap**2 * ratio * sum(self._widths(layer))
        return FLOAT_BYTES * self._state_width * self._has_state(layer)

    @property
    def _collects(self) -> bool:
        """Whether KV cells hold several tokens each, of DeepSeek-V4."""
        return self._prefix == "deepseek4"

    def _ratio(self, layer: int) -> int:
        """Tokens of a cell; 0: a layer sees a window only."""
        return self.per_layer("attention.compress_ratios", 0)[layer]

    def _widths(self, layer: int) -> tuple[int, ...]:
        """Numbers of a cell that holds several tokens, and of its key for the indexer."""
        key, index = self.number("attention.key_length"), self.number("attention.indexer.key_length")
        return (key, index) if self._ratio(layer) == _WITH_INDEXER else (key,)

    @property
    def most_states(self) -> int:
        """Kept prefixes, at most, where each has a recurrent state of its own."""
        bytes_each = sum(map(self.state_bytes, range(self.n_layer)))
        return min(max(self._n_bytes // (_STATES_SHARE * max(bytes_each, 1)), _MIN_STATES), _MAX_STATES)

    def most_sequences(self, n_ctx: int) -> int:
        """The same where each has cells of its own that hold several tokens."""
        bytes_each = n_ctx * sum(self.cell_bytes(layer, "f16", "f16") for layer in range(self.n_layer))
        return min(int(self._n_bytes / (_STATES_SHARE * max(bytes_each, 1.0))), _MAX_STATES)

    @property
    def _state_width(self) -> int:
        if head_size := self.number("wkv.head_size"):
            return self.width * (head_size + self.number("token_shift_count", 2))
        if n_taps := self.number("shortconv.l_cache"):
            return self.width * (n_taps - 1)
        n_conv = max(self.number("ssm.conv_kernel") - 1, 0)
        if head_size := self.number("kda.head_dim"):
            return self.number("attention.head_count") * head_size * (head_size + 3 * (n_conv or 3))
        inner, state = self.number("ssm.inner_size"), self.number("ssm.state_size")
        return inner * state + n_conv * (inner + 2 * self.number("ssm.group_count") * state)

    def row_bytes(self, layer: int) -> float:
        """For each row of a run, what a layer's results take at most at the same time."""
        return FLOAT_BYTES * (4 * self.width + max(self._attention_width(layer), self._feed_forward_width(layer)))

    def row_cell_bytes(self, flash_attn: bool) -> float:
        """For each row of a run and each token of the context: masks, and without flash attention also scores."""
        n_masks = 2 if self.number("attention.sliding_window") else 1
        if flash_attn:
            return n_masks * _MASK_BYTES
        return n_masks * FLOAT_BYTES + self.number("attention.head_count") * FLOAT_BYTES

    def _attention_width(self, layer: int) -> int:
        if self._is_recurrent(layer):
            return max(8 * self.number("ssm.inner_size"), 16 * self.width)
        n_head = self.per_layer("attention.head_count", 0)[layer]
        if self._is_latent:
            return n_head * (2 * self._head_size("key", layer) + self.number("attention.key_length_mla"))
        q, (k, v) = n_head * self._head_size("key", layer), self._kv_width(layer)
        return max(2 * q, q + 2 * k + v)

    def _feed_forward_width(self, layer: int) -> int:
        tensors, wide = self.layers[layer], 0
        down = tensors.get("ffn_down_exps.weight")
        if down is not None:
            n_used = self.per_layer("expert_used_count", 1)[layer]
            inner = n_numbers(down) // max(self.width * self.number("expert_count", 1), 1)
            wide = n_used * max(3 * inner, self.width)
            return wide + (2 * self.width if "ffn_down_shexp.weight" in tensors else 0)
        inner = self.per_layer("feed_forward_length", 0)[layer]
        up = tensors.get("ffn_up.weight")
        is_gated = "ffn_gate.weight" in tensors or (up is not None and n_numbers(up) > inner * self.width)
        return 3 * inner if is_gated else inner

    @property
    def _is_latent(self) -> bool:
        """Latent attention: V is a part of K."""
        return self.number("attention.key_length_mla") > 0

    def _has_state(self, layer: int) -> bool:
        return any(name.startswith(_RECURRENT) for name in self.layers[layer])

    def _is_recurrent(self, layer: int) -> bool:
        return self._has_state(layer) and not any(name.startswith(_ATTENTION) for name in self.layers[layer])

    def _kv_width(self, layer: int) -> tuple[int, int]:
        n_head = self.per_layer("attention.head_count_kv", -1)[layer]
        if n_head < 0:
            n_head = self.per_layer("attention.head_count", 0)[layer]
        return n_head * self._head_size("key", layer), n_head * self._head_size("value", layer)

    def _head_size(self, kind: str, layer: int) -> int:
        n_head = self.per_layer("attention.head_count", 0)[0]
        size = self.number(f"attention.{kind}_length", self.width // n_head if n_head else 0)
        slides = self.per_layer("attention.sliding_window_pattern", 0)[layer]
        # As a number the pattern leaves open which layers slide; as an array of truths it says.
        return self.number(f"attention.{kind}_length_swa", size) if slides is True else size


def _blocks() -> dict[str, tuple[int, int]]:
    block = ggml("ggml_blck_size", ctypes.c_int64, ctypes.c_int)
    block_bytes = ggml("ggml_type_size", ctypes.c_size_t, ctypes.c_int)
    types = [i for i in range(lib.GGML_TYPE_COUNT) if block_bytes(i) > 0]  # others were removed
    return {type_name(i).decode(): (block(i), block_bytes(i)) for i in types}


_BLOCKS = _blocks()


def block_numbers(name: str) -> int:
    """Numbers in a block of this type, as ggml names it; 1 for types without blocks."""
    return _BLOCKS[name][0]


def number_bytes(name: str) -> float:
    """Bytes of a number of this type, as ggml names it."""
    n, n_bytes = _BLOCKS[name]
    return n_bytes / n


def n_numbers(tensor: TensorInfo) -> int:
    """How many numbers a tensor has."""
    return round(tensor.size / number_bytes(tensor.type))


def n_bytes(tensors: Mapping[str, TensorInfo]) -> int:
    """Of all these tensors."""
    return sum(tensor.size for tensor in tensors.values())
