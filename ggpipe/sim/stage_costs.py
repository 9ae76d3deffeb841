"""What runs cost in a stage, from the speed of its node or from a profile of it, and from what it streams."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from ggpipe.cluster.memory import streamed, weight_bytes
from ggpipe.cluster.model_shape import ALL_EXPERTS, ModelShape
from ggpipe.cluster.profile import MeasuredLayers, Point, RankProfile
from ggpipe.cluster.spec import NodeSpec
from ggpipe.sim.costs import Cost, MeasuredCost, Roofline, StreamedCost

_LAYER_S = 15e-6  # operators wait for all threads, some ten times in a layer
_MOST_FIXED = 0.25  # of a draft's run, as in `stage_timing.intercept_s`


def stage_cost(
    node: NodeSpec, shape: ModelShape, layers: tuple[int, int], threads: int, is_draft: bool = False
) -> Cost:
    """The cost of layers [a, b) on a node with `threads` threads. `is_draft`: the layers are a draft model's, for
    which a profile may have times of its own. Of a part of a group, `shape` is that of the part, and `group_cost` comes
    on top."""
    threads = min(threads, node.cores)
    if node.profile is not None:
        if is_draft and (part := _most_alike(node.profile, shape)) is not None:
            return _measured_draft(node, part, shape, layers, threads)
        return _measured(node, shape, layers, threads)
    return Roofline(
        weight_bytes=shape.read_bytes(layers, ALL_EXPERTS),
        cell_bytes=shape.cell_bytes(layers),
        state_bytes=shape.state_traffic(layers),
        attention=shape.attention(layers),
        token_flop=shape.token_flop(layers),
        bytes_per_s=min(node.bytes_per_s, threads * node.core_bytes_per_s),
        flop_per_s=threads * node.core_flop_per_s,
        fixed_s=_LAYER_S * (layers[1] - layers[0]),
        expert_bytes=shape.expert_bytes(layers),
        untouched=_unused(shape),
    )


def state_s(node: NodeSpec, shape: ModelShape, layers: tuple[int, int], threads: int) -> float:
    """`StageSpec.state_s`."""
    bytes_per_s = min(node.bytes_per_s, threads * node.core_bytes_per_s)
    if node.profile is not None:
        bytes_per_s = node.profile.memory_bytes_per_s * threads / min(node.profile.threads, node.cores)
    return shape.state_traffic(layers) / bytes_per_s if bytes_per_s else 0.0


def _unused(shape: ModelShape) -> float:
    """Share of the experts that a token does not use."""
    return 1 - shape.n_expert_used / shape.n_expert if shape.n_expert else 0.0


def streamed_cost(
    cost: Cost, node: NodeSpec, shape: ModelShape, layers: tuple[int, int], missing_bytes: float, n_readers: int = 1
) -> Cost:
    """The cost of layers [a, b) if this much of their weights is not in memory. `cost`: with all weights in memory.
    `n_readers`: parts of the group that share the node's disk. Other stages are assumed to read at other times.

    Raises ValueError if the node cannot stream as much.
    """
    if missing_bytes <= 0:
        return cost
    read = streamed(shape, layers, weight_bytes(shape, layers) - missing_bytes)
    if read is None or not node.disk_bytes_per_s:
        raise ValueError(f"{node.name} cannot stream {missing_bytes:.3g} bytes of weights")
    return StreamedCost(
        in_memory=cost,
        run_bytes=read.run_bytes,
        expert_bytes=read.expert_share * shape.expert_bytes(layers),
        untouched=_unused(shape),
        bytes_per_s=node.disk_bytes_per_s / n_readers,
    )


def _measured(node: NodeSpec, shape: ModelShape, layers: tuple[int, int], threads: int) -> MeasuredCost:
    """Scale the measured layers' times by the bytes that these layers read; threads share the work evenly."""
    profile = node.profile
    assert profile is not None
    n_bytes = shape.read_bytes(layers, ALL_EXPERTS if node.of_experts and shape.n_expert else 1)
    ratio = min(profile.threads, node.cores) / threads
    cell_s = shape.cell_bytes(layers) / profile.memory_bytes_per_s * ratio if profile.memory_bytes_per_s else 0.0
    return MeasuredCost(profile.alone, n_bytes / profile.weight_bytes * ratio, profile.fixed_s, cell_s)


def _measured_draft(
    node: NodeSpec, part: MeasuredLayers, shape: ModelShape, layers: tuple[int, int], threads: int
) -> MeasuredCost:
    """Scale the measured draft's times to these layers of this draft. `fixed_s` was measured with the target, and may
    be more than a small draft takes."""
    profile = node.profile
    assert profile is not None
    ratio = min(profile.threads, node.cores) / threads
    fastest_s = min(point.seconds for point in part.alone if point.rows == 1)
    fixed_s = min(profile.fixed_s, fastest_s * _MOST_FIXED)
    points = (*part.alone, *_rise(part.alone, profile.alone))
    return MeasuredCost(points, shape.read_bytes(layers, ALL_EXPERTS) / part.weight_bytes * ratio, fixed_s)


def _most_alike(profile: RankProfile, shape: ModelShape) -> MeasuredLayers | None:
    """The measured draft model that is this one, or is nearest to it in size; None if none was measured."""
    n_bytes = max(shape.read_bytes((0, shape.n_layer), ALL_EXPERTS), 1)
    measured = [part for part in profile.drafts if part is not None]
    return min(measured, key=lambda part: abs(math.log(part.weight_bytes / n_bytes)), default=None)


def change_s(node: NodeSpec, shape: ModelShape, layers: tuple[int, int], is_draft: bool) -> float:
    """`StageSpec.change_s`, by the number of layers: a graph has nodes for each of them."""
    if node.profile is None:
        return 0.0
    measured: MeasuredLayers | RankProfile = node.profile
    if is_draft and (part := _most_alike(node.profile, shape)) is not None:
        measured = part
    a, b = measured.layers
    return measured.change_s * (layers[1] - layers[0]) / (b - a)


def _rise(draft: Sequence[Point], target: Sequence[Point]) -> Iterator[Point]:
    """The draft's times in a long context, by the target's ratio: for a draft that was measured in a short one only."""
    pasts = sorted({point.n_past for point in target})
    if len({point.n_past for point in draft}) > 1 or pasts[-1] <= draft[0].n_past:
        return
    short, long = ({p.rows: p.seconds for p in target if p.n_past == past} for past in (pasts[0], pasts[-1]))
    for point in draft:
        if point.rows in short and point.rows in long:
            yield Point(point.rows, pasts[-1], point.seconds * long[point.rows] / short[point.rows])
