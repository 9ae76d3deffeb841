"""The frontier: which rows go into the pipeline next, for one request and for many.

    choose(pipeline, states) -> Choice

row              what it is worth                           when it goes in
accepted token   1                                          as soon as it may; as many runs with such tokens go round as
                                                            bring most (`Rounds`), and later tokens share the next one.
                                                            If several requests draft ahead (`SteadyRuns`), later tokens
                                                            go in as soon as the slowest stage is nearly free
draft token      the calibrated probability of its path     with accepted tokens (`draft_with_root`), or in a
                                                            run of its own when a stage would be idle
prompt token     the share that `prefill_slowdown` leaves   in chunks of its own, or with accepted tokens and draft
                                                            tokens (`prompts`)

What rows cost is learned (`PipelineState.cost`), and weighed against their worth in `rows`. Runs of draft tokens go in
when the slowest stage is about to be free, and not before: until then more of them may come. An only request has none
with a single stage: the next run begins when the one before it ends, and by then the root is known. Where states cannot
go back, prompts have runs of their own, and in other runs each request has the same number of rows (`equal_rows`), or
there is one request while a prompt's run pauses.
Choosing changes nothing: the same state gives the same choice.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

from ggpipe.core.batching import prompts
from ggpipe.core.batching.drafted import FrontierToken, best_first, nodes, with_drafted
from ggpipe.core.batching.equal_rows import equal_rows
from ggpipe.core.batching.pipeline_state import PipelineState, ScheduledRows, fitting, rows_of
from ggpipe.core.batching.rows import Coming, DraftWithRoot, Rounds, draft_with_root, pays_beside_root, usual_chain
from ggpipe.core.batching.together import gathers_drafted, steady_runs_of, usual_with_roots
from ggpipe.core.batching.turns import usual_turn
from ggpipe.core.drafters.calibration import Calibration, Pace
from ggpipe.core.request_state import Phase, RequestState, SequenceState
from ggpipe.core.run_cost import most_per_second

_COPIED, _COPIED_PATH = 16, 0.5
"""Depth and path probability of a chain of n-grams that leaves nothing to do for draft models on the same machine."""
_DRAFTING = 0.1
"""Time of a draft token as a share of a run's, where drafters take turns with the target and none was timed: 0.11 to
the first one and 0.03 to each later one on two cores (the inflated pair)."""
_AHEAD = 2.0
"""Times its rows in flight: so far drafters are ahead of a request's root where several requests share steady runs.
With 4, drafters compute up to a third more for the same speed (simulated)."""
_WAIT_LIMIT = 2.0
"""Times a drafter's usual pace: the longest that a fresh root waits for its next draft token."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What goes into the pipeline now; nothing when it is better to wait."""

    schedule: Sequence[ScheduledRows] = ()
    wake_at: float | None = None
    """When to choose again, by the clock of `PipelineState.now`; None: only an event changes the choice."""
    pauses: bool = False
    """See `Run`."""


def choose(pipeline: PipelineState, states: Sequence[SequenceState]) -> Choice:
    """Choose the next run's rows. `states`: of what has rows; no request is being sampled."""
    gathers_until = prompts.gather_until(pipeline, states)
    if pipeline.now < gathers_until:
        return Choice(wake_at=gathers_until)
    waiting: list[SequenceState] = []
    decoding: list[RequestState] = []
    ready: list[RequestState] = []
    for state in states:
        if state.phase is Phase.PREFILL:
            waiting.append(state)
        elif isinstance(state, RequestState) and state.decodes and (len(states) == 1 or not pipeline.is_paused(state)):
            decoding.append(state)
            if not state.tree.root.submitted and _is_ready(state):
                ready.append(state)
    ready.sort(key=lambda state: state.root_since)
    accepted = Choice()
    if ready and (pipeline.limits.n_pauses or not waiting):
        accepted = _accepted(pipeline, decoding, ready)
    if waiting and not accepted.schedule:
        schedule = prompts.schedule(pipeline, waiting, decoding, ready, pipeline.n_awaited_runs(states))
        schedule = schedule if pipeline.limits.partial_prefixes else _unmixed(pipeline, schedule)
        return Choice(schedule, accepted.wake_at, pipeline.pauses(schedule))
    if waiting or ready:
        return accepted
    return _draft_tokens(pipeline, decoding) if decoding else Choice()


