"""A small Llama model in torch: parameters under their GGUF names, and the forward pass, with a cache or without."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

with contextlib.suppress(ImportError):  # --help works without
    import torch
    import torch.nn.functional as F

if TYPE_CHECKING:
    from torch import Tensor

CONTEXT_TOKENS = 1024  # what the files allow; text grows weaker past the window
NORM_EPSILON = 1e-5


@dataclass(frozen=True, kw_only=True)
class Shape:
    """Sizes of a model; `width` is a multiple of `heads`."""

    vocabulary: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    wide: int  # of the feed-forward networks
    rope_base: float = 10000.0

    @property
    def head_width(self) -> int:
        """Numbers a head."""
        return self.width // self.heads

    def matrices(self) -> dict[str, tuple[int, int]]:
        """The layers' matrices and the embeddings, (outputs, inputs), under their GGUF names without ".weight"."""
        width, wide, kv_width = self.width, self.wide, self.head_width * self.kv_heads
        block = {"attn_q": (width, width), "attn_k": (kv_width, width), "attn_v": (kv_width, width)}
        block |= {"attn_output": (width, width), "ffn_gate": (wide, width), "ffn_up": (wide, width)}
        block |= {"ffn_down": (width, wide)}
        named = {f"blk.{layer}.{name}": size for layer in range(self.layers) for name, size in block.items()}
        return {"token_embd": (self.vocabulary, width), **named, "output": (self.vocabulary, width)}

    def norms(self) -> list[str]:
        """The norms, each a vector of `width`."""
        named = [f"blk.{layer}.{name}" for layer in range(self.layers) for name in ("attn_norm", "ffn_norm")]
        return [*named, "output_norm"]


@dataclass(frozen=True)
class Model:
    """A Llama model: its shape, and its parameters under their GGUF names."""

    shape: Shape
    weights: dict[str, Tensor] = field(default_factory=dict)

    @classmethod
    def new(cls, shape: Shape) -> Model:
        """A model with random weights, which can be trained."""
        weights = {}
        for name, size in shape.matrices().items():
            # as in GPT-2: what adds up over the layers starts smaller
            residual = name.endswith(("attn_output", "ffn_down"))
            spread = 0.02 / math.sqrt(2 * shape.layers) if residual else 0.02
            weights[f"{name}.weight"] = (spread * torch.randn(size)).requires_grad_()
        for name in shape.norms():
            weights[f"{name}.weight"] = torch.ones(shape.width, requires_grad=True)
        return cls(shape, weights)


class Cache:
    """Keys and values of the tokens so far, one tensor each a layer: (batch, KV heads, positions, head width)."""

    def __init__(self, shape: Shape, batch: int, positions: int) -> None:
        size = (shape.layers, batch, shape.kv_heads, positions, shape.head_width)
        self.keys, self.values = torch.zeros(size), torch.zeros(size)
        self.used = 0


def frequencies(shape: Shape) -> Tensor:
    """Of the rotary positions, falling, in radians a token: (head width / 2,)."""
    return torch.pow(shape.rope_base, -torch.arange(0, shape.head_width, 2) / shape.head_width)


def rotation(shape: Shape, first: int, n: int) -> Tensor:
    """Rotary positions `first` to first + n - 1 as complex numbers, (n, head width / 2)."""
    angles = torch.outer(torch.arange(first, first + n), frequencies(shape))
    return torch.polar(torch.ones_like(angles), angles)


def rotate(x: Tensor, rotation: Tensor) -> Tensor:
    """Rotary positions on neighbouring pairs, llama.cpp's "norm" kind; x is (..., position, head width)."""
    pairs = torch.view_as_complex(x.float().unflatten(-1, (-1, 2)).contiguous())
    return torch.view_as_real(pairs * rotation).flatten(-2)


def states(
    model: Model, tokens: Tensor, *, taps: Sequence[int] = (), cache: Cache | None = None
) -> tuple[Tensor, list[Tensor]]:
    """The normalized last states of `tokens`, (batch, position, width), and the inputs of the layers `taps`.

    With a cache, `tokens` are the next position of each sequence, (batch, 1). Where taps are asked for, layers
    after the last of them are not computed.
    """
    weights = model.weights
    first = cache.used if cache else 0
    turn = rotation(model.shape, first, tokens.shape[1])
    tapped = []

    def norm(x: Tensor, name: str) -> Tensor:
        return F.rms_norm(x, (model.shape.width,), weights[f"{name}.weight"], NORM_EPSILON)

    def linear(x: Tensor, name: str) -> Tensor:
        return F.linear(x, weights[f"{name}.weight"])

    def heads(x: Tensor, name: str) -> Tensor:
        return linear(x, name).unflatten(-1, (-1, model.shape.head_width)).transpose(1, 2)

    x = F.embedding(tokens, weights["token_embd.weight"])
    for layer in range(model.shape.layers):
        if layer in taps:
            tapped.append(x)
            if len(tapped) == len(taps):
                break
        block = f"blk.{layer}"
        y = norm(x, f"{block}.attn_norm")
        query, key, value = (heads(y, f"{block}.attn_{name}") for name in "qkv")
        query, key = rotate(query, turn), rotate(key, turn)
        if cache:
            cache.keys[layer, :, :, first : first + 1], cache.values[layer, :, :, first : first + 1] = key, value
            key, value = cache.keys[layer, :, :, : first + 1], cache.values[layer, :, :, : first + 1]
        group = query.shape[1] // key.shape[1]
        if cache:  # a group's heads as positions of one query: nothing of the cache is copied
            y = F.scaled_dot_product_attention(query.view(key.shape[0], key.shape[1], group, -1), key, value)
            y = y.view(query.shape)
        else:  # repeated rather than enable_gqa: the CPU's fused attention takes these
            key, value = key.repeat_interleave(group, 1), value.repeat_interleave(group, 1)
            y = F.scaled_dot_product_attention(query, key, value, is_causal=True)
        y = linear(y.transpose(1, 2).flatten(-2), f"{block}.attn_output")
        x = x + y
        y = norm(x, f"{block}.ffn_norm")
        y = F.silu(linear(y, f"{block}.ffn_gate")) * linear(y, f"{block}.ffn_up")
        x = x + linear(y, f"{block}.ffn_down")
    if cache:
        cache.used += 1
    return norm(x, "output_norm"), tapped


def logits(model: Model, tokens: Tensor, *, cache: Cache | None = None) -> Tensor:
    """The next token's logits, (batch, position, vocabulary), after each of `tokens`, (batch, position)."""
    return F.linear(states(model, tokens, cache=cache)[0], model.weights["output.weight"])
