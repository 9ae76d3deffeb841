"""Where a group's parts cut weights for which libllama's own split function has no rule.

    cuts(file, (1.0, 1.0))["blk.3.attn_q_b.weight"]  # Cut(axis=1, pieces=(64, 64))

Latent attention (MLA) is divided by query heads: each part has its heads' rows of the query projection, their
matrices between the latent space and the heads, and their columns of the output projection. The latent KV cache has
no heads, so each part holds all of it. DeepSeek-V4 projects the results of several heads together, so there these are
not separated. In hybrid models, attention is divided by KV heads, and gated delta nets by key heads: libllama would
divide their other recurrent layers too, or do so in proportions that do not match. Experts that all tokens use are
divided as routed ones are, by columns; and small routed ones more evenly than libllama does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from operator import truediv

from ggpipe.llama.gguf import ModelFile, TensorInfo
from ggpipe.llama.model_header import ModelHeader, block_numbers, n_numbers

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


@dataclass(frozen=True)
class _Heads:
    """A layer's heads, and which of its weights and caches have them."""

    n: int
    step: int
    """Between how many of them the blocks of the output projection end."""
    cuts: Callable[[tuple[int, ...]], dict[str, Cut]]


def cuts(file: ModelFile, shares: Sequence[float], by_heads: bool) -> dict[str, Cut]:
    """Cuts by the names of weights, and of caches. `shares`: of each part, at any scale. `by_heads`: heads are divided.

    A weight of too few blocks for two parts has no cut: each part holds all of it.
    """
    header = ModelHeader(file)
    found: dict[str, Cut] = {}
    for layer, tensors in enumerate(header.layers):
        of_layer = _of_shared_experts(header, layer, shares) | _of_experts(header, layer, shares)
        heads = _heads(header, layer) if by_heads else None
        if heads and heads.n > heads.step:
            of_layer |= heads.cuts(_pieces(heads.n, heads.step, shares, layer))
        found |= {f"blk.{layer}.{name}": cut for name, cut in of_layer.items() if name in tensors}
        found |= {f"{name}_l{layer}": cut for name, cut in of_layer.items() if name.startswith("cache_")}
    return found


def most_parts_by_heads(file: ModelFile) -> int:
    """How many parts have heads to compute in each layer that has any, at most; 1 where none has."""
    header = ModelHeader(file)
    all_heads = [heads for layer in range(header.n_layer) if (heads := _heads(header, layer))]
    return min((heads.n // heads.step for heads in all_heads), default=1)


def _heads(header: ModelHeader, layer: int) -> _Heads | None:
    tensors = header.layers[layer]
    if any("attn_k_b.weight" in each for each in header.layers):
        if "attn_k_b.weight" not in tensors:
            return None
        n_heads = header.per_layer("attention.head_count", 1)[layer]
        return _Heads(n_heads, _step(header, tensors["attn_output.weight"], n_heads), _of_latent)
    if "attn_output_a.weight" in tensors:
        n_groups = header.number("attention.output_group_count")
        return _Heads(n_groups, _step(header, tensors["attn_output_b.weight"], n_groups), _of_output_groups)
    if "ssm_ba.weight" in tensors and "attn_qkv.weight" in tensors:
        n_heads = header.number("ssm.group_count")
        ratio = header.number("ssm.time_step_rank") // n_heads
        step = _step(header, tensors["ssm_out.weight"], n_heads)
        return _Heads(n_heads, step, lambda pieces: _of_delta_net(pieces, ratio))
    if "attn_k.weight" in tensors:
        n_heads = header.per_layer("attention.head_count_kv", header.number("attention.head_count"))[layer]
        return _Heads(n_heads, _step(header, tensors["attn_output.weight"], n_heads), _of_kv_heads)
    return None


def _step(header: ModelHeader, output: TensorInfo, n_heads: int) -> int:
    width = n_numbers(output) // (header.width * n_heads)  # of what a head gives
    return math.lcm(block_numbers(output.type), width) // width


def _of_latent(pieces: tuple[int, ...]) -> dict[str, Cut]:
    axes = {"q": 1, "q_b": 1, "k_b": 2, "v_b": 2, "gate": 1, "sinks": 0, "output": 0}
    return {f"attn_{name}.weight": Cut(axis, pieces) for name, axis in axes.items()}


def _of_output_groups(pieces: tuple[int, ...]) -> dict[str, Cut]:
    """By groups of heads, each of which has an output projection."""
    axes = {"q_b": 1, "sinks": 0, "output_a": 2, "output_b": 0}
    return {f"attn_{name}.weight": Cut(axis, pieces) for name, axis in axes.items()}


def _of_kv_heads(pieces: tuple[int, ...]) -> dict[str, Cut]:
    rows = {f"attn_{name}.{kind}": Cut(axis, pieces) for name in "qkv" for kind, axis in (("weight", 1), ("bias", 0))}
    return {"attn_output.weight": Cut(0, pieces), "cache_k": Cut(0, pieces), "cache_v": Cut(0, pieces), **rows}


def _of_delta_net(pieces: tuple[int, ...], ratio: int) -> dict[str, Cut]:
    """By key heads, each with its value heads, which are `ratio` times as many."""
    qkv = ((1, 2), (ratio, 1))
    rows = {name: Cut(1, pieces) for name in ("attn_gate.weight", "ssm_ba.weight")}
    columns = {name: Cut(0, pieces) for name in ("ssm_dt.bias", "ssm_a", "ssm_out.weight", "cache_s")}
    mixed = {name: Cut(1, pieces, qkv) for name in ("attn_qkv.weight", "ssm_conv1d.weight")}
    return rows | columns | mixed | {"cache_r": Cut(0, pieces, qkv)}


def _of_shared_experts(header: ModelHeader, layer: int, shares: Sequence[float]) -> dict[str, Cut]:
    down = header.layers[layer].get("ffn_down_shexp.weight")
    if down is None:
        return {}
    columns, step = n_numbers(down) // header.width, math.lcm(block_numbers(down.type), _MIN_COLUMNS)
    return _of_columns(header, layer, "shexp", _pieces(columns, step, shares, layer)) if columns > step else {}


def _of_experts(header: ModelHeader, layer: int, shares: Sequence[float]) -> dict[str, Cut]:
    """libllama cuts experts after multiples of 128 columns. Where experts are small, shorter pieces are more even.
    Where gate and up are one tensor, it ends the process if the model does not name its experts' width.
    """
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
    if is_better or "ffn_gate_up_exps.weight" in tensors:
        return _of_columns(header, layer, "exps", own if is_better else usual)
    return {}


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
