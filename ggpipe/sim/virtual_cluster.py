"""The virtual cluster: nodes, the ranks on them, their stages, the links between them.

It is built from a `ClusterSpec`, the models' shapes and a `VirtualPlacement`: which rank holds which layers on which
node.
"""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ggpipe.cluster.links import Link, Overheads
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.layer_split import LayerSplit, LayerSplits, n_ranks_of
from ggpipe.config.pipeline import TensorWire
from ggpipe.core.layout import Layout, decimal_split, lay_out, part_shares
from ggpipe.core.row_work import ONLY_WEIGHTS, RowWork
from ggpipe.errors import SettingError
from ggpipe.sim.cores import NICE_WEIGHT, weight_of
from ggpipe.sim.costs import Cost
from ggpipe.sim.groups import GroupCost, group_cost
from ggpipe.sim.stage_costs import change_s, stage_cost, state_s, streamed_cost


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualNode:
    """A machine, or a socket of one."""

    name: str
    cores: int
    machine: str = ""
    """Of a socket: the name of its machine."""
    crowd: float = 1.0
    """Speed of a core while all others of its node are busy, as a share of its speed alone."""
    turns: float = 1.0
    """Time of a decode after another rank of the node computed, relative to decodes in a row."""
    nice_weight: float = NICE_WEIGHT
    """Share of a core of a stage at nice 5, relative to an ordinary thread's."""

    @property
    def host(self) -> str:
        """The name of the machine."""
        return self.machine or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class StageSpec:
    """A rank's part of a pipeline: a stage, or its part of one that a group computes."""

    threads: int
    cost: Cost
    state_s: float | None = None
    """Of a recurrent model, of which sequences with unequal numbers of rows are computed in several batches: what each
    sequence beyond a batch's first one takes for its state."""
    nice: bool = False
    """It runs at nice 5: others on its cores come first."""
    change_s: float = 0.0
    """Extra time of a run with another number of rows than the run before."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PipelineSpec:
    """A model over some ranks."""

    layout: Layout
    stages: Mapping[int, StageSpec]
    """The stage of each rank that holds layers."""
    row_bytes: int
    """Bytes that go to the next stage for each row."""
    groups: Mapping[int, GroupCost] = field(default_factory=dict)
    """What a group adds to the time of its slowest part, by part 0's rank."""
    work: RowWork = ONLY_WEIGHTS
    """The work of the model's rows."""
    rolls_back: bool = True
    """See `Limits`."""
    drafter: str = "draft"
    """Of a draft model: the kind of its drafter, as in `registry`."""
    taps: tuple[int, ...] = ()
    """Of a draft head, or of MTP layers: the target's layers whose inputs they read, each `tap_bytes` a row."""
    tap_bytes: int = 0
    horizon: int | None = None
    """See `ModelShape`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualCluster:
    """A cluster with models on it, ready to be simulated."""

    title: str
    nodes: tuple[VirtualNode, ...]
    node_of: tuple[int, ...]
    """The node of each rank."""
    target: PipelineSpec
    drafts: tuple[PipelineSpec, ...]
    links: Mapping[tuple[int, int], Link]
    """Links by (sender, receiver) where they differ from `network` and `local`."""
    network: Link
    """The link between nodes."""
    local: Link
    """The link between ranks of a machine."""
    overheads: Overheads = field(default_factory=Overheads)

    def link(self, source: int, target: int) -> Link:
        """The link from rank to rank."""
        if (link := self.links.get((source, target))) is not None:
            return link
        return self.local if self.host(source) == self.host(target) else self.network

    def host(self, rank: int) -> str:
        """The name of a rank's machine. A machine with several sockets has several nodes."""
        return self.nodes[self.node_of[rank]].host