def _accepted(pipeline: PipelineState, decoding: Sequence[RequestState], ready: Sequence[RequestState]) -> Choice:
    """Accepted tokens, and the draft tokens that go in with them."""
    rounds, n_runs = Rounds(pipeline.cost, len(decoding)), pipeline.n_awaited_runs(decoding)
    if pipeline.one_sequence:
        return _accepted_alone(pipeline, ready[0]) if n_runs < pipeline.n_stages else Choice()
    if len(decoding) > 1 and n_runs <= pipeline.n_stages and (n := pipeline.to_try(rounds, len(ready))):
        return Choice(_scheduled(pipeline, fitting(ready[:n], pipeline.limits.n_rows), (), 0))
    steady = steady_runs_of(pipeline, decoding, rounds)
    if n_runs >= rounds.best:
        if steady is None or max(n_runs, pipeline.n_in_flight) >= pipeline.n_stages:
            return Choice()
        if pipeline.now < (slot_at := pipeline.slot_at):
            return Choice(wake_at=slot_at)
    size = rounds.size
    if steady is not None:
        size = max(size, steady.n_rows)
    roots = fitting(ready[:size], pipeline.limits.n_rows)
    drafted = next((state for state in roots if state.request.drafts), None)
    if drafted is None or not _may_draft_with(pipeline, roots):
        return Choice(_scheduled(pipeline, roots, (), 0))
    others = {state for state in decoding if state.tree.root.submitted and state.is_async}
    followed = [state for state in decoding if state in roots or state in others]
    found = best_first(pipeline, followed, pipeline.limits.n_rows - rows_of(roots))
    probabilities = [probability for probability, _ in found]
    if not all(state.is_async for state in roots):  # there are no later runs for their draft tokens
        n = len(found) if len(decoding) == 1 else most_per_second(probabilities, pipeline.cost, len(roots))
    elif len(decoding) == 1:
        due_at = _due_at(drafted, _usual_times(pipeline, drafted.drafters.leading.pace))
        may_wait = due_at is not None and pipeline.now < due_at
        chosen = _draft_with_single_root(pipeline, drafted, probabilities, may_wait)
        if chosen.wait_s:
            return Choice(wake_at=due_at)
        if chosen.n:
            n = 0 if pipeline.tries_one(1.0, sum(probabilities[: chosen.n])) else chosen.n
        else:
            n = int(bool(probabilities) and pipeline.tries_draft_token(probabilities[0]))
    elif gathers_drafted(pipeline, roots):
        n, due_at = _draft_with_roots(pipeline, roots)
        if due_at is not None:
            return Choice(wake_at=due_at)
    elif steady is not None:
        n = steady.n_drafted(probabilities, pipeline.cost, rows_of(roots))
    elif rounds.best < pipeline.n_stages:
        calibration = drafted.drafters.calibration
        n_again = rows_of(roots) - len(roots)
        n = draft_with_root(probabilities, len(found), pipeline.cost, len(roots), calibration, n_again=n_again).n
    else:  # runs of equal length: all that follow a longer one would wait for it
        usual = usual_chain(drafted.drafters.calibration, pipeline.limits.n_rows, rounds.size)
        n = rounds.size + most_per_second(usual, pipeline.cost, rounds.size) - len(roots)
        n = min(n, most_per_second(probabilities, pipeline.cost, len(roots)))
    return Choice(_scheduled(pipeline, roots, found, min(n, len(found))))


def _accepted_alone(pipeline: PipelineState, state: RequestState) -> Choice:
    """The accepted token of one request, and draft tokens that go in with it."""
    found: Sequence[FrontierToken] = ()
    n = 0
    if state.request.drafts and _may_draft_with(pipeline, (state,)):
        found = best_first(pipeline, (state,), pipeline.limits.n_rows - state.n_root_rows)
        n = most_per_second([probability for probability, _ in found], pipeline.cost, 1)
    return Choice(_scheduled(pipeline, (state,), found, n))


