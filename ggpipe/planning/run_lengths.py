"""Longer runs for long prompts: how much sooner the first token of a plan comes with a larger `-ub`."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ggpipe.cluster.memory import Memory
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.errors import UsageError
from ggpipe.planning.plan import Plan
from ggpipe.planning.planner import PlanRequest
from ggpipe.sim.simulation_spec import SimulationSpec

_SOONER = 0.95
"""Longer runs take more memory: they have to reduce the TTFT to this share."""


@dataclass(frozen=True, kw_only=True)
class LongerRuns:
    """Runs that are longer than was asked for, and pay."""

    n_ubatch: int
    ttft_s: float
    """Mean time to the first token of a single request."""
    usual_s: float
    """The same without them."""
    memory: tuple[Memory, ...]
    """Memory that each rank then needs."""


def longer_runs(
    target: ModelShape, drafts: Sequence[ModelShape], request: PlanRequest, plan: Plan
) -> LongerRuns | None:
    """The best length of runs for a plan's prompts, if it is more than that of the request. `drafts`: those that the
    plan uses."""
    usual = SimulationSpec(
        cluster=plan.cluster,
        placement=replace(plan.placement, streamed_bytes=()),
        target=target,
        drafts=tuple(drafts),
        speculation=SpeculationConfig(mode="iterative"),
        tokens=request.tokens,
        n_predict=1,
        sizes=request.sizes,
    )
    usual_s = _ttft_s(usual)
    best, n_ubatch = None, 2 * request.sizes.n_ubatch
    while usual_s is not None and n_ubatch <= request.sizes.n_batch:
        longer = replace(usual, sizes=replace(request.sizes, n_ubatch=n_ubatch))
        ttft_s = _ttft_s(longer)
        if ttft_s is None or ttft_s > _SOONER * (best.ttft_s if best is not None else usual_s):
            break
        best = LongerRuns(n_ubatch=n_ubatch, ttft_s=ttft_s, usual_s=usual_s, memory=tuple(longer.memory()))
        n_ubatch *= 2
    return best


def _ttft_s(spec: SimulationSpec) -> float | None:
    """None if the machines lack the memory for runs of this length."""
    try:
        served = spec.serve("iterative")
    except UsageError:
        return None
    return statistics.fmean(stats.ttft_s or 0.0 for one in served for stats in one.requests)
