"""The frontier: which rows go into the pipeline next, for one request and for many.

    choose(load, states) -> Choice

row              what it is worth                           when it goes in
accepted token   1                                          as soon as it may; as many runs with such tokens go round as
                                                            bring most (`Rounds`), and later tokens share the next one
draft token      the calibrated probability of its path     with accepted tokens (`riders`, `most_per_second`), or in a
                                                            run of its own when a stage would be idle
prompt token     the share that `prefill_slowdown` leaves   in chunks of its own, or with accepted tokens (`prompts`)

What rows cost is learned (`Load.cost`), and weighed against their worth in `rows`. Runs of draft tokens go in when the
slowest stage is about to be free, and not before: until then more of them may come. Choosing changes nothing: the same
state gives the same choice.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ggpipe.core.batching import prompts
from ggpipe.core.batching.load import Load, Take
from ggpipe.core.batching.rows import Riders, Rounds, pays_beside_root, riders, usual_chain
from ggpipe.core.drafters.calibration import Calibration
from ggpipe.core.request_state import Phase, RequestState, SequenceState
from ggpipe.core.run_cost import most_per_second
from ggpipe.core.tree import Node

_WAIT_LIMIT = 2.0
"""Times a drafter's usual pace: the longest that a fresh root waits for its next draft token."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What goes into the pipeline now; nothing when it is better to wait."""

    takes: Sequence[Take] = ()
    wake_at: float | None = None
    """When to choose again, by the clock of `Load.now`; None: only an event changes the choice."""


@dataclass(frozen=True, slots=True)
class Found:
    """A draft token that may go in, with the probability of its path below the root."""

    state: RequestState
    node: Node
    probability: float


def choose(load: Load, states: Sequence[SequenceState]) -> Choice:
    """Choose the next run's rows. `states`: of what has rows; no request is being sampled."""
    gathers_until = prompts.gather_until(load, states)
    if load.now < gathers_until:
        return Choice(wake_at=gathers_until)
    waiting = [state for state in states if state.phase is Phase.PREFILL]
    decoding = [state for state in states if isinstance(state, RequestState) and state.decodes]
    ready = sorted((state for state in decoding if _is_ready(state)), key=lambda state: state.root_since)
    if waiting:
        takes = prompts.takes(load, waiting, decoding, ready, load.n_runs_of_text(states))
        return Choice(takes if load.limits.partial_prefixes else _unmixed(load, takes))
    return _accepted(load, decoding, ready) if ready else _draft_tokens(load, decoding)


def _accepted(load: Load, decoding: Sequence[RequestState], ready: Sequence[RequestState]) -> Choice:
    """Accepted tokens, and the draft tokens that go in with them."""
    rounds, n_runs = Rounds(load.cost, len(decoding)), load.n_runs_of_text(decoding)
    if len(decoding) > 1 and n_runs <= load.n_stages and (n := load.to_try(rounds, len(ready))):
        return Choice(_takes(ready[:n], (), 0))
    if n_runs >= rounds.best:
        return Choice()
    roots = ready[: min(rounds.size, load.limits.n_rows)]
    drafted = next((state for state in roots if state.request.drafts), None)
    if drafted is None:
        return Choice(_takes(roots, (), 0))
    followed = [state for state in decoding if state in roots or (state.tree.root.submitted and state.is_async)]
    found = list(itertools.islice(_best_first(load, followed), load.limits.n_rows - len(roots)))
    probabilities = [one.probability for one in found]
    if not all(state.is_async for state in roots):  # there are no later runs for their draft tokens
        n = len(found) if len(decoding) == 1 else most_per_second(probabilities, load.cost, len(roots))
    elif len(decoding) == 1:
        chosen = _riders_of_one(load, drafted, probabilities)
        due_at = _due_at(drafted)
        if chosen.n > len(found) and due_at is not None and load.now < due_at:
            return Choice(wake_at=due_at)
        n = chosen.n
    elif rounds.best < load.n_stages:
        calibration = drafted.drafters.leading.calibration
        n = riders(probabilities, len(found), load.cost, len(roots), calibration, math.inf, math.inf).n
    else:  # runs of equal length: all that follow a longer one would wait for it
        usual = usual_chain(drafted.drafters.leading.calibration, load.limits.n_rows, rounds.size)
        n = rounds.size + most_per_second(usual, load.cost, rounds.size) - len(roots)
        n = min(n, most_per_second(probabilities, load.cost, len(roots)))
    return Choice(_takes(roots, found, min(n, len(found))))


