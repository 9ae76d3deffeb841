"""The timeline: in the format that viewers read, each slice where the numbers say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.screen import finished_request, speculated_request, speculating_ranks, two_ranks

from ggpipe.core.messages import RunRecord, Span
from ggpipe.display.figures.trace import trace, write_trace
from ggpipe.errors import UsageError
from ggpipe.stats.records import RankStats, RequestStats

Event = dict[str, Any]


def events(stats: RequestStats, ranks: list[RankStats]) -> list[Event]:
    """The trace's events, as JSON gives them back, after a check of all that the format asks for."""
    found: list[Event] = json.loads(json.dumps(trace(stats, ranks)))["traceEvents"]
    for event in found:
        assert {"name", "ph", "pid", "tid", "ts"} <= event.keys()
        assert isinstance(event["name"], str)
        assert event["name"]
        assert all(isinstance(event[key], int) for key in ("pid", "tid", "ts"))
        assert event["ts"] >= 0
        assert isinstance(event.get("args", {}), dict)
        match event["ph"]:
            case "M":
                assert event["name"] in ("process_name", "process_sort_index", "thread_name", "thread_sort_index")
                assert event["args"].keys() == {event["name"].partition("_")[2]}
            case "X":
                assert isinstance(event["dur"], int)
                assert event["dur"] >= 0
            case "i":
                assert event["s"] == "t"
            case "C":
                assert all(n >= 0 for n in event["args"].values())
            case other:
                assert other in "besf"
                assert event["id"]
        assert event["ph"] == "M" or event["cat"]
        assert event.get("cname", "good") in ("good", "terrible", "grey")  # of chrome://tracing's reserved ones
    times = [event["ts"] for event in found]
    assert times == sorted(times)
    slices_nest(found)
    pairs_match(found, "b", "e")
    pairs_match(found, "s", "f")
    return found


def slices_nest(found: list[Event]) -> None:
    """On each track, a slice is inside another or beside it, and comes after what it is in."""
    for tid in {event["tid"] for event in found}:
        assert len({event["pid"] for event in found if event["tid"] == tid}) == 1
        open_until: list[int] = []
        for event in found:
            if event["tid"] == tid and event["ph"] == "X":
                while open_until and open_until[-1] <= event["ts"]:
                    open_until.pop()
                open_until.append(event["ts"] + event["dur"])
                assert open_until == sorted(open_until, reverse=True)


def pairs_match(found: list[Event], first: str, second: str) -> None:
    """Each beginning has one end with its id, category and name, later in time and in the file."""
    open_pairs: dict[tuple[Any, ...], Event] = {}
    ids = [event["id"] for event in found if event["ph"] == first]
    assert len(set(ids)) == len(ids)
    for event in found:
        key = (event.get("id"), event.get("cat"), event["name"])
        if event["ph"] == first:
            open_pairs[key] = event
        elif event["ph"] == second:
            begun = open_pairs.pop(key)
            assert event["ts"] >= begun["ts"]
            assert event.get("bp") == ("e" if second == "f" else None)
    assert not open_pairs