def _scheduled(
    pipeline: PipelineState, roots: Sequence[RequestState], found: Sequence[FrontierToken], n: int
) -> Sequence[ScheduledRows]:
    """These accepted tokens and the first `n` draft tokens, or others in their places where states cannot go back."""
    return with_drafted(roots, found, n) if pipeline.limits.rolls_back else equal_rows(pipeline, roots, found, n)


def _draft_with_roots(pipeline: PipelineState, roots: Sequence[RequestState]) -> tuple[int, float | None]:
    """How many draft tokens go into a single stage's run with the accepted tokens of several requests, and until when
    the run waits for them; None: it does not, they are there, or no more are coming."""
    usual, waits = usual_with_roots(pipeline, roots)
    due_at: list[float] = []
    for state in roots if waits else ():
        if not (state.overlaps and state.request.drafts):
            continue
        if sum(1 for _ in itertools.islice(nodes(state), usual)) < usual:
            pace = state.drafters.leading.pace
            at = _due_at(state, None if pace.first_s is None else pace.usual)
            if at is not None and pipeline.now < at:
                due_at.append(at)
    return usual * len(roots), min(due_at, default=None)


def _draft_with_single_root(
    pipeline: PipelineState, state: RequestState, probabilities: Sequence[float], may_wait: bool
) -> DraftWithRoot:
    """Draft tokens that are to go in with the only root; with `may_wait`, those that are still to come included."""
    pace, speculation = state.drafters.leading.pace, state.request.speculation
    if not speculation.continuous:
        return DraftWithRoot()
    cells = pipeline.spare_cells + state.n_cells - state.n_used
    most = min(cells, speculation.most_drafted, state.deepest - state.tree.root.pos)
    most = max(min(most, pipeline.limits.n_rows - state.n_root_rows, pipeline.cost.most_rows - state.n_root_rows), 0)
    known, n_again, coming, token_s = state.drafters, state.tree.n_again, Coming(), None
    if pipeline.one_at_a_time:
        token_s = usual_turn(pipeline.cost, known.calibration, pace, most).token_s
    if may_wait and (times := _usual_times(pipeline, pace)) is not None:
        first_s, next_s = times
        if known.leading.drafts_blocks and state.drafted_at <= state.root_since:
            # A block that begins at this root takes the place of the draft tokens that are there.
            block = Coming(1.0, known.coming.agreement, first_s, next_s)
            cost, calibration = pipeline.cost, known.calibration
            at_once = draft_with_root(probabilities[:most], most, cost, 1, calibration, Coming(), n_again, token_s)
            with_block = draft_with_root((), most, cost, 1, calibration, block, n_again, token_s)
            return max(at_once, with_block, key=lambda one: one.saved_s)
        has_drafted = state.drafted_at > state.root_since if pipeline.in_turn else bool(probabilities)
        after = math.exp(state.tree.best_leaf.log_path - state.tree.root.log_path)
        coming = Coming(after, known.coming.agreement, next_s if has_drafted else first_s, next_s)
    return draft_with_root(probabilities[:most], most, pipeline.cost, 1, known.calibration, coming, n_again, token_s)


def _may_draft_with(pipeline: PipelineState, roots: Sequence[RequestState]) -> bool:
    """Draft tokens may go into a run with these accepted tokens.

    Tokens that are decoded again would be so once more when one of these draft tokens is rejected; they have the run
    for themselves once they take longer than a further run.
    """
    if pipeline.limits.rolls_back:
        return True
    again_s = pipeline.cost.time(rows_of(roots)) - pipeline.cost.time(len(roots))
    return again_s < pipeline.cost.time(1)


def _due_at(state: RequestState, times: tuple[float, float] | None) -> float | None:
    """Until when a root waits for the next draft token below it; None: no more are coming. `times`: see
    `_usual_times`."""
    if state.drafters.all_complete or times is None:
        return None
    first_s, next_s = times
    if state.drafted_at > state.root_since:
        return state.drafted_at + _WAIT_LIMIT * next_s
    return state.root_since + _WAIT_LIMIT * first_s


