"""From what is known of machines and models to a virtual cluster: who holds which layers, and how long they take."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from ggpipe.core.layout import Layout, lay_out
from ggpipe.errors import UsageError
from ggpipe.sim.cluster import Cluster, Node, Pipeline, Stage
from ggpipe.sim.costs import Cost, Measured, Roofline
from ggpipe.sim.profile import Part, Point
from ggpipe.sim.shapes import ModelShape
from ggpipe.sim.spec import ClusterSpec, NodeSpec

_LAYER_S = 15e-6  # operators wait for all threads, some ten times in a layer
_FLOAT_BYTES = 4
_ALL_EXPERTS = 1_000_000  # rows that use each of them
_MOST_FIXED = 0.25  # of a draft's run, as `measuring.where_nothing_is` has it


@dataclass(frozen=True, slots=True)
class Placement:
    """Which rank is where, and what it gets. Target ranks come first."""

    target_on: tuple[int, ...]
    """The node of each."""
    draft_on: tuple[int, ...] = ()
    """None: the draft, if there is one, runs inside the head."""
    layout: Layout | None = None
    """Of the target's layers; None: even."""
    draft_layout: Layout | None = None
    threads: tuple[int, ...] = ()
    """By rank; none: the node's cores, divided among its ranks."""
    draft_threads: int | None = None
    """Of a draft inside the head; None: as the head's."""

    @property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        return self.target_on + self.draft_on


def placement_of(spec: ClusterSpec, target: ModelShape, draft: ModelShape | None) -> Placement:
    """What a cluster file says. Raises LaunchError for a split that the models' layers do not allow."""
    draft_on = spec.draft_on if draft is not None else ()
    layout = lay_out(target.n_layer, len(spec.target_on), spec.shares)
    draft_layout = None
    if draft is not None and draft_on:
        draft_layout = lay_out(draft.n_layer, len(draft_on), spec.draft_shares or None, len(spec.target_on))
    return Placement(spec.target_on, draft_on, layout, draft_layout, spec.threads[: len(spec.target_on + draft_on)])


def build(spec: ClusterSpec, placement: Placement, target: ModelShape, draft: ModelShape | None) -> Cluster:
    """The virtual cluster."""
    node_of = placement.node_of
    threads = [threads_of(spec, placement, rank) for rank in range(len(node_of))]
    layout = placement.layout or lay_out(target.n_layer, len(placement.target_on), None)
    nodes = [spec.nodes[node] for node in node_of]

    def pipeline(shape: ModelShape, layout: Layout, is_draft: bool) -> Pipeline:
        stages = {}
        for rank in layout.stages:
            n_threads = min(threads[rank], nodes[rank].cores)  # more gain nothing
            cost = stage_cost(nodes[rank], shape, layout.layers_of(rank), n_threads, is_draft)
            profile = nodes[rank].profile
            change_s = profile.change_s if profile is not None else 0.0
            stages[rank] = Stage(n_threads, cost, is_draft and _shared(placement, rank), change_s)
        return Pipeline(layout, stages, shape.width * _FLOAT_BYTES)

    target_pipeline, draft_pipeline = pipeline(target, layout, False), None
    if draft is not None:
        if not placement.draft_on and placement.draft_threads is not None:
            threads[0] = placement.draft_threads
        draft_layout = placement.draft_layout or Layout(((0, draft.n_layer),))
        draft_pipeline = pipeline(draft, draft_layout, True)
    return Cluster(
        spec.title,
        tuple(Node(node.name, node.cores, _crowd(spec, placement, i)) for i, node in enumerate(spec.nodes)),
        node_of,
        target_pipeline,
        draft_pipeline,
        spec.links,
        spec.network,
        spec.local,
        spec.overheads,
    )