def slices(found: list[Event], tid: int, *names: str) -> list[tuple[str, int, int]]:
    """(name, start, end) on a track, ms."""
    chosen = [e for e in found if e["ph"] == "X" and e["tid"] == tid and e["name"].startswith(names)]
    return [(e["name"], e["ts"] // 1000, (e["ts"] + e["dur"]) // 1000) for e in chosen]


def test_ranks_and_tracks_have_names() -> None:
    found = events(speculated_request(), speculating_ranks())
    names = {e["pid"]: e["args"]["name"] for e in found if e["name"] == "process_name"}
    assert names == {
        0: "rank 0 · node-a.example.org · head · target layers 0-7 · draft layers 0-3",
        1: "rank 1 · 10.0.0.23 · target layers 8-15",
    }
    tracks = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["name"] == "thread_name"}
    assert tracks == {
        (0, 1): "target layers 0-7",
        (0, 2): "draft layers 0-3",
        (0, 99): "tokens",
        (1, 101): "target layers 8-15",
    }
    assert {e["pid"]: e["args"]["sort_index"] for e in found if e["name"] == "process_sort_index"} == {0: 0, 1: 1}


def test_runs_are_where_the_heads_clock_puts_them() -> None:
    found = events(speculated_request(), speculating_ranks())
    assert slices(found, 1, "run") == [
        ("run 1 · 100 tokens", 100, 200),
        ("run 2 · 4 tokens", 200, 300),
        ("run 3 · 2 tokens · cancelled", 300, 400),
        ("run 4 · 1 token", 500, 600),
    ]
    assert slices(found, 101, "run") == [
        ("run 1 · 100 tokens", 220, 340),
        ("run 2 · 4 tokens", 350, 450),
        ("run 3 · 2 tokens · cancelled", 450, 451),
        ("run 4 · 1 token", 620, 720),
    ]
    assert slices(found, 2, "draft run") == [
        ("draft run 1 · 100 tokens", 50, 100),
        ("draft run 2 · 2 tokens · cancelled", 200, 220),
    ]
    args = next(e["args"] for e in found if e["name"].startswith("run 2") and e["pid"] == 0)
    assert args == {"run": 2, "rows": 4, "computed_rows": 4, "draft_tokens": 3, "sent_bytes": 40, "cancelled": False}


def test_decoding_is_inside_its_run() -> None:
    found = events(speculated_request(), speculating_ranks())
    assert slices(found, 1, "decode") == [
        ("decode", 100, 180),
        ("decode", 200, 280),
        ("decode", 300, 350),
        ("decode", 500, 600),
    ]
    assert len(slices(found, 101, "decode")) == 3, "a skipped run decodes nothing"


def test_waits_fill_the_rest_of_the_request() -> None:
    found = events(speculated_request(), speculating_ranks())
    assert slices(found, 1, "wait") == [("wait", 0, 100), ("wait", 400, 500), ("wait", 600, 1000)]
    assert slices(found, 101, "wait") == [("wait", 0, 220), ("wait", 340, 350), ("wait", 451, 620), ("wait", 720, 1000)]
    assert slices(found, 2, "wait") == [("wait", 0, 50), ("wait", 100, 200), ("wait", 220, 1000)]
    for tid in (1, 2, 101):
        outer = slices(found, tid, "run", "draft run", "wait")
        assert [start for _, start, _ in outer] == [0, *(end for _, _, end in outer[:-1])]


def test_cancelled_runs_stand_out() -> None:
    found = events(speculated_request(), speculating_ranks())
    marked = [e for e in found if e.get("cname") == "terrible"]
    assert {e["name"] for e in marked if e["name"] != "decode"} == {
        "run 3 · 2 tokens · cancelled",
        "draft run 2 · 2 tokens · cancelled",
    }
    assert {e["cat"] for e in marked} == {"run,cancelled", "decode,cancelled"}
    assert all(e["args"]["cancelled"] for e in marked if e["name"] != "decode")
    assert not any(e["args"].get("cancelled") for e in found if e["ph"] == "X" and "args" in e and e not in marked)


def test_sends_lead_from_rank_to_rank() -> None:
    found = events(speculated_request(), speculating_ranks())
    begun = {e["id"]: e for e in found if e["ph"] == "b"}
    ended = {e["id"]: e for e in found if e["ph"] == "e"}
    sends = [(e["args"]["run"], e["pid"], e["ts"] // 1000, ended[i]["ts"] // 1000) for i, e in begun.items()]
    assert sends == [(1, 0, 200, 220), (2, 0, 300, 350), (3, 0, 400, 450), (4, 0, 600, 620)]
    assert [e["args"]["sent_bytes"] for e in begun.values()] == [1000, 40, 20, 10]
    tails = [(e["tid"], e["ts"]) for e in found if e["ph"] == "s"]
    heads = [(e["tid"], e["ts"]) for e in found if e["ph"] == "f"]
    assert tails == [(1, 199_999), (1, 299_999), (1, 399_999), (1, 599_999)], "inside the slices that they leave"
    assert heads == [(101, 220_000), (101, 350_000), (101, 450_000), (101, 620_000)]


def test_clocks_that_are_off_make_no_time_negative() -> None:
    ranks = speculating_ranks()
    ranks[1].clock_offset_s = 99.9
    found = events(speculated_request(), ranks)
    begun = {e["id"]: e["ts"] for e in found if e["ph"] == "b"}
    ended = {e["id"]: e["ts"] for e in found if e["ph"] == "e"}
    assert [ended[i] - begun[i] for i in begun] == [0, 0, 0, 0]
    ranks[1].clock_offset_s = 0.0
    assert all(e["ts"] == 0 for e in events(speculated_request(), ranks) if e["pid"] == 1 and e["name"] == "decode")


def test_tokens_have_an_origin() -> None:
    found = events(speculated_request(), speculating_ranks())
    tokens = [e for e in found if e["ph"] == "i"]
    assert [(e["name"], e["ts"]) for e in tokens] == [
        ("own token 1", 350_000),
        ("draft token 2", 460_000),
        ("draft token 3", 470_000),
        ("own token 4", 750_000),
    ]
    assert [(e["pid"], e["tid"], e["args"]["drafted"]) for e in tokens] == [
        (0, 99, False),
        (0, 99, True),
        (0, 99, True),
        (0, 99, False),
    ]
    plain = [e["name"] for e in events(finished_request(), two_ranks()) if e["ph"] == "i"]
    assert plain == [f"own token {i}" for i in range(1, 6)]


def test_runs_in_flight_are_counted() -> None:
    found = events(speculated_request(), speculating_ranks())
    counted = [(e["ts"] // 1000, e["args"]["live"], e["args"]["cancelled"]) for e in found if e["ph"] == "C"]
    assert counted == [
        (100, 1, 0),
        (200, 2, 0),
        (300, 2, 1),
        (340, 1, 1),
        (450, 0, 1),
        (451, 0, 0),
        (500, 1, 0),
        (720, 0, 0),
    ]
    assert {(e["name"], e["pid"]) for e in found if e["ph"] == "C"} == {("runs in flight", 0)}


def test_a_head_that_only_coordinates() -> None:
    stats = speculated_request()
    stats.draft_runs = []
    stats.runs = [structs.replace(run, spans=run.spans[1:]) for run in stats.runs]
    ranks = [
        RankStats(rank=0, host="a"),
        RankStats(rank=1, model=0, host="b", layers=(0, 16), clock_offset_s=100.0),
    ]
    names = [e["args"]["name"] for e in events(stats, ranks) if e["name"].endswith("_name")]
    assert names == ["rank 0 · a · head", "tokens", "rank 1 · b · target layers 0-15", "target layers 0-15"]


def test_a_rank_of_the_draft_alone() -> None:
    stats = speculated_request()
    stats.draft_runs = [
        structs.replace(run, spans=(structs.replace(run.spans[0], rank=2),)) for run in stats.draft_runs
    ]
    ranks = [*two_ranks(), RankStats(rank=2, model=1, host="c", layers=(0, 4), clock_offset_s=0.01)]
    found = [e for e in events(stats, ranks) if e["pid"] == 2]
    assert {e["tid"] for e in found} == {202}
    assert [e["args"]["name"] for e in found if e["name"].endswith("_name")] == [
        "rank 2 · c · draft layers 0-3",
        "draft layers 0-3",
    ]
    assert slices(found, 202, "draft run")[0] == ("draft run 1 · 100 tokens", 60, 110)


def test_tokens_are_coloured_by_drafter() -> None:
    stats = speculated_request()
    stats.drafted_by = [(), ("ngram",), ("draft", "eagle3"), ("eagle3",)]
    tokens = [event for event in trace(stats, stats.ranks)["traceEvents"] if event["ph"] == "i"]
    assert [event["name"] for event in tokens] == [
        "own token 1", "ngram token 2", "several token 3", "eagle3 token 4",
    ]  # fmt: skip
    assert [event["args"]["drafters"] for event in tokens] == [[], ["ngram"], ["draft", "eagle3"], ["eagle3"]]
    colours = [event.get("cname") for event in tokens]
    assert colours[0] is None
    assert len(set(colours)) == 4


def test_nothing_known() -> None:
    assert [e["name"] for e in events(RequestStats(), [])] == ["process_name", "process_sort_index"]
    stats = RequestStats(
        runs=[
            RunRecord(
                request=1,
                id=7,
                n_rows=1,
                n_run_rows=1,
                n_draft_tokens=0,
                cancelled=False,
                spans=(Span(rank=3, start_s=1.0, compute_s=0.5, busy_s=0.5, sent_bytes=0, n_rows=1),),
            )
        ]
    )
    found = events(stats, [])
    assert slices(found, 301, "run") == [("run 7 · 1 token", 1000, 1500)]
    assert slices(found, 301, "wait") == [("wait", 0, 1000)]
    names = [e["args"]["name"] for e in found if e["name"] == "process_name"]
    assert names == ["rank 0 · head", "rank 3 · target"]


TIMES = st.floats(-1, 3, allow_nan=False)
SPANS = st.builds(
    Span,
    rank=st.integers(0, 3),
    start_s=TIMES,
    compute_s=st.floats(0, 1),
    busy_s=st.floats(0, 1),
    sent_bytes=st.integers(0, 9),
)
RUNS = st.lists(
    st.builds(
        RunRecord,
        request=st.just(1),
        id=st.integers(0, 99),
        n_rows=st.integers(1, 9),
        n_draft_tokens=st.just(0),
        cancelled=st.booleans(),
        spans=st.lists(SPANS, max_size=3, unique_by=lambda span: span.rank).map(tuple),
        model=st.integers(1, 3),
    ),
    max_size=8,
)


@settings(deadline=None)
@given(RUNS, RUNS, st.none() | TIMES, st.lists(TIMES, max_size=3))
def test_any_numbers_make_a_sound_trace(
    runs: list[RunRecord], draft_runs: list[RunRecord], ended: float | None, tokens: list[float]
) -> None:
    runs = [structs.replace(run, model=0) for run in runs]
    stats = RequestStats(runs=runs, draft_runs=draft_runs, ended=ended, token_times=tokens)
    found = events(stats, [RankStats(rank=i, clock_offset_s=i / 7) for i in range(3)])
    n_slices = sum(e["ph"] == "X" and e["cat"].startswith("run") for e in found)
    assert n_slices == sum(len(run.spans) for run in (*runs, *draft_runs))


def test_file(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    write_trace(path, speculated_request(), speculating_ranks())
    read = json.loads(path.read_text())
    assert read == trace(speculated_request(), speculating_ranks())
    assert read["displayTimeUnit"] == "ms"
    assert (read["otherData"]["mode"], read["otherData"]["n_draft"]) == ("async", 3)
    for bad in (tmp_path, tmp_path / "no" / "trace.json"):
        with pytest.raises(UsageError, match="cannot write to"):
            write_trace(bad, speculated_request(), speculating_ranks())


def grouped() -> tuple[RequestStats, list[RankStats]]:
    """A stage of one rank, and one of two, whose part 1 begins and ends later than part 0."""
    ranks = [RankStats(rank=0, layers=(0, 2)), RankStats(rank=1, layers=(2, 4)), RankStats(rank=2, layers=(2, 4))]
    spans = tuple(
        Span(rank=rank, start_s=start, compute_s=0.1, busy_s=0.2, sent_bytes=8, n_rows=1)
        for rank, start in ((0, 10.0), (1, 10.3), (2, 10.4))
    )
    run = RunRecord(id=1, request=1, n_rows=1, n_run_rows=1, n_draft_tokens=0, cancelled=False, spans=spans)
    return RequestStats(arrived=10.0, ended=11.0, runs=[run]), ranks


def test_only_part_0_of_a_group_takes_part_in_hops() -> None:
    stats, ranks = grouped()
    found = events(stats, ranks)
    assert [(event["pid"], event["args"]["to_rank"]) for event in found if event["ph"] == "b"] == [(0, 1)]
    assert [event["pid"] for event in found if event["name"] == "decode"] == [0, 1, 2]
    (end,) = (event["ts"] for event in found if event["ph"] == "C" and event["args"]["live"] == 0)
    assert end == 500_000
    names = [event["args"]["name"] for event in found if event["name"] == "process_name"]
    assert names == ["rank 0 · head · target layers 0-1", "rank 1 · target layers 2-3 part 0",
                     "rank 2 · target layers 2-3 part 1"]  # fmt: skip
