"""What is known of a cluster before models are put on it: from a cluster file, or from a profile."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ggpipe.sim.cluster import Link, Overheads
from ggpipe.sim.profile import RankProfile
from ggpipe.sim.shapes import ModelShape


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """What a machine has. Either its speeds or a profile."""

    name: str
    cores: int
    memory_bytes: float
    bytes_per_s: float = 0.0
    """What all cores read together."""
    core_bytes_per_s: float = 0.0
    core_flop_per_s: float = 0.0
    crowd: float | None = None
    """Speed of a core while all others are busy, as a share; None: as they share `bytes_per_s`."""
    profile: RankProfile | None = None
    of_experts: bool = False
    """The profiled model has experts: its `weight_bytes` count those that a row does not use."""


@dataclass(frozen=True, slots=True)
class ClusterSpec:
    """Machines, links, and which rank is where."""

    title: str
    nodes: tuple[NodeSpec, ...]
    target_on: tuple[int, ...]
    """The node of each target rank."""
    draft_on: tuple[int, ...]
    """The node of each draft rank; none: a draft runs inside the head."""
    target: ModelShape | None
    draft: ModelShape | None
    network: Link
    """Between nodes."""
    local: Link
    """Between ranks of a node."""
    shares: tuple[float, ...] | None = None
    """Of the target's layers, for each rank; None: even."""
    draft_shares: tuple[float, ...] = ()
    """Of the draft's; none: even."""
    threads: tuple[int, ...] = ()
    """By rank; none: each node's cores, divided among its ranks."""
    links: Mapping[tuple[int, int], Link] = field(default_factory=dict)
    """By ranks, (sender, receiver), where one was measured."""
    overheads: Overheads = field(default_factory=Overheads)