def _usual_times(pipeline: PipelineState, pace: Pace) -> tuple[float, float] | None:
    """How long a drafter takes to its first draft token below a root, and to each later one. In turn, a share of a run
    is assumed until they are known."""
    if pipeline.in_turn:
        assumed_s = _DRAFTING * pipeline.cost.length * pipeline.cost.seconds(1)
        first_s = assumed_s if pace.first_s is None else pace.first_s
        return first_s, first_s if pace.next_s is None else pace.next_s
    return None if pace.first_s is None or pace.next_s is None else (pace.first_s, pace.next_s)


def _draft_tokens(pipeline: PipelineState, decoding: Sequence[RequestState]) -> Choice:
    """A run of draft tokens alone, when a stage would else have nothing to do."""
    if len(decoding) == 1 and pipeline.one_at_a_time:
        return Choice()
    if pipeline.n_in_flight >= (pipeline.limits.n_in_flight if len(decoding) == 1 else pipeline.n_stages):
        return Choice()
    drafting = [state for state in decoding if state.is_async and pipeline.may_draft(state)]
    if not drafting:
        return Choice()
    if pipeline.now < (slot_at := pipeline.slot_at):
        return Choice(wake_at=slot_at)
    most = min(pipeline.limits.n_rows, pipeline.cost.most_rows)
    found = best_first(pipeline, drafting, most)
    if pipeline.one_sequence and found:
        _, first = found[0]
        found = [one for one in found if one[1] is first]
    probabilities = [probability for probability, _ in found]
    steady = steady_runs_of(pipeline, decoding, Rounds(pipeline.cost, len(decoding)))
    if steady is not None and not pipeline.one_sequence:
        n = steady.n_drafted(probabilities, pipeline.cost, 0)
    else:
        n = most_per_second(probabilities, pipeline.cost, after=_followed(found))
    if n > 1 and pipeline.tries_one(probabilities[0], sum(probabilities[1:n])):
        n = 1
    return Choice(_scheduled(pipeline, (), found, n))


def look_ahead(
    pipeline: PipelineState, state: RequestState, calibration: Calibration, others: Sequence[SequenceState]
) -> int:
    """How far a drafter with this calibration may be ahead of a request's root: as far as fills the pipeline with what
    all drafters reach together, and one run more, where its own draft tokens may still be accepted. Where accepted
    tokens of others fill it, as far as a draft token is worth a row beside them. Several requests that draft ahead
    together share the pipeline, so each reaches less far. `others`: requests that are served at the same time.

    A single stage needs nothing to fill it: there draft tokens are useful in the root's run, and where they do not pay,
    drafting would only take cores from the stage.
    """
    n_waiting = sum(other.phase is Phase.PREFILL for other in others)
    if n_waiting and pipeline.limits.n_pauses and not pipeline.limits.shares_cores:
        others = [other for other in others if other.phase is not Phase.PREFILL]
    elif n_waiting:
        return _look_ahead_of_prompts(pipeline, state, calibration, others, n_waiting)
    speculation, cost, rounds = state.request.speculation, pipeline.cost, Rounds(pipeline.cost, len(others) + 1)
    together = state.drafters.calibration
    served = [state, *(other for other in others if isinstance(other, RequestState))]
    if state.overlaps and (steady := steady_runs_of(pipeline, served, rounds)) is not None:
        return min(math.ceil(_AHEAD * steady.n_each), calibration.reach) if steady.n_each > 1 else 0
    if others and gathers_drafted(pipeline, (state,)) and cost.is_known:
        usual, _ = usual_with_roots(pipeline, served)
        return min(2 * usual, calibration.reach)
    if others and (rounds.best >= pipeline.n_stages or not state.is_async):
        usual = most_per_second(usual_chain(together, speculation.most_drafted, rounds.size), cost, rounds.size)
        each = math.ceil(usual / rounds.size)
        return 2 * each if state.is_async and not speculation.continuous else each  # those below the next root as well
    if not state.is_async or not speculation.continuous:
        return speculation.most_drafted
    if pipeline.n_stages == 1 and not pays_beside_root(
        min(speculation.most_drafted, pipeline.limits.n_rows - 1), cost, together
    ):
        return 0
    if not others and pipeline.in_turn:
        return min(calibration.reach, speculation.most_drafted)
    usual = most_per_second(usual_chain(together, speculation.most_drafted), cost)
    return min(usual * (pipeline.limits.n_in_flight + 1), calibration.reach)


