"""Draft tokens that may go into the next run: the most probable paths of all requests first."""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Sequence

from ggpipe.core.batching.pipeline_state import PipelineState, ScheduledRows
from ggpipe.core.request_state import RequestState
from ggpipe.core.tree import Node

FrontierToken = tuple[float, RequestState]
"""The path probability of a draft token that may go in, and its request."""

_PROBABILITY = operator.itemgetter(0)


def best_first(pipeline: PipelineState, states: Sequence[RequestState], most: int) -> Sequence[FrontierToken]:
    """Draft tokens of these requests that have room, `most` of them at most, the most probable path first."""
    if len(states) == 1:
        found = _found(states[0], most)
    else:
        found = [one for state in states for one in _found(state, most)]
        found.sort(key=_PROBABILITY, reverse=True)
    spare = pipeline.spare_cells
    return found[:most] if spare >= len(found) else list(itertools.islice(_with_cells(found, spare), most))


def _with_cells(found: Iterable[FrontierToken], spare: int) -> Iterator[FrontierToken]:
    """Those of these draft tokens for which their request has reserved cells, or one of the `spare` ones is left."""
    reserved: dict[RequestState, int] = {}
    for one in found:
        _, state = one
        own = reserved.get(state)
        if own is None:
            own = max(state.n_cells - state.n_used, 0)
        if own + spare:
            spare -= not own
            yield one
        reserved[state] = max(own - 1, 0)


def nodes(state: RequestState) -> Iterator[Node]:
    """As many draft tokens of one request as it may have in a run, the most probable path first."""
    return itertools.islice(state.draft_tokens(), state.request.speculation.most_drafted)


def _found(state: RequestState, most: int) -> list[FrontierToken]:
    """The same as `nodes`, `most` of them at most."""
    log_root = state.tree.root.log_path
    return [(math.exp(node.log_path - log_root), state) for node in itertools.islice(nodes(state), most)]


def with_drafted(roots: Iterable[RequestState], found: Sequence[FrontierToken], n: int) -> list[ScheduledRows]:
    """These accepted tokens and the first `n` draft tokens. Further ones take the places of those that get no id."""
    schedule = {
        state: ScheduledRows(state, nodes=itertools.chain((state.tree.root,), nodes(state)), most=1) for state in roots
    }
    for _, state in found[:n]:
        if state not in schedule:
            schedule[state] = ScheduledRows(state, nodes=nodes(state))
        schedule[state].most += 1
    return list(schedule.values())
