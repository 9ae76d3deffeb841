"""What goes into the next run when there is one request only: its prompt, its root, its draft tokens."""

from __future__ import annotations

from collections.abc import Sequence

from ggpipe.core.batching import frontier
from ggpipe.core.batching.load import Load, Take
from ggpipe.core.batching.prompt_chunks import chunk_end
from ggpipe.core.drafters.calibration import Calibration
from ggpipe.core.request_state import Phase, RequestState

_WAIT_LIMIT = 2.0  # times the drafter's usual pace: so long a fresh root waits for draft tokens


def next_takes(load: Load, state: RequestState) -> Sequence[Take]:
    """What goes in next; nothing when it is better to wait."""
    if state.phase is Phase.PREFILL:
        if load.is_full:
            return ()
        start, limits = state.counters.cached_tokens, load.limits
        n_tokens = len(state.request.prompt) - start
        end = start + chunk_end(state.n_past - start, n_tokens, limits.n_batch, limits.prompt_rows(n_tokens))
        return (Take(state, n_prompt=state.cut(end) - state.n_past),)
    root, speculation = state.tree.root, state.request.speculation
    if speculation.mode == "speculative":
        if root.submitted or not state.drafters.all_complete:
            return ()
        most = min(load.room(state) + 1, load.limits.n_rows)
        return (Take(state, nodes=[root, *state.waiting_draft_tokens()], most=most),)
    if not root.submitted:
        return _root(load, state)
    if load.is_full or not load.may_draft(state):
        return ()
    waiting = load.of_room(state, load.limits.n_rows)
    if not waiting or load.too_early():
        return ()
    n = frontier.best_rows(state.chances(waiting), load.cost)
    return (Take(state, nodes=state.waiting_draft_tokens(), most=min(n, len(waiting))),)


def _root(load: Load, state: RequestState) -> Sequence[Take]:
    """A fresh root, with the draft tokens that go into its run; nothing while these are waited for.

    It waits for no other reason, and not for a drafter that is late, or has no more.
    """
    n, waiting = 0, state.waiting_draft_tokens()
    speculation = state.request.speculation
    if state.request.drafts and speculation.mode == "async" and speculation.continuous:
        most = max(min(load.room(state), load.limits.n_rows - 1, state.n_depths), 0)
        chances, drafter = state.chances(waiting[:most]), state.drafters.leading
        n, wait_s = frontier.rows_beside_root(chances, most, load.cost, drafter.calibration, drafter.pace)
        if n > len(waiting) and not state.drafters.all_complete:
            if state.root_waits_until is None:
                state.root_waits_until = load.now + _WAIT_LIMIT * wait_s
            if load.now < state.root_waits_until:
                return ()
        n = min(n, len(waiting))
    state.root_waits_until = None
    return (Take(state, nodes=[state.tree.root, *waiting], most=1 + n),)


def lead(load: Load, state: RequestState, calibration: Calibration) -> int:
    """How far the drafter with this calibration may be ahead of the root: to fill the pipeline, and one run more, as
    far as its draft tokens may be accepted.

    A single stage needs nothing to fill it: there draft tokens are of use in the root's run, and where they do not pay,
    drafting would only take cores from the stage.
    """
    speculation = state.request.speculation
    if speculation.mode != "async" or not speculation.continuous:
        return speculation.n_draft
    if load.n_stages == 1 and load.shared_cost.is_known:  # which forgets slowly: each trial takes time
        most = min(speculation.n_draft, load.limits.n_rows - 1)
        if not frontier.pays_beside_root(most, load.shared_cost, calibration):
            return 0
    usual = frontier.usual_rows(speculation.n_draft, load.cost, calibration)
    return min(usual * (load.limits.n_in_flight + 1), calibration.reach)
