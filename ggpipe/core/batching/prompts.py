"""Prompts: which of their tokens go into the next run, alone and beside accepted tokens."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ggpipe.core.batching.drafted import FrontierToken, best_first, with_drafted
from ggpipe.core.batching.equal_rows import equal_rows
from ggpipe.core.batching.pipeline_state import PipelineState, ScheduledRows, fitting, rows_of
from ggpipe.core.batching.rows import Rounds
from ggpipe.core.batching.together import best_speed
from ggpipe.core.prompt_chunks import TILE, chunk_end
from ggpipe.core.request_state import Phase, RequestState, SequenceState
from ggpipe.core.run_cost import RunCost

_MANY_RUNS = 4
"""Runs that a long prompt takes, at least."""
_FIRST_ROWS = 16
"""Rows of a run with a prompt and others' tokens, before a run has shown the time of prompt rows."""
_DRAFT_SHARE = 4
"""Draft tokens may take one in four rows that accepted tokens leave. With one in two, answers are complete no sooner on
average, but prompts take longer: 31 instead of 9 % where one user decodes (one rank, measured on two cores)."""
_LONGER = 3.0
"""Times `prefill_slowdown`: so long may prompts make runs where rows are clearly cheaper in these. With 4, requests of
three mixtures end up to 4 % sooner, or 3 % later (simulated, prompts of 1,000 tokens that arrive at random)."""
_CLEARLY_CHEAPER = 0.8
"""Times what a row takes in shorter runs."""
_GATHER = 0.02
"""How long a first prompt waits for others that come with it, as a share of its run's time; each further prompt
restarts the wait."""
_GATHER_S = 1e-2
"""The longest such wait, from the first prompt on. Seconds."""


def gather_until(pipeline: PipelineState, states: Sequence[SequenceState]) -> float:
    """When these requests stop waiting for others that may arrive at the same time, by the clock of `pipeline.now`.

    They wait on a single stage only, while all of them are prompts and nothing is in flight: prompts take less time in
    one run than in several. Several stages are kept busy by short runs.
    """
    limits = pipeline.limits
    if pipeline.n_stages > 1 or limits.n_requests == 1 or not limits.partial_prefixes or pipeline.n_in_flight:
        return 0.0
    if len(states) == limits.n_requests or any(state.phase is not Phase.PREFILL for state in states):
        return 0.0
    n_left = sum(len(state.prompt) - state.n_past for state in states)
    came_at = [state.admitted_at for state in states]
    return min(max(came_at) + _GATHER * pipeline.cost.prompt_s(0, n_left), min(came_at) + _GATHER_S)


def schedule(
    pipeline: PipelineState,
    waiting: Sequence[SequenceState],
    decoding: Sequence[RequestState],
    ready: Sequence[RequestState],
    n_runs: int,
) -> Sequence[ScheduledRows]:
    """Tokens of the prompts that wait, with the accepted tokens that are `ready` and draft tokens; nothing when it is
    better to wait. `n_runs`: runs in flight with accepted tokens or prompts."""
    if pipeline.limits.n_pauses:
        return _pausing(pipeline, waiting, len(decoding))
    if decoding and not pipeline.limits.rolls_back:
        return _in_turn(pipeline, waiting, decoding, fitting(ready, pipeline.limits.n_rows))
    first = _accepted(pipeline, ready, len(waiting))
    if not first and pipeline.n_in_flight >= (pipeline.n_stages if decoding else pipeline.limits.n_in_flight):
        return ()
    if first and n_runs >= pipeline.n_stages:
        return ()
    if len(waiting) == 1 and not decoding:
        return _alone(pipeline, waiting[0])
    n_chunk = _chunk_rows(pipeline, waiting)
    n_left = sum(len(state.prompt) - state.n_past for state in waiting)
    n_all = min(_run_rows(pipeline, len(decoding)), max(n_chunk, 2 * rows_of(first))) if decoding else 0
    most_drafted = (n_all - rows_of(first)) // _DRAFT_SHARE
    drafted = _drafted(pipeline, decoding, first, len(waiting), most_drafted)
    n_rows = rows_of(first) + len(drafted)
    n_prompt = min(n_chunk, pipeline.limits.n_rows - n_rows)
    if decoding and not _goes_at_once(pipeline, n_rows, n_left, len(decoding), len(waiting)):
        n_prompt = min(max(n_all - n_rows, 1), n_prompt)
        if not ready and pipeline.n_in_flight and not pipeline.has_prompts and n_left > _MANY_RUNS * n_prompt:
            return ()  # it goes in with the tokens in flight, which would else wait for it
    return [*with_drafted(first, drafted, len(drafted)), *_shared_out(waiting, n_prompt)]


