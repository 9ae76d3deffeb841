"""A cluster as a cluster file or a profile describes it, before models are placed on it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ggpipe.cluster.links import LOCAL_SUMS, Link, Overheads, SumTimes
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.profile import RankProfile
from ggpipe.config.layer_split import LayerSplit

TURNS = 1.06
"""`NodeSpec.turns` where it was not measured: `scripts/bench/stage` finds 1.03 to 1.10 on two virtual cores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSpec:
    """A machine: either its speeds are given, or a profile."""

    name: str
    cores: int
    memory_bytes: float
    bytes_per_s: float = 0.0
    """Memory throughput of all cores together."""
    core_bytes_per_s: float = 0.0
    core_flop_per_s: float = 0.0
    crowd: float | None = None
    """Speed of a core while all others are busy, as a share of its speed alone; None: as they share `bytes_per_s`."""
    turns: float = TURNS
    """Time of a decode of one row after another rank of the node computed, relative to decodes in a row; more rows take
    as many seconds more."""
    guest: float | None = None
    """Speed of a draft that shares busy cores with the target, relative to its speed alone; None: by Linux' weights."""
    profile: RankProfile | None = None
    of_experts: bool = False
    """The profiled model has experts: its `weight_bytes` include those that a row does not use."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSpec:
    """Machines, links, and the node of each rank."""

    title: str
    nodes: tuple[NodeSpec, ...]
    target_on: tuple[int, ...]
    """The node of each target rank."""
    draft_on: tuple[int, ...]
    """The node of each draft rank; empty: a draft runs inside the head."""
    target: ModelShape | None
    draft: ModelShape | None
    network: Link
    """The link between nodes."""
    local: Link
    """The link between ranks of a node."""
    layer_split: LayerSplit | None = None
    """How the target's layers are divided; None: evenly."""
    draft_layer_split: LayerSplit | None = None
    """How the draft's layers are divided; None: evenly."""
    threads: tuple[int, ...] = ()
    """Threads of each rank; empty: each node's cores, divided among its ranks."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """Measured links, by (sender, receiver) ranks."""
    overheads: Overheads = field(default_factory=Overheads)
    sums: Mapping[tuple[int, int], SumTimes] = field(default_factory=dict)
    """Measured sums, by two nodes, the lower number first; by one node twice for ranks of that node."""
    network_sums: SumTimes | None = None
    """Sums between nodes that were not measured; None: a message over `network` each."""
    local_sums: SumTimes = LOCAL_SUMS
    """Sums between ranks of a node where that was not measured."""

    def sums_between(self, a: int, b: int) -> SumTimes:
        """Sums between a rank of one node and a rank of another, or of the same."""
        if (measured := self.sums.get((min(a, b), max(a, b)))) is not None:
            return measured
        return self.local_sums if a == b else self.network_sums or SumTimes.of_link(self.network)