@dataclass(frozen=True, slots=True, kw_only=True)
class VirtualPlacement:
    """The node, layers and threads of each rank. Target ranks come first."""

    target_on: tuple[int, ...]
    """The node of each target rank."""
    draft_on: tuple[int, ...] = ()
    """The node of each draft rank, those of the first draft model first."""
    layout: Layout | None = None
    """The target's layers; None: an even split."""
    draft_layouts: tuple[Layout | None, ...] = ()
    """The layers of each draft model; None, or too few: it runs inside the head."""
    threads: tuple[int, ...] = ()
    """Threads of each rank; empty: the node's cores, divided among its ranks."""
    draft_threads: int | None = None
    """Threads of a draft inside the head; None: as the head's."""
    tensor_split: tuple[float, ...] = ()
    """See `PipelineConfig`."""
    tensor_wire: TensorWire = "f32"
    """See `PipelineConfig`."""
    streamed_bytes: tuple[float, ...] = ()
    """Bytes of each rank's weights that are not in memory; empty: all are."""

    @property
    def node_of(self) -> tuple[int, ...]:
        """The node of each rank."""
        return self.target_on + self.draft_on

    @property
    def has_groups(self) -> bool:
        """Some of the target's layers are on several ranks."""
        return self.layout is not None and any(len(stage.ranks) > 1 for stage in self.layout.stages)

    @property
    def layer_splits(self) -> LayerSplits:
        """How the user would write this."""
        splits = [None if own is None else decimal_split(own) for own in (self.layout, *self.draft_layouts)]
        while splits and splits[-1] is None:
            splits.pop()
        return tuple(splits)

    @property
    def group_sizes(self) -> frozenset[int]:
        """Ranks of its groups; empty where each stage has one rank."""
        return frozenset(size for own in (self.layout, *self.draft_layouts) if own for size in own.group_sizes)

    def draft_layout(self, number: int) -> Layout | None:
        """The layers of a draft model, counted from 0; None: it runs inside the head."""
        return self.draft_layouts[number] if number < len(self.draft_layouts) else None


def with_drafts(spec: ClusterSpec, n_drafts: int) -> ClusterSpec:
    """The cluster with ranks for that many draft models. One that it has no rank for gets a machine like that of the
    first one, or runs inside the head as that does."""
    splits = spec.draft_layer_splits
    if n_drafts < 2 or len(splits) >= n_drafts or not spec.draft_on:
        return spec
    n_first = len(spec.draft_on)
    splits = splits or (LayerSplit((1 / n_first,) * n_first),)
    more = range(n_drafts - len(splits))
    machine = spec.nodes[spec.draft_on[0]]
    threads = spec.threads and spec.threads + spec.threads[len(spec.target_on) :][:1] * len(more)
    return replace(
        spec,
        nodes=(*spec.nodes, *(replace(machine, name=f"{machine.name}-{len(splits) + i + 1}") for i in more)),
        draft_on=(*spec.draft_on, *(len(spec.nodes) + i for i in more)),
        draft_layer_splits=(*splits, *(LayerSplit((1.0,)) for _ in more)),
        threads=threads,
    )


def placement_of(spec: ClusterSpec, target: ModelShape, drafts: Sequence[ModelShape]) -> VirtualPlacement:
    """The placement in a cluster file. Raises LaunchError for a split that the models' layers do not allow."""
    head, layouts = len(spec.target_on), []
    for number, draft in enumerate(drafts):
        split = next(iter(spec.draft_layer_splits[number : number + 1]), None)
        n_ranks = split.n_ranks if split is not None else 0
        if not spec.draft_layer_splits and not number:
            n_ranks = len(spec.draft_on)
        layouts.append(lay_out(draft.n_layer, n_ranks, split, head) if n_ranks else None)
        head += n_ranks
    return VirtualPlacement(
        target_on=spec.target_on,
        draft_on=spec.draft_on[: head - len(spec.target_on)],
        layout=lay_out(target.n_layer, len(spec.target_on), spec.layer_split),
        draft_layouts=tuple(layouts),
        threads=spec.threads[:head],
    )


