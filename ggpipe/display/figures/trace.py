"""Writes a request's timeline for ui.perfetto.dev and chrome://tracing (Trace Event Format, as a JSON object).

| ph       | meaning                                                                                     |
|----------|---------------------------------------------------------------------------------------------|
| X        | a rank's work on a run ("run", "draft run") with the decode inside; also waits between runs |
| b, e     | "send": from the end of a run in one stage to its start in the next                         |
| s, f     | the same, as an arrow                                                                       |
| i        | an output token, by the drafters that had named it, or one of the target's own              |
| C        | runs in flight                                                                              |
| M        | names of ranks and of their tracks                                                          |

A process (`pid`) is a rank, and a thread (`tid`) is one of its tracks. Times are whole µs since the request arrived, by
the head's clock. They are rounded only once: the slices of a track must nest exactly.
"""

from __future__ import annotations

import collections
import itertools
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ggpipe.config.model import FIRST_DRAFT, TARGET
from ggpipe.core.messages import RunRecord, Span
from ggpipe.display.files import write_text
from ggpipe.display.format import counted
from ggpipe.display.origins import SEVERAL, origin_of
from ggpipe.stats.activity import RankWork, layer_texts, part, parts_of
from ggpipe.stats.records import RankStats, RequestStats
from ggpipe.transport.base import HEAD

TraceEvent = dict[str, Any]


_MODELS, _TOKENS = 1, 99  # tracks of a rank: one per model, by id
_CANCELLED, _WAITING, _DRAFTED = "terrible", "grey", "good"  # names that chrome://tracing has colours for
_COLOURS = {
    "draft model 2": "rail_response",
    "eagle3": "rail_animation",
    "mtp": "rail_animation",
    "dflash": "rail_idle",
    "ngram": "yellow",
    "grammar": "thread_state_iowait",
    SEVERAL: "olive",
}
"""Of tokens by origin; others have the first draft model's."""


def write_trace(path: Path, stats: RequestStats, ranks: Sequence[RankStats]) -> None:
    """Write the request's timeline. `ranks`: their names, and their clocks' offsets from the head's.

    Raises UsageError if the file cannot be written.
    """
    write_text(path, json.dumps(trace(stats, ranks), separators=(",", ":")) + "\n")


