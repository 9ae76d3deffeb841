"""A plan: its ranks, its predicted speed, and what the planner compared it with."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from ggpipe.cluster.memory import Memory
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.planning.placements import Place
from ggpipe.sim.virtual_cluster import VirtualPlacement


@dataclass(frozen=True, kw_only=True)
class RankPlan:
    """A rank of the plan."""

    node: str
    drafts: bool
    """The rank holds only the draft."""
    layers: tuple[int, int]
    """First layer, and one past the last."""
    threads: int
    memory: Memory
    """Memory that the rank needs, including a draft inside it."""
    has_bytes: float
    """Memory of the rank's machine."""


@dataclass(frozen=True)
class Prediction:
    """The predicted speed of a mode with its best settings."""

    mode: Mode
    speculation: SpeculationConfig
    tokens_per_s: float
    """Decode speed, of all users together."""
    ttft_s: float
    """Mean time to first token."""


@dataclass(frozen=True, kw_only=True)
class DraftRate:
    """Where the draft runs, and whether it is fast enough to keep the pipeline full."""

    node: str
    inside: bool
    """It runs in the head's process."""
    token_s: float
    """Time of the draft for one token."""
    stage_s: float
    """Time of the slowest stage for one row."""


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The ranks of a plan, and their predicted speed."""

    cluster: ClusterSpec
    """The cluster, with the machines of the ranks."""
    placement: VirtualPlacement
    places: tuple[Place, ...]
    """The place of each rank."""
    ranks: tuple[RankPlan, ...]
    best: Prediction
    predictions: Mapping[Mode, Prediction]
    """The prediction for each mode with these ranks."""
    elsewhere: Mapping[Mode, tuple[VirtualPlacement, Prediction]]
    """Modes that need other ranks, or would be clearly faster with them, and those ranks."""
    n_simulations: int
    alternative: tuple[VirtualPlacement, Prediction] | None = None
    """The fastest placement without groups if the plan has groups, and with groups if it has none; None if there is
    no such placement."""
    with_floats: Prediction | None = None
    """The prediction with 32-bit sums, if the plan has 16-bit sums."""
    users: int | None = None
    """See `PlanRequest.users`."""
    draft_rate: DraftRate | None = None
    """The draft's rate in this plan or, if the plan does not use the draft, in the best one that does; None if there is
    no draft."""

    @property
    def draft_inside(self) -> bool:
        """Whether the head runs the draft."""
        return self.placement.draft_threads is not None