def _pausing(pipeline: PipelineState, waiting: Sequence[SequenceState], n_decoding: int) -> Sequence[ScheduledRows]:
    """Tokens of prompts alone, in runs that pause for others, but for short ones. Where states cannot go back, each run
    has those of one prompt: libllama would divide it, and not pause."""
    if not pipeline.limits.rolls_back:
        waiting = [min(waiting, key=lambda state: pipeline.n_awaited_runs((state,)))]
    if len(waiting) == 1 and not n_decoding:
        schedule = _alone(pipeline, waiting[0])
    else:
        n_rows = _chunk_rows(pipeline, waiting)
        n_rows = min(_run_rows(pipeline, n_decoding), n_rows) if n_decoding else min(n_rows, pipeline.limits.n_rows)
        schedule = _shared_out(waiting, n_rows)
    n_in_flight = pipeline.n_pausing if pipeline.pauses(schedule) else pipeline.n_in_flight
    return schedule if n_in_flight < pipeline.limits.n_in_flight else ()


def _in_turn(
    pipeline: PipelineState,
    waiting: Sequence[SequenceState],
    decoding: Sequence[RequestState],
    roots: Sequence[RequestState],
) -> Sequence[ScheduledRows]:
    """Tokens of prompts alone, or these accepted tokens with draft tokens, or draft tokens alone after a run of
    prompts. Where states cannot go back, a run of both would read the weights twice (see `equal_rows`)."""
    has_room = pipeline.n_in_flight < 2 * pipeline.n_stages
    if pipeline.n_awaited_runs(decoding) >= pipeline.n_stages:
        roots = ()
    if roots or (pipeline.had_prompts and has_room):
        drafted = _drafted(pipeline, decoding, roots, len(waiting), pipeline.limits.n_rows - rows_of(roots))
        if roots or _pays_alone(pipeline, drafted, decoding, len(waiting)):
            return equal_rows(pipeline, roots, drafted, len(drafted))
    if not has_room or pipeline.n_awaited_runs(waiting) >= pipeline.n_stages:
        return ()
    n_left = sum(len(state.prompt) - state.n_past for state in waiting)
    n_rows = min(_run_rows(pipeline, len(decoding)), _chunk_rows(pipeline, waiting))
    if _goes_at_once(pipeline, 0, n_left, len(decoding), len(waiting)):
        n_rows = n_left
    follows = pipeline.has_prompts or pipeline.roots_at == pipeline.now
    if pipeline.n_in_flight and not follows and n_left > _MANY_RUNS * n_rows:
        return ()  # it goes in after the tokens in flight, which would else wait for it
    return _shared_out(waiting, n_rows)


def _pays_alone(
    pipeline: PipelineState, drafted: Sequence[FrontierToken], decoding: Sequence[RequestState], n_waiting: int
) -> bool:
    """A run of these draft tokens brings more accepted tokens than all requests would get in its time without
    prompts."""
    if not drafted:
        return False
    speed = best_speed(pipeline, decoding, len(decoding) + n_waiting)
    return sum([probability for probability, _ in drafted]) > speed * pipeline.cost.time(len(drafted))