def build(
    spec: ClusterSpec, placement: VirtualPlacement, target: ModelShape, drafts: Sequence[ModelShape]
) -> VirtualCluster:
    """The virtual cluster."""
    node_of = placement.node_of
    threads = [threads_of(spec, placement, rank) for rank in range(len(node_of))]
    layout = placement.layout or lay_out(target.n_layer, len(placement.target_on), None)
    nodes = [spec.nodes[node] for node in node_of]

    def pipeline(shape: ModelShape, layout: Layout, is_draft: bool) -> PipelineSpec:
        stages, groups = {}, {}
        for stage in layout.stages:
            shares = part_shares(len(stage.ranks), placement.tensor_split)
            for rank, share in zip(stage.ranks, shares, strict=True):
                n_threads = min(threads[rank], nodes[rank].cores)  # more threads gain nothing
                part = shape.part(share)
                cost = stage_cost(nodes[rank], part, stage.layers, n_threads, is_draft)
                if not is_draft and placement.streamed_bytes:
                    missing = placement.streamed_bytes[rank]
                    n_readers = [node_of[other] for other in stage.ranks].count(node_of[rank])
                    cost = streamed_cost(cost, nodes[rank], part, stage.layers, missing, n_readers)
                stages[rank] = StageSpec(
                    threads=n_threads,
                    cost=cost,
                    state_s=state_s(nodes[rank], part, stage.layers, n_threads) if part.is_recurrent else None,
                    nice=is_draft and _shared(placement, rank),
                    change_s=change_s(nodes[rank], shape, stage.layers, is_draft),
                )
            if len(shares) > 1:
                places = [node_of[rank] for rank in stage.ranks]
                most = max(stages[rank].threads for rank in stage.ranks)
                groups[stage.ranks[0]] = group_cost(spec, shape, stage.layers, places, most, placement.tensor_wire)
        return PipelineSpec(
            layout=layout,
            stages=stages,
            row_bytes=shape.border_bytes,
            groups=groups,
            work=shape.work,
            rolls_back=is_draft or not shape.is_recurrent,
            drafter=shape.drafter,
            taps=shape.taps,
            tap_bytes=target.tap_bytes,
            horizon=shape.horizon,
        )

    target_pipeline, draft_pipelines = pipeline(target, layout, False), []
    for number, draft in enumerate(drafts):
        draft_layout = placement.draft_layout(number)
        if draft_layout is None:
            draft_layout = Layout.of_ranks([(0, draft.n_layer)])
            if placement.draft_threads is not None:
                threads[0] = placement.draft_threads
        draft_pipelines.append(pipeline(draft, draft_layout, True))
    return VirtualCluster(
        title=spec.title,
        nodes=tuple(_node(spec, placement, i) for i in range(len(spec.nodes))),
        node_of=node_of,
        target=target_pipeline,
        drafts=tuple(draft_pipelines),
        links=spec.links,
        network=spec.network,
        local=spec.local,
        overheads=spec.overheads,
    )


def threads_of(spec: ClusterSpec, placement: VirtualPlacement, rank: int) -> int:
    """A rank's threads: as given, or its part of its node's cores."""
    if placement.threads:
        return placement.threads[rank]
    node = placement.node_of[rank]
    return max(spec.nodes[node].cores // placement.node_of.count(node), 1)


def with_splits(spec: ClusterSpec, splits: LayerSplits) -> ClusterSpec:
    """The cluster with its ranks and layers divided by these shares.

    Ranks stay where they are; shares for the target's ranks alone leave the draft's out. Raises UsageError when shares
    and ranks differ in number.
    """
    n_target, n_draft, places = n_ranks_of(splits[:1]), n_ranks_of(splits[1:]), spec.target_on + spec.draft_on
    if n_target + n_draft != len(places) and (n_target, n_draft) != (len(spec.target_on), 0):
        raise SettingError(
            "layer_split",
            f"names {n_target + n_draft} ranks, and the cluster has {len(places)}",
            "give a share for each, or change target_on and draft_on in its file",
        )
    target_on, draft_on = places[:n_target], places[n_target : n_target + n_draft]
    threads = spec.threads[: n_target + n_draft]
    return replace(
        spec,
        target_on=target_on,
        draft_on=draft_on,
        layer_split=splits[0],
        draft_layer_splits=splits[1:],
        threads=threads,
    )


def _node(spec: ClusterSpec, placement: VirtualPlacement, number: int) -> VirtualNode:
    node, crowd = spec.nodes[number], _crowd(spec, placement, number)
    nice_weight = NICE_WEIGHT if node.guest is None else weight_of(node.guest, node.cores, crowd)
    return VirtualNode(
        name=node.name, cores=node.cores, machine=node.machine, crowd=crowd, turns=node.turns, nice_weight=nice_weight
    )


def _crowd(spec: ClusterSpec, placement: VirtualPlacement, number: int) -> float:
    """A node's `Cores.crowd`: as given, else as its ranks share its memory throughput."""
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


def _shared(placement: VirtualPlacement, rank: int) -> bool:
    """The draft's rank shares its node with ranks of the target."""
    return placement.node_of[rank] in placement.target_on
