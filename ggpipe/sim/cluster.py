"""A virtual cluster: nodes, the ranks on them, the stages that these hold, the links between them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ggpipe.core.layout import Layout
from ggpipe.sim.costs import Cost


@dataclass(frozen=True, slots=True)
class Node:
    """A machine."""

    name: str
    cores: int
    crowd: float = 1.0
    """Speed of a core while all others of its node are busy, as a share of its speed alone."""


@dataclass(frozen=True, slots=True)
class Link:
    """How messages get from one rank to another."""

    latency_s: float
    """From one program to the other, the receiver's look for it included."""
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Overheads:
    """What ggpipe itself takes, in seconds. The defaults are of two virtual cores: `run_s`, `hand_s` and `poll_s` as
    measured there, the others fitted to real runs with `scripts/check_simulator`."""

    run_s: float = 0.08e-3
    """A stage, for a run, besides decoding it: taking it up, packing what goes on."""
    hand_s: float = 0.1e-3
    """From a thread to another one of its process, until that one is awake."""
    cold_s: float = 0.1e-3
    """A decode, after a rest of two milliseconds or more: core and caches have turned to other things."""
    marker_s: float = 0.1e-3
    """A stage, for a run that was cancelled or that only carries KV operations."""
    event_s: float = 0.16e-3
    """The head or the draft's head, for something that happens: deciding, sampling, handing on."""
    read_s: float = 0.15e-3
    """The same, for each message from another rank."""
    send_s: float = 50e-6
    """The same, for each message to another rank."""
    look_s: float = 0.15e-3
    """On average, until a rank that computes looks for messages."""
    poll_s: float = 45e-6
    """The processor, for a rank's look for messages: to go to sleep and to wake up again, mostly."""
    abort_s: float = 0.3e-3
    """Until a decode that is to stop does."""


@dataclass(frozen=True, slots=True)
class Stage:
    """A rank's part of a pipeline."""

    threads: int
    cost: Cost
    nice: bool = False
    """It takes what others leave of the cores."""
    change_s: float = 0.0
    """What a run of another number of rows than the one before takes longer."""


@dataclass(frozen=True, slots=True)
class Pipeline:
    """A model over some ranks."""

    layout: Layout
    stages: Mapping[int, Stage]
    """By rank, for all ranks that hold layers."""
    row_bytes: int
    """What crosses a border for each row."""


@dataclass(frozen=True, slots=True)
class Cluster:
    """All that a simulation needs to know of a cluster and of the models on it."""

    title: str
    nodes: tuple[Node, ...]
    node_of: tuple[int, ...]
    """The node of each rank."""
    target: Pipeline
    draft: Pipeline | None
    links: Mapping[tuple[int, int], Link]
    """By (sender, receiver), where one differs from what follows."""
    network: Link
    """Between nodes."""
    local: Link
    """Between ranks of a node."""
    overheads: Overheads = field(default_factory=Overheads)

    def link(self, source: int, target: int) -> Link:
        """From rank to rank."""
        if (link := self.links.get((source, target))) is not None:
            return link
        return self.local if self.node_of[source] == self.node_of[target] else self.network
