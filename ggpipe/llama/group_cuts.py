"""Where a group's parts cut weights for which libllama's own split function has no rule.

    cuts(file, (1.0, 1.0))["blk.3.attn_q_b.weight"]  # Cut(axis=1, pieces=(64, 64))

Latent attention (MLA) is divided by query heads: each part has its heads' rows of the query projection, their matrices
between the latent space and the heads, and their columns of the output projection. The latent KV cache has no heads, so
each part holds all of it. Experts that all tokens use are divided as routed ones are, by columns; and small routed ones
more evenly than libllama does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from operator import truediv

from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_header import ModelHeader, block_numbers, n_numbers

_OF_HEADS = {
    "attn_q.weight": 1,
    "attn_q_b.weight": 1,
    "attn_k_b.weight": 2,
    "attn_v_b.weight": 2,
    "attn_gate.weight": 1,
    "attn_sinks.weight": 0,
    "attn_output.weight": 0,
}
"""The dimension of the heads, as ggml numbers them; 0 is along rows."""
LATENT_WEIGHTS = tuple(_OF_HEADS)
_MIN_COLUMNS, _USUAL_COLUMNS = 32, 128
"""Experts are cut after multiples of these: by us (repacked weights come in up to 16 rows), and by libllama."""


@dataclass(frozen=True)
class Cut:
    """How one weight is divided."""

    axis: int
    """The dimension that is cut; 0 is along rows."""
    pieces: tuple[int, ...]
    """How many pieces each part gets, in their order. All pieces of a weight have the same length."""
    segments: tuple[tuple[int, int], ...] = ((1, 1),)
    """What lies along the axis, one after another, and is cut alike: the relative length of a piece, and how often
    such a segment comes. Gate and up in one tensor are ((1, 2),)."""


def cuts(file: ModelFile, shares: Sequence[float], is_latent: bool) -> dict[str, Cut]:
    """Cuts by the names of weights. `shares`: of each part, at any scale. `is_latent`: latent attention is divided.

    A weight of too few blocks for two parts has no cut: each part holds all of it.
    """
    header = ModelHeader(file)
    found: dict[str, Cut] = {}
    for layer, tensors in enumerate(header.layers):
        of_layer = _of_heads(header, layer, shares) if is_latent else {}
        of_layer |= _of_shared_experts(header, layer, shares) | _of_experts(header, layer, shares)
        found |= {f"blk.{layer}.{name}": cut for name, cut in of_layer.items() if name in tensors}
    return found


def most_latent_parts(file: ModelFile) -> int:
    """How many parts have heads to compute in each layer, at most."""
    header = ModelHeader(file)
    steps = [step for layer in range(header.n_layer) if (step := _head_step(header, layer))]
    return min((n_heads // step for n_heads, step in steps), default=1)


def _of_heads(header: ModelHeader, layer: int, shares: Sequence[float]) -> dict[str, Cut]:
    if (found := _head_step(header, layer)) is None:
        return {}
    n_heads, step = found
    if n_heads <= step:
        return {}
    pieces = _pieces(n_heads, step, shares, layer)
    return {name: Cut(axis, pieces) for name, axis in _OF_HEADS.items()}


def _head_step(header: ModelHeader, layer: int) -> tuple[int, int] | None:
    """Heads of a layer's latent attention, and between how many of them the output projection's blocks end."""
    tensors = header.layers[layer]
    if "attn_k_b.weight" not in tensors:
        return None
    n_heads = header.per_layer("attention.head_count", 1)[layer]
    output = tensors["attn_output.weight"]
    width = n_numbers(output) // (header.width * n_heads)  # of a head's values
    block = block_numbers(output.type)
    return n_heads, math.lcm(block, width) // width


def _of_shared_experts(header: ModelHeader, layer: int, shares: Sequence[float]) -> dict[str, Cut]:
    down = header.layers[layer].get("ffn_down_shexp.weight")
    if down is None:
        return {}
    columns, step = n_numbers(down) // header.width, math.lcm(block_numbers(down.type), _MIN_COLUMNS)
    return _of_columns(header, layer, "shexp", _pieces(columns, step, shares, layer)) if columns > step else {}


def _of_experts(header: ModelHeader, layer: int, shares: Sequence[float]) -> dict[str, Cut]:
    """libllama cuts experts after multiples of 128 columns. Where experts are small, shorter pieces are more even."""
    tensors = header.layers[layer]
    down = tensors.get("ffn_down_exps.weight")
    if down is None or "ffn_down_exps.bias" in tensors:  # libllama adds the bias where it thinks that columns are
        return {}
    columns = header.per_layer("expert_feed_forward_length", header.number("feed_forward_length"))[layer]
    if n_numbers(down) != columns * header.width * header.number("expert_count"):
        return {}
    block = block_numbers(down.type)
    own, usual = (_pieces(columns, math.lcm(block, n), shares, layer) for n in (_MIN_COLUMNS, _USUAL_COLUMNS))
    is_better = max(map(truediv, own, shares)) < max(map(truediv, usual, shares))
    return _of_columns(header, layer, "exps", own) if is_better else {}


def _of_columns(header: ModelHeader, layer: int, kind: str, pieces: tuple[int, ...]) -> dict[str, Cut]:
    tensors = header.layers[layer]
    down = n_numbers(tensors[f"ffn_down_{kind}.weight"])
    found = {f"ffn_down_{kind}.weight": Cut(0, pieces)}
    for name in (f"ffn_{name}_{kind}" for name in ("gate", "up", "gate_up")):
        if matrix := tensors.get(f"{name}.weight"):
            segments = ((1, n_numbers(matrix) // down),)
            found |= {f"{name}.weight": Cut(1, pieces, segments), f"{name}.bias": Cut(0, pieces, segments)}
    return found


def _pieces(n: int, step: int, shares: Sequence[float], layer: int) -> tuple[int, ...]:
    """`n` pieces by the parts' shares, cut only after multiples of `step`.

    As libllama does it: each layer begins with another part, so that it is not always the same one that gets more.
    """
    order = [(layer + i) % len(shares) for i in range(len(shares))]
    counts = [0] * len(shares)
    cut, share = 0, 0.0
    for part in order:
        share += shares[part]
        end = n if part == order[-1] else int(n * share / sum(shares) + 1e-6) // step * step
        counts[part], cut = end - cut, end
    return tuple(counts)