def _chunk_rows(pipeline: PipelineState, waiting: Sequence[SequenceState]) -> int:
    """Rows of each run with tokens of these prompts, at most: those that keep all stages busy."""
    n_past = sum(state.counters.cached_tokens for state in waiting)
    n_new = sum(len(state.prompt) for state in waiting) - n_past
    return pipeline.limits.prompt_rows(n_new, n_past // max(len(waiting), 1), len(waiting))


def _drafted(
    pipeline: PipelineState, decoding: Sequence[RequestState], roots: Sequence[RequestState], n_waiting: int, most: int
) -> Sequence[FrontierToken]:
    """Draft tokens, at most `most`, that go into a run with these accepted tokens and those of `n_waiting` prompts."""
    drafting = [
        state
        for state in decoding
        if state.is_async and pipeline.may_draft(state) and (state.tree.root.submitted or state in roots)
    ]
    if not drafting or most <= 0 or (least := least_path(pipeline, decoding, n_waiting)) is None:
        return ()
    return [one for one in best_first(pipeline, drafting, most) if one[0] >= least]


def least_path(pipeline: PipelineState, decoding: Sequence[RequestState], n_waiting: int) -> float | None:
    """The path probability from which on draft tokens are worth a row in runs with tokens of `n_waiting` prompts; None:
    none of them are, or it is not known yet.

    Such runs take long, and a further row makes them little longer. That delays prompts, and with them the time from
    which on all requests decode as fast as without prompts.
    """
    cost = pipeline.cost
    if cost.prompt_row_s(1) is None or not cost.is_known:
        return None
    row_s = cost.prompt_row_s(_run_rows(pipeline, len(decoding))) or 0.0
    if not pipeline.limits.rolls_back:  # they are in short runs
        n_rows = math.ceil(len(decoding) / pipeline.n_stages)
        row_s = max(row_s, cost.time(n_rows + 1) - cost.time(n_rows))
    return row_s * best_speed(pipeline, decoding, len(decoding) + n_waiting)


def _accepted(pipeline: PipelineState, ready: Sequence[RequestState], n_waiting: int) -> Sequence[RequestState]:
    """The requests whose accepted tokens go into a run with tokens of `n_waiting` prompts.

    Where these would leave no room for the first request's tokens, as in runs of one row, prompts and accepted tokens
    take turns.
    """
    n_rows = pipeline.limits.n_rows
    if rows_of(ready) < n_rows:
        return ready
    first = fitting(ready, n_rows - pipeline.rows_for_prompts(n_waiting, len(ready)))
    return first if first or not pipeline.had_prompts else fitting(ready, n_rows)


def _alone(pipeline: PipelineState, state: SequenceState) -> Sequence[ScheduledRows]:
    """The next chunk of a prompt that has the pipeline for itself, as libllama alone would cut it."""
    start, limits = state.counters.cached_tokens, pipeline.limits
    n_tokens = len(state.prompt) - start
    end = start + chunk_end(state.n_past - start, n_tokens, limits.n_batch, limits.prompt_rows(n_tokens, start))
    return (ScheduledRows(state, n_prompt=state.cut(end) - state.n_past),)


def _goes_at_once(pipeline: PipelineState, n_tokens: int, n_left: int, n_decoding: int, n_waiting: int) -> bool:
    """All that is left of prompts goes into one run, beside `n_tokens` accepted tokens: more requests wait than decode,
    and the run takes those no longer than `prefill_slowdown` of theirs for each request.

    That delays those that decode once, and many short runs of prompts take more time than one. With several stages,
    short runs keep all of them busy.
    """
    if pipeline.n_stages > 1 or n_waiting <= n_decoding or n_tokens + n_left > pipeline.limits.n_rows:
        return False
    usual_s = pipeline.cost.seconds(n_decoding)
    most_s = pipeline.limits.prefill_slowdown * usual_s * (n_decoding + n_waiting) / n_decoding
    return pipeline.cost.prompt_row_s(1) is not None and pipeline.cost.prompt_s(n_tokens, n_left) < most_s


def _run_rows(pipeline: PipelineState, n_decoding: int) -> int:
    """Rows of each run with tokens of prompts while `n_decoding` requests decode: those that bring most prompt tokens a
    second, as many as make runs take about `prefill_slowdown` times as long as without prompts, or up to three times
    that where rows are clearly cheaper in long runs: a run of a mixture reads experts once for all of its rows.

    It does not depend on the other rows of the next run: runs that follow a longer one would wait in each stage. Of
    runs that pause, which have no other rows, this holds for each part.
    """
    cost, most, n_parts = pipeline.cost, pipeline.limits.n_rows, pipeline.limits.n_pauses + 1
    first = math.ceil(n_decoding / pipeline.n_stages) if n_parts == 1 else 0
    if cost.prompt_row_s(1) is None or not cost.is_known:
        return min(max(_FIRST_ROWS, first + 1), most)
    most_s = n_parts * pipeline.limits.prefill_slowdown * Rounds(cost, n_decoding).round_s / pipeline.n_stages
    n, longer = (_fastest(cost, first, most, times * most_s) for times in (1.0, _LONGER))
    row_s, cheaper_s = (_row_s(pipeline, n_rows) for n_rows in (n, longer))
    return longer if cheaper_s < _CLEARLY_CHEAPER * row_s else n


def _row_s(pipeline: PipelineState, n_rows: int) -> float:
    """What each row of prompts takes in runs of this length. In a mixture's runs of their own, it includes a share of
    the first row's time, which is that of reading the weights."""
    if pipeline.limits.rolls_back or pipeline.limits.work.sparsity <= 1:
        return pipeline.cost.prompt_row_s(n_rows) or 0.0
    return pipeline.cost.prompt_s(0, n_rows) / n_rows


def _fastest(cost: RunCost, first: int, most: int, most_s: float) -> int:
    """Rows of a run, at most `most`, that takes about `most_s` and brings most prompt tokens a second beside `first`
    accepted tokens.

    A run has whole tiles of rows, whoever they are for: those of a tile that is not full take as long as a full one's.
    """
    more_s = most_s - cost.seconds(first)
    best, fastest = 0, 0.0
    fewest = TILE
    while fewest <= most:
        row_s = cost.prompt_row_s(fewest) or 0.0
        n_all = first + round(more_s / row_s) if row_s else most
        n_all = min((n_all + TILE // 2) // TILE * TILE, 2 * fewest - TILE, most)
        n = n_all - first
        if n_all >= fewest and n > 0 and (rate := n / cost.prompt_s(first, n)) > fastest:
            best, fastest = n_all, rate
        fewest *= 2
    return best or min(first + 1, most)


def _shared_out(states: Sequence[SequenceState], n_rows: int) -> list[ScheduledRows]:
    """The next tokens of these prompts, `n_rows` in all if there are as many, in equal parts where they suffice. A part
    has a tile of rows at least: where there are more prompts than tiles, those with the fewest tokens left go first,
    so that not all of them end last. The oldest prompt always has its part: a long one does not wait for ever."""
    schedule: list[ScheduledRows] = []
    in_order = sorted(states, key=lambda state: (state is not states[0], len(state.prompt) - state.n_past))
    for i, state in enumerate(in_order):
        part = min(max(math.ceil(n_rows / (len(in_order) - i)), TILE), n_rows)
        n = state.cut(min(len(state.prompt), state.n_past + part)) - state.n_past
        if n:
            schedule.append(ScheduledRows(state, n_prompt=n))
        n_rows -= n
    return schedule