def trace(stats: RequestStats, ranks: Sequence[RankStats]) -> dict[str, Any]:
    """The timeline as an object. `traceEvents` has names first, then events by time."""
    target, draft = _slices(stats.runs, stats, ranks), _slices(stats.draft_runs, stats, ranks)
    followers = {part(rank) for rank, number in zip(ranks, parts_of(ranks), strict=True) if number > 0}
    target_hops, draft_hops = _hops(target, followers), _hops(draft, followers)
    events = [
        *_waits([*target, *draft], stats),
        *(event for run in (*target, *draft) for piece in run for event in _work(piece)),
        *_sends([*target_hops, *draft_hops]),
        *_tokens(stats),
        *_in_flight(target_hops),
    ]
    events.sort(key=lambda event: event["ts"])  # stable: enclosing slices stay before enclosed ones
    at_work = {piece.part for run in (*target, *draft) for piece in run}
    return {
        "traceEvents": [*_names(stats, ranks, at_work), *events],
        "displayTimeUnit": "ms",
        "otherData": {
            "n_prompt_tokens": stats.n_prompt,
            "n_generated_tokens": stats.n_generated,
            "finish": stats.finish.value if stats.finish else None,
            **asdict(stats.speculation),
        },
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class _Slice:
    """A rank's time on a run, in µs."""

    run: RunRecord
    span: Span
    start: int
    end: int

    @property
    def part(self) -> RankWork:
        return self.span.rank, self.run.model

    @property
    def track(self) -> TraceEvent:
        return _track(self.span.rank, _MODELS + self.run.model)

    @property
    def name(self) -> str:
        return f"run {self.run.id}" if self.run.model == TARGET else f"{_model_name(self.run.model)} run {self.run.id}"


def _track(rank: int, kind: int) -> TraceEvent:
    """A track. Viewers expect each `tid` only once, and treat a thread whose `tid` is the `pid` as the main one."""
    return {"pid": rank, "tid": 100 * rank + kind}


def _slices(runs: Sequence[RunRecord], stats: RequestStats, ranks: Sequence[RankStats]) -> list[list[_Slice]]:
    """Each run's slices, stage by stage. A rank's slices for a model do not overlap, even after rounding."""
    offsets = {part(rank): rank.clock_offset_s for rank in ranks}
    starts = [
        (span.start_s + offsets.get((span.rank, run.model), 0.0) - stats.arrived, i, place)
        for i, run in enumerate(runs)
        for place, span in enumerate(run.spans)
    ]
    free: dict[RankWork, int] = collections.defaultdict(int)
    placed: dict[tuple[int, int], _Slice] = {}
    for start_s, i, place in sorted(starts):
        run, span = runs[i], runs[i].spans[place]
        own = span.rank, run.model
        start = max(_us(start_s), free[own])
        end = max(_us(start_s + span.busy_s), start)
        free[own] = end
        placed[i, place] = _Slice(run=run, span=span, start=start, end=end)
    return [[placed[i, place] for place in range(len(run.spans))] for i, run in enumerate(runs)]


def _hops(runs: Iterable[Sequence[_Slice]], followers: Set[RankWork]) -> list[list[_Slice]]:
    """The slices of ranks that forward runs: without those of the other parts of groups."""
    return [[piece for piece in run if piece.part not in followers] for run in runs]


def _work(piece: _Slice) -> Iterator[TraceEvent]:
    run, span = piece.run, piece.span
    words = [piece.name, counted(run.n_rows, "token")]
    outer: TraceEvent = {**piece.track, "ph": "X", "ts": piece.start, "dur": piece.end - piece.start, "cat": "run"}
    if run.cancelled:
        words.append("cancelled")
        outer |= {"cat": "run,cancelled", "cname": _CANCELLED}
    outer["name"] = " · ".join(words)
    outer["args"] = {
        "run": run.id,
        "rows": run.n_rows,
        "computed_rows": span.n_rows,
        "draft_tokens": run.n_draft_tokens,
        "sent_bytes": span.sent_bytes,
        "cancelled": run.cancelled,
    }
    yield outer
    decode = min(_us(span.compute_s), piece.end - piece.start)
    if decode > 0:  # its start is not measured, but there is little before it
        yield {**outer, "name": "decode", "dur": decode, "cat": outer["cat"].replace("run", "decode"), "args": {}}


def _waits(runs: Iterable[Sequence[_Slice]], stats: RequestStats) -> Iterator[TraceEvent]:
    tracks: dict[RankWork, list[_Slice]] = collections.defaultdict(list)
    for run in runs:
        for piece in run:
            tracks[piece.part].append(piece)
    for pieces in tracks.values():
        pieces.sort(key=lambda piece: (piece.start, piece.end))
        last = pieces[-1].end if stats.ended is None else _us(stats.ended - stats.arrived)
        starts = [*(piece.start for piece in pieces), last]
        for start, end in zip([0, *(piece.end for piece in pieces)], starts, strict=True):
            if end > start:
                times = {"ts": start, "dur": end - start}
                yield {**pieces[0].track, "ph": "X", "name": "wait", "cat": "wait", "cname": _WAITING, **times}


def _sends(runs: Iterable[Sequence[_Slice]]) -> Iterator[TraceEvent]:
    hops = [(a, b) for run in runs for a, b in itertools.pairwise(run)]
    for number, (source, target) in enumerate(hops, start=1):
        arrived = max(target.start, source.end)
        common = {"name": "send", "id": f"0x{number:x}"}
        args = {"run": source.run.id, "sent_bytes": source.span.sent_bytes, "to_rank": target.span.rank}
        yield {**source.track, **common, "ph": "b", "ts": source.end, "cat": "send", "args": args}
        yield {**source.track, **common, "ph": "e", "ts": arrived, "cat": "send"}
        inside = max(source.end - 1, source.start)  # an arrow belongs to the slice in which it starts
        yield {**source.track, **common, "ph": "s", "ts": inside, "cat": "flow"}
        yield {**target.track, **common, "ph": "f", "bp": "e", "ts": max(target.start, inside), "cat": "flow"}


def _tokens(stats: RequestStats) -> Iterator[TraceEvent]:
    for i, time_s in enumerate(stats.token_times):
        drafters = stats.drafted_by[i] if i < len(stats.drafted_by) else ()
        origin = origin_of(drafters)
        event: TraceEvent = {
            **_track(HEAD, _TOKENS),
            "ph": "i",
            "s": "t",
            "ts": max(_us(time_s - stats.arrived), 0),
            "name": f"{origin} token {i + 1}",
            "cat": f"token,{'drafted' if drafters else 'own'}",
            "args": {"token": i + 1, "drafted": bool(drafters), "drafters": list(drafters)},
        }
        yield event | {"cname": _COLOURS.get(origin, _DRAFTED)} if drafters else event


def _in_flight(runs: Iterable[Sequence[_Slice]]) -> Iterator[TraceEvent]:
    """The number of runs between the first stage's start and the last stage's end, over time."""
    changes: dict[int, list[int]] = collections.defaultdict(lambda: [0, 0])
    for run in runs:
        if run:
            kind = int(run[0].run.cancelled)
            changes[run[0].start][kind] += 1
            changes[max(run[-1].end, run[0].start)][kind] -= 1
    live = cancelled = 0
    for time in sorted(changes):
        live, cancelled = live + changes[time][0], cancelled + changes[time][1]
        counts = {"live": live, "cancelled": cancelled}
        yield {**_track(HEAD, _TOKENS), "ph": "C", "ts": time, "name": "runs in flight", "cat": "run", "args": counts}


def _names(stats: RequestStats, ranks: Sequence[RankStats], at_work: Set[RankWork]) -> Iterator[TraceEvent]:
    """Names of all ranks, and of the tracks in use."""
    parts = {
        **{(rank, model): RankStats(rank=rank, model=model) for rank, model in at_work},
        **{part(rank): rank for rank in ranks},
    }
    texts = {part(rank): text for rank, text in zip(ranks, layer_texts(ranks), strict=True)}
    for number in sorted({HEAD, *(number for number, _ in parts)}):
        own = [parts[key] for key in sorted(parts) if key[0] == number]
        host = next((rank.host for rank in own if rank.host), "")
        roles = [_role(rank, texts) for rank in own if part(rank) in at_work or rank.layers[0] < rank.layers[1]]
        words = [f"rank {number}", host, "head" if number == HEAD else "", *roles]
        process = _track(number, _MODELS + (own[0].model if own else TARGET))
        yield _name("process_name", process, name=" · ".join(filter(None, words)))
        yield _name("process_sort_index", process, sort_index=number)
        for rank in own:
            if part(rank) in at_work:
                yield from _track_names(_track(number, _MODELS + rank.model), _role(rank, texts))
        if number == HEAD and stats.token_times:
            yield from _track_names(_track(HEAD, _TOKENS), "tokens")


def _role(rank: RankStats, layer_texts: Mapping[RankWork, str]) -> str:
    layers = layer_texts.get(part(rank), "-")
    return _model_name(rank.model) + ("" if layers == "-" else f" layers {layers}")


def _model_name(model: int) -> str:
    return "target" if model == TARGET else "draft" if model == FIRST_DRAFT else f"draft model {model}"


def _track_names(track: TraceEvent, name: str) -> Iterator[TraceEvent]:
    yield _name("thread_name", track, name=name)
    yield _name("thread_sort_index", track, sort_index=track["tid"])


def _name(kind: str, track: TraceEvent, **args: Any) -> TraceEvent:
    return {**track, "ph": "M", "name": kind, "ts": 0, "args": args}


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
