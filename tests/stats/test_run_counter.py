"""Runs in the statistics of ranks and requests, whenever the parts of a group report their times."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from ggpipe.core.messages import RunRecord, Span
from ggpipe.stats.activity import layer_texts, parts_of
from ggpipe.stats.records import RankStats, RequestStats
from ggpipe.stats.run_counter import RunCounter


def ranks() -> list[RankStats]:
    """A stage of one rank, one of two, and the draft's of two."""
    return [
        RankStats(rank=0, layers=(0, 2)),
        RankStats(rank=1, layers=(2, 4)),
        RankStats(rank=2, layers=(2, 4)),
        RankStats(rank=3, model=1, layers=(0, 2)),
        RankStats(rank=4, model=1, layers=(0, 2)),
    ]


def span(rank: int) -> Span:
    return Span(rank=rank, start_s=0.0, compute_s=1.0, busy_s=2.0, sent_bytes=10, n_rows=1)


def records(run: int, *spans: int) -> list[RunRecord]:
    """A run of two requests with one row each."""
    return [
        RunRecord(
            id=run,
            request=request,
            n_rows=1,
            n_run_rows=2,
            n_draft_tokens=0,
            cancelled=False,
            spans=tuple(map(span, spans)),
        )
        for request in (1, 2)
    ]


def request() -> RequestStats:
    return RequestStats(ranks=ranks())


def test_parts_and_their_layers_in_words() -> None:
    assert parts_of(ranks()) == [0, 0, 1, 0, 1]
    assert layer_texts(ranks()) == ["0-1", "2-3 part 0", "2-3 part 1", "0-1 part 0", "0-1 part 1"]
    coordinators = [RankStats(rank=0), RankStats(rank=1)]
    assert layer_texts(coordinators) == ["-", "-"]


@given(st.data())
def test_all_work_is_counted_once_whenever_parts_report(data: st.DataObject) -> None:
    total, requests = ranks(), {1: request(), 2: request()}
    counter = RunCounter(total, requests.get)
    n_runs = 5
    moves = [[(run, kind, draft) for run in range(n_runs)] for kind in ("run", "part") for draft in (False, True)]
    while lanes := [lane for lane in moves if lane]:
        run, kind, draft = data.draw(st.sampled_from(lanes)).pop(0)
        if kind == "run":
            counter.add(records(run, 3) if draft else records(run, 0, 1), draft)
        else:
            counter.add_part(run, span(4 if draft else 2))
    counter.end()
    assert [(stats.runs, stats.busy_s, stats.sent_bytes) for stats in total] == [(5, 10.0, 50)] * 5
    for stats in requests.values():
        assert [rank.busy_s for rank in stats.ranks] == [5.0] * 5
        assert [[s.rank for s in run.spans] for run in stats.runs] == [[0, 1, 2]] * 5
        assert [[s.rank for s in run.spans] for run in stats.draft_runs] == [[3, 4]] * 5


def test_a_request_that_is_over_does_not_wait() -> None:
    total, requests = ranks(), {1: request()}
    counter = RunCounter(total, requests.get)
    counter.add(records(7, 0, 1), 0)
    assert not requests[1].runs
    counter.end()
    assert [s.rank for s in requests[1].runs[0].spans] == [0, 1]
    counter.add_part(7, span(2))
    assert (total[2].runs, total[2].busy_s) == (1, 2.0)


def test_nobody_waits_for_a_part_for_long() -> None:
    total, requests = ranks(), {1: request()}
    counter = RunCounter(total, requests.get)
    for run in range(20):
        counter.add(records(run, 0, 1), 0)
    assert len(requests[1].runs) == 12