def threads_of(spec: ClusterSpec, placement: Placement, rank: int) -> int:
    """A rank's threads: as given, or its part of its node's cores."""
    if placement.threads:
        return placement.threads[rank]
    node = placement.node_of[rank]
    return max(spec.nodes[node].cores // placement.node_of.count(node), 1)


def stage_cost(
    node: NodeSpec, shape: ModelShape, layers: tuple[int, int], threads: int, is_draft: bool = False
) -> Cost:
    """How long layers [a, b) take on a node with so many threads. `is_draft`: of the draft model, for which a profile
    may have times of its own."""
    threads = min(threads, node.cores)
    if node.profile is not None:
        if is_draft and node.profile.draft is not None:
            return _measured_draft(node, node.profile.draft, shape, layers, threads)
        return _measured(node, shape, layers, threads)
    unused = 1 - shape.n_experts_used / shape.n_experts if shape.n_experts else 0.0
    return Roofline(
        shape.read_bytes(layers, _ALL_EXPERTS),
        shape.cell_bytes(layers),
        shape.token_flop(layers),
        min(node.bytes_per_s, threads * node.core_bytes_per_s),
        threads * node.core_flop_per_s,
        _LAYER_S * (layers[1] - layers[0]),
        shape.expert_bytes(layers),
        unused,
    )


def with_split(
    spec: ClusterSpec, shares: tuple[float, ...] | None, draft_shares: tuple[float, ...] = ()
) -> ClusterSpec:
    """The cluster with its ranks and layers divided as `--mpi-layer-split` says (`core.layout.parse_shares`).

    Ranks stay where they are; shares for the target's ranks alone leave the draft's out. Raises UsageError when shares
    and ranks differ in number.
    """
    if shares is None:
        return spec
    n_target, n_draft, places = len(shares), len(draft_shares), spec.target_on + spec.draft_on
    if n_target + n_draft != len(places) and (n_target, n_draft) != (len(spec.target_on), 0):
        raise UsageError(
            f"--mpi-layer-split names {n_target + n_draft} ranks, and the cluster has {len(places)}: give a share for "
            "each, or change target_on and draft_on in its file"
        )
    target_on, draft_on = places[:n_target], places[n_target : n_target + n_draft]
    threads = spec.threads[: n_target + n_draft]
    return replace(
        spec, target_on=target_on, draft_on=draft_on, shares=shares, draft_shares=draft_shares, threads=threads
    )


def _measured(node: NodeSpec, shape: ModelShape, layers: tuple[int, int], threads: int) -> Measured:
    """From the measured layers to these by the bytes that they read; threads share the work evenly."""
    profile = node.profile
    assert profile is not None
    n_bytes = shape.read_bytes(layers, _ALL_EXPERTS if node.of_experts and shape.n_experts else 1)
    ratio = min(profile.threads, node.cores) / threads
    return Measured(profile.alone, n_bytes / profile.weight_bytes * ratio, profile.fixed_s)


def _measured_draft(node: NodeSpec, part: Part, shape: ModelShape, layers: tuple[int, int], threads: int) -> Measured:
    """From the whole draft that was measured to these layers of this one. `fixed_s` was found with the target, and may
    be more than a small draft takes."""
    profile = node.profile
    assert profile is not None
    ratio = min(profile.threads, node.cores) / threads
    fastest_s = min(point.seconds for point in part.alone if point.rows == 1)
    fixed_s = min(profile.fixed_s, fastest_s * _MOST_FIXED)
    points = (*part.alone, *_rise(part.alone, profile.alone))
    return Measured(points, shape.read_bytes(layers, _ALL_EXPERTS) / part.weight_bytes * ratio, fixed_s)


def _rise(draft: Sequence[Point], target: Sequence[Point]) -> Iterator[Point]:
    """What the draft takes in a long context, as much more as the target: for a draft that had no time for one."""
    pasts = sorted({point.n_past for point in target})
    if len({point.n_past for point in draft}) > 1 or pasts[-1] <= draft[0].n_past:
        return
    short, long = ({p.rows: p.seconds for p in target if p.n_past == past} for past in (pasts[0], pasts[-1]))
    for point in draft:
        if point.rows in short and point.rows in long:
            yield Point(point.rows, pasts[-1], point.seconds * long[point.rows] / short[point.rows])


def _crowd(spec: ClusterSpec, placement: Placement, number: int) -> float:
    """A node's `Cores.crowd`: as it is known, else as its ranks share its memory."""
    node = spec.nodes[number]
    if node.crowd is not None:
        return node.crowd
    shares = []
    for rank, place in enumerate(placement.node_of):
        if place == number:
            threads = min(threads_of(spec, placement, rank), node.cores)
            alone = min(node.bytes_per_s, threads * node.core_bytes_per_s)
            shares.append(min(node.bytes_per_s * threads / node.cores / alone, 1.0))
    return statistics.fmean(shares) if shares else 1.0


def _shared(placement: Placement, rank: int) -> bool:
    """The draft's rank shares its node with ranks of the target."""
    return placement.node_of[rank] in placement.target_on
