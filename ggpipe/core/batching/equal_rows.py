"""Which draft tokens go into runs of several requests where states cannot go back.

There, libllama computes sequences with unequal numbers of rows in several batches, each of which reads all weights. So
all requests have the same number of rows in a run: those with too few wait for the next one, and draft tokens fill up
the others' rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ggpipe.core.batching.drafted import FrontierToken, with_drafted
from ggpipe.core.batching.pipeline_state import PipelineState, ScheduledRows
from ggpipe.core.request_state import RequestState

_Worths = dict[RequestState, list[float]]
"""What rows of requests that may go in are worth, in the order in which they go in: tokens that are decoded again
nothing, an accepted token 1, a draft token its probability."""


def equal_rows(
    pipeline: PipelineState, roots: Sequence[RequestState], found: Sequence[FrontierToken], n: int
) -> list[ScheduledRows]:
    """The rows of a run that has room for these accepted tokens, the oldest of which is the first, and for `n` draft
    tokens of those that are `found`: those that bring most for their time. The oldest accepted token goes in."""
    worths = _worths(roots, found)
    n_rows = sum([state.n_root_rows for state in roots]) + n
    if len(worths) <= 1:
        return with_drafted(roots, found, n)
    oldest = roots[0] if roots else None
    first = oldest.n_root_rows if oldest is not None else 1
    best: list[RequestState] = []
    each, most = 1, 0.0
    for n_each in range(first, min(n_rows, max(map(len, worths.values()))) + 1):
        full = {
            state: sum(own[:n_each])
            for state, own in worths.items()
            if len(own) >= n_each and (state not in roots or state.n_root_rows <= n_each)
        }
        if oldest is not None and oldest not in full:
            break
        in_order = sorted(full, key=lambda state: (state is not oldest, -full[state]))
        gain = 0.0
        for n_states, state in enumerate(in_order[: n_rows // n_each], 1):
            gain += full[state]
            if (rate := gain / pipeline.cost.time(n_each * n_states)) > most:
                best, each, most = in_order[:n_states], n_each, rate
    roots = [state for state in roots if state in best]
    drafted = _up_to(each, roots, best, found)
    return with_drafted(roots, drafted, len(drafted))


def _worths(roots: Sequence[RequestState], found: Sequence[FrontierToken]) -> _Worths:
    worths: _Worths = {state: [0.0] * (state.n_root_rows - 1) + [1.0] for state in roots}
    for probability, state in found:
        worths.setdefault(state, []).append(probability)
    return worths


def _up_to(
    n_each: int, roots: Sequence[RequestState], states: Iterable[RequestState], found: Sequence[FrontierToken]
) -> Sequence[FrontierToken]:
    """Draft tokens of these requests, as many as fill up to `n_each` rows for each of them."""
    room = {state: n_each - (state.n_root_rows if state in roots else 0) for state in states}
    drafted: list[FrontierToken] = []
    for one in found:
        _, state = one
        if room.get(state, 0) > 0:
            room[state] -= 1
            drafted.append(one)
    return drafted