def _riders_of_one(load: Load, state: RequestState, probabilities: Sequence[float]) -> Riders:
    """Draft tokens that are to go in with the only root, those that are still to come included."""
    drafter, speculation = state.drafters.leading, state.request.speculation
    if not speculation.continuous:
        return Riders()
    first_s, next_s = drafter.pace.first_s, drafter.pace.next_s
    if first_s is None or next_s is None:
        return Riders()
    cells = load.spare_cells + state.n_cells - state.n_used
    most = max(min(cells, speculation.most_drafted, load.limits.n_rows - 1, state.n_depths), 0)
    return riders(probabilities[:most], most, load.cost, 1, drafter.calibration, first_s, next_s)


def _due_at(state: RequestState) -> float | None:
    """Until when a root waits for the next draft token below it; None: no more are coming."""
    pace = state.drafters.leading.pace
    if state.drafters.all_complete or pace.first_s is None or pace.next_s is None:
        return None
    if state.drafted_at > state.root_since:
        return state.drafted_at + _WAIT_LIMIT * pace.next_s
    return state.root_since + _WAIT_LIMIT * pace.first_s


def _draft_tokens(load: Load, decoding: Sequence[RequestState]) -> Choice:
    """A run of draft tokens alone, when a stage would else have nothing to do."""
    if load.n_in_flight >= (load.limits.n_in_flight if len(decoding) == 1 else load.n_stages):
        return Choice()
    drafting = [state for state in decoding if state.is_async and load.may_draft(state)]
    found = list(itertools.islice(_best_first(load, drafting), load.limits.n_rows))
    if not found:
        return Choice()
    if load.now < load.slot_at:
        return Choice(wake_at=load.slot_at)
    n = most_per_second([one.probability for one in found], load.cost)
    return Choice(_takes((), found, n))


def look_ahead(load: Load, state: RequestState, calibration: Calibration, others: Sequence[SequenceState]) -> int:
    """How far a drafter with this calibration may be ahead of a request's root: as far as fills the pipeline, and one
    run more, where draft tokens may still be accepted. Where accepted tokens of others fill it, as far as a draft token
    is worth a row beside them. `others`: requests that are served with it.

    A single stage needs nothing to fill it: there draft tokens are useful in the root's run, and where they do not pay,
    drafting would only take cores from the stage.
    """
    if any(other.phase is Phase.PREFILL for other in others):
        return 0
    speculation, cost, rounds = state.request.speculation, load.cost, Rounds(load.cost, len(others) + 1)
    if others and (rounds.best >= load.n_stages or not state.is_async):
        usual = most_per_second(usual_chain(calibration, speculation.most_drafted, rounds.size), cost, rounds.size)
        return math.ceil(usual / rounds.size)
    if not state.is_async or not speculation.continuous:
        return speculation.most_drafted
    if load.n_stages == 1 and not pays_beside_root(
        min(speculation.most_drafted, load.limits.n_rows - 1), cost, calibration
    ):
        return 0
    usual = most_per_second(usual_chain(calibration, speculation.most_drafted), cost)
    return min(usual * (load.limits.n_in_flight + 1), calibration.reach)


def _best_first(load: Load, states: Iterable[RequestState]) -> Iterator[Found]:
    """Draft tokens of these requests that have room, the most probable path first, so parents before their children."""
    spare = load.spare_cells
    own = {state: max(state.n_cells - state.n_used, 0) for state in states}
    for one in heapq.merge(*map(_found, own), key=lambda one: -one.probability):
        if own[one.state] + spare:
            spare -= not own[one.state]
            own[one.state] = max(own[one.state] - 1, 0)
            yield one


def _found(state: RequestState) -> Iterator[Found]:
    """As many draft tokens of one request as it may have in a run, the most probable path first."""
    tree = state.tree
    for node in itertools.islice(state.draft_tokens(), state.request.speculation.most_drafted):
        yield Found(state, node, math.exp(node.log_path - tree.root.log_path))


def _takes(roots: Iterable[RequestState], found: Sequence[Found], n: int) -> list[Take]:
    """These accepted tokens and the first `n` draft tokens. Further ones take the places of those that get no id."""
    takes = {state: Take(state, nodes=[state.tree.root], most=1) for state in roots}
    for one in found[:n]:
        take = takes.setdefault(one.state, Take(one.state))
        take.most += 1
    for one in found:
        if one.state in takes:
            takes[one.state].nodes.append(one.node)
    return list(takes.values())


def _is_ready(state: RequestState) -> bool:
    """Its accepted token may go in: where drafting comes before each run, when that is done."""
    drafts_first = state.request.speculation.mode == "speculative"
    return not state.tree.root.submitted and (not drafts_first or state.drafters.all_complete)


def _unmixed(load: Load, takes: Sequence[Take]) -> Sequence[Take]:
    """One embedding, or all but embeddings, in turns: with recurrent states libllama orders the rows of several
    sequences as it likes."""
    texts = [take for take in takes if not take.state.embeds]
    embeddings = [take for take in takes if take.state.embeds]
    return embeddings[:1] if embeddings and not (texts and load.had_embedding) else texts
