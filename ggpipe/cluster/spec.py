"""The description of a cluster in a cluster file or a profile, before models are placed on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ggpipe.cluster.links import LOCAL_SUMS, NETWORK_SKEW, Link, Overheads, Skew, SumTimes
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.profile import RankProfile
from ggpipe.config.layer_split import LayerSplit, LayerSplits

TURNS = 1.06
"""`NodeSpec.turns` if it was not measured. `scripts/bench/stage` measures 1.03 to 1.10 on two virtual cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A machine, or a socket of one, described by its speeds or by a profile."""

    name: str
    cores: int
    memory_bytes: float
    bytes_per_s: float = 0.0
    """Memory throughput of all cores together."""
    core_bytes_per_s: float = 0.0
    core_flop_per_s: float = 0.0
    disk_bytes_per_s: float = 0.0
    """How fast its ranks read the model's file past the page cache; 0: unknown, so that no weights can be streamed."""
    crowd: float | None = None
    """Speed of a core while all others are busy, relative to its speed alone; None: from sharing `bytes_per_s`."""
    turns: float = TURNS
    """Time to decode one row after another rank of the node computed, relative to repeated decodes. More rows take the
    same additional time."""
    guest: float | None = None
    """Speed of a draft that shares busy cores with the target, relative to its speed alone; None: from Linux's
    scheduling weights."""
    profile: RankProfile | None = None
    machine: str = ""
    """Of a socket: the name of its machine. Empty: the node is a whole machine."""
    of_experts: bool = False
    """The profiled model has experts, so that its `weight_bytes` include weights that a row does not use."""

    @property
    def host(self) -> str:
        """The name of the machine."""
        return self.machine or self.name


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """The machines and links of a cluster, and the node of each rank."""

    title: str
    nodes: tuple[NodeSpec, ...]
    target_on: tuple[int, ...]
    """The node of each target rank."""
    draft_on: tuple[int, ...]
    """The node of each draft rank; empty: the head runs the draft."""
    target: ModelShape | None
    draft: ModelShape | None
    network: Link
    """The link between nodes."""
    local: Link
    """The link between ranks of a machine."""
    layer_split: LayerSplit | None = None
    """How the target's layers are divided; None: evenly."""
    draft_layer_splits: LayerSplits = ()
    """How the layers of each draft model are divided; empty: the first one's evenly over all draft ranks."""
    threads: tuple[int, ...] = ()
    """Threads of each rank; empty: each node's cores, divided among its ranks."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """Measured links, by ranks (sender, receiver)."""
    overheads: Overheads = field(default_factory=Overheads)
    sums: Mapping[tuple[int, int], SumTimes] = field(default_factory=dict)
    """Measured sums, by nodes (a, b) with a <= b. (a, a) is between ranks of one node."""
    network_sums: SumTimes | None = None
    """Sums between nodes, if they were not measured; None: as long as a message over `network`."""
    network_skew: Skew = NETWORK_SKEW
    """Skew of sums between nodes, where neither `sums` nor `network_sums` says it."""
    local_sums: SumTimes = LOCAL_SUMS
    """Sums between ranks of a node, if they were not measured."""

    @property
    def drafts(self) -> tuple[ModelShape, ...]:
        """The draft model, if the file describes one."""
        return () if self.draft is None else (self.draft,)

    def sums_between(self, a: int, b: int) -> SumTimes:
        """Times of sums between a rank of node `a` and a rank of node `b`, which may be the same node or machine."""
        if (measured := self.sums.get((min(a, b), max(a, b)))) is not None:
            return measured
        if self.nodes[a].host == self.nodes[b].host:
            return self.local_sums
        return self.network_sums or SumTimes.of_link(self.network, self.network_skew)