def _look_ahead_of_prompts(
    pipeline: PipelineState,
    state: RequestState,
    calibration: Calibration,
    others: Sequence[SequenceState],
    n_waiting: int,
) -> int:
    """The same while others' prompts are computed: up to the draft tokens that go into their runs. Drafters that share
    cores with the stages leave these to prompts."""
    if not state.overlaps or pipeline.limits.shares_cores:
        return 0
    decoding = [state, *(other for other in others if isinstance(other, RequestState) and other.decodes)]
    least = prompts.least_path(pipeline, decoding, n_waiting)
    if least is None:
        return 0
    usual = sum(probability >= least for probability in usual_chain(calibration, calibration.reach))
    return min(math.ceil(_AHEAD * usual), calibration.reach)


def is_copying(pipeline: PipelineState, state: RequestState) -> bool:
    """Whether drafters with a model have nothing to do, see `RequestState.is_copying`. Where they have cores of their
    own, they may keep drafting, and are ready when the copy ends."""
    if not pipeline.limits.shares_machine or not state.overlaps:
        return False
    at_once = state.drafters.at_once
    if not at_once or len(at_once) == len(state.drafters):
        return False
    node = state.tree.root
    least = node.log_path + math.log(_COPIED_PATH)
    for _ in range(_COPIED):
        if not node.children:
            return False
        node = max(node.children.values(), key=operator.attrgetter("log_path"))
        if node.log_path < least or not any(proposal.drafter in at_once for proposal in node.proposals):
            return False
    return True


def least_path(pipeline: PipelineState, state: RequestState, served: Sequence[SequenceState]) -> float:
    """Path probability below which draft tokens are not worth their time, where drafters take turns with the target."""
    if len(served) > 1 or not pipeline.in_turn:
        return 0.0
    speculation, known = state.request.speculation, state.drafters
    return usual_turn(pipeline.cost, known.calibration, known.leading.pace, speculation.most_drafted).least_path


def look_ahead_at_once(load: PipelineState, state: RequestState, others: Sequence[SequenceState]) -> int:
    """How far a drafter without a model may be ahead of a request's root. It takes no run's time, and its own
    probabilities bound what it sends, so it may fill every run that could be in flight. `others`: requests that are
    served with it."""
    prefilling = not load.limits.n_pauses and any(other.phase is Phase.PREFILL for other in others)
    if prefilling and not state.overlaps:
        return 0
    n_runs = load.limits.n_in_flight + 1 if state.is_async and state.request.speculation.continuous else 1
    return state.request.speculation.most_drafted * n_runs


def _followed(found: Sequence[FrontierToken]) -> float:
    """Path probability of the token that the first of these draft tokens follows; 1 where there are none."""
    if not found:
        return 1.0
    _, state = found[0]
    parent = next(nodes(state)).parent or state.tree.root
    return math.exp(parent.log_path - state.tree.root.log_path) or 1.0


def _is_ready(state: RequestState) -> bool:
    """Its accepted token, which no run carries yet, may go in: where drafting comes before each run, when that is
    done."""
    return state.request.speculation.mode != "speculative" or state.drafters.all_complete


def _unmixed(pipeline: PipelineState, schedule: Sequence[ScheduledRows]) -> Sequence[ScheduledRows]:
    """One embedding, or all but embeddings, in turns: with recurrent states libllama orders the rows of several
    sequences as it likes."""
    texts = [scheduled for scheduled in schedule if not scheduled.state.embeds]
    embeddings = [scheduled for scheduled in schedule if scheduled.state.embeds]
    return embeddings[:1] if embeddings and not (texts and pipeline.had_embedding) else texts
