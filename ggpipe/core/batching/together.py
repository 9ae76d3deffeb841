"""Several requests that draft ahead together: in steady runs through several stages, or in each run of a single one."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from ggpipe.core.batching.pipeline_state import PipelineState
from ggpipe.core.batching.rows import Rounds, SteadyRuns, steady_runs, usual_chain
from ggpipe.core.batching.turns import best_turn
from ggpipe.core.drafters.calibration import Pace
from ggpipe.core.request_state import RequestState

_CLEARLY_LESS = 0.95
"""Times what a token takes without draft tokens: so much must they save where a single stage waits for them."""


def steady_runs_of(pipeline: PipelineState, decoding: Sequence[RequestState], rounds: Rounds) -> SteadyRuns | None:
    """The runs in which several requests draft ahead of a pipeline of several stages; None where accepted tokens alone
    are as fast. `rounds`: of these."""
    if len(decoding) == 1 or pipeline.n_stages == 1 or not pipeline.cost.is_known:
        return None
    drafting = [state.drafters for state in decoding if state.overlaps and state.request.drafts]
    agreement = sum([known.calibration.agreement for known in drafting if not known.any_paused]) / len(decoding)
    if not agreement:
        return None
    steady = steady_runs(pipeline.cost, len(decoding), agreement)
    return steady if steady.speed * rounds.round_s > len(decoding) else None


def best_speed(pipeline: PipelineState, decoding: Sequence[RequestState], n_requests: int) -> float:
    """Accepted tokens a second of `n_requests` requests together, which draft as these do, while there are no
    prompts."""
    rounds = Rounds(pipeline.cost, n_requests)
    drafting = [state.drafters for state in decoding if state.overlaps and state.request.drafts]
    agreement = sum([known.calibration.agreement for known in drafting if not known.any_paused]) / len(decoding)
    return max(n_requests / rounds.round_s, steady_runs(pipeline.cost, n_requests, agreement).speed)


def gathers_drafted(pipeline: PipelineState, states: Sequence[RequestState]) -> bool:
    """Whether runs of several requests may wait for draft tokens of these: those of a single stage, which computes the
    accepted tokens of all at once, unless drafters use its cores."""
    alone = pipeline.n_stages == 1 and not pipeline.limits.shares_cores
    return alone and pipeline.limits.rolls_back and any([state.overlaps for state in states])


def usual_with_roots(pipeline: PipelineState, roots: Sequence[RequestState]) -> tuple[int, bool]:
    """How many draft tokens go into a single stage's run with each of these accepted tokens, on average, and whether
    the run waits for them. Without a wait, there are some where the accepted token was drafted, too."""
    known = [state.drafters for state in roots if state.overlaps and state.request.drafts]
    if not known or not pipeline.cost.is_known:
        return 0, False
    most = max(min(pipeline.limits.n_rows, pipeline.cost.most_rows) // len(roots) - 1, 0)
    chains = [usual_chain(drafters.calibration, most) for drafters in known]
    chain = [sum(probabilities) / len(roots) for probabilities in itertools.zip_longest(*chains, fillvalue=0.0)]
    pace = max((drafters.leading.pace for drafters in known), key=lambda pace: pace.usual)
    waiting = best_turn(pipeline.cost, chain, pace, len(roots))
    ahead = best_turn(pipeline.cost, [chain[0] * probability for probability in chain], Pace(), len(roots))
    best = min(waiting, ahead, key=lambda turn: turn.token_s)
    alone_s = pipeline.cost.length * pipeline.cost.time(len(roots))
    return (best.n, best is waiting) if best.token_s < _CLEARLY_LESS * alone_s else (0, False)
