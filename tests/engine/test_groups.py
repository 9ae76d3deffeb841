"""Ranks that compute a stage together: who gets which messages, and that all parts skip the same runs."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from support.commands import HANG_S

from ggpipe.config.layer_split import parse_layer_split
from ggpipe.core.events import CancelRuns
from ggpipe.core.layout import Layout, lay_out
from ggpipe.core.messages import KvKind, KvOp, Row, Run, RunResult, Span
from ggpipe.engine.pipeline import Pipeline
from ggpipe.engine.stage_thread import Fetched, PartDone, Passed, ResultReady, StageFailed, StageThread
from ggpipe.llama.group import Membership
from ggpipe.llama.stage import Outcome, Stage
from ggpipe.transport import codec
from ggpipe.transport.base import Kind, Message
from ggpipe.transport.local import LocalWorld

N_RUNS = 60
RUNS = range(1, N_RUNS + 1)


def run_of(number: int, n_rows: int = 1) -> Run:
    row = Row(token=7, pos=number, seqs=(0,), request=1)
    return Run(id=number, rows=(row,) * n_rows, ops=(KvOp(KvKind.RM, 0, -1, number, -1),))


# Messages


class FakeThread:
    """A stage's thread that computes nothing."""

    def __init__(self) -> None:
        self.runs: list[Run] = []
        self.cancelled: list[CancelRuns] = []

    def submit(self, run: Run) -> None:
        self.runs.append(run)

    def cancel(self, cancelled: CancelRuns) -> None:
        self.cancelled.append(cancelled)


class Ranks:
    """All ranks of a layout."""

    def __init__(self, layout: Layout, n_ranks: int) -> None:
        self.transports = LocalWorld(n_ranks).transports
        self.threads = {rank: FakeThread() for rank in layout.stage_ranks}
        self.ended: dict[int, list[ResultReady | Fetched]] = {rank: [] for rank in layout.ranks}
        self.pipelines = {rank: self._pipeline(layout, rank) for rank in layout.ranks}

    def _pipeline(self, layout: Layout, rank: int) -> Pipeline:
        thread = cast(StageThread, self.threads.get(rank))
        ended = self.ended[rank].append
        return Pipeline(self.transports[rank], layout, rank, ended, (lambda _: thread) if thread is not None else None)

    def arrived(self, rank: int) -> list[Message]:
        """All messages that a rank received."""
        return list(iter(self.transports[rank].poll, None))


def ranks_of(text: str) -> Ranks:
    (own,) = parse_layer_split(text)
    assert own is not None
    return Ranks(lay_out(8, own.n_ranks, own), own.n_ranks)


@pytest.mark.parametrize(("split", "first", "others"), [("0.5*2,0.5", 0, [1]), ("0,0.5*2,0.5*2", None, [1, 2])])
def test_a_run_goes_to_all_parts_of_the_first_stage(split: str, first: int | None, others: list[int]) -> None:
    ranks = ranks_of(split)
    ranks.pipelines[0].submit(run_of(1))
    if first is not None:
        assert ranks.threads[first].runs == [run_of(1)]
    for rank in range(1, len(ranks.transports)):
        messages = ranks.arrived(rank)
        assert [message.kind for message in messages] == [Kind.RUN] * (rank in others)
        assert [codec.read_run(message.payload)[0] for message in messages] == [run_of(1)] * (rank in others)


def test_part_0_sends_a_run_to_all_parts_of_the_next_stage() -> None:
    ranks = ranks_of("0.3*2,0.7*3")
    ranks.pipelines[0].deliver(Passed(b"activations"))
    assert [(m.source, m.kind, m.payload) for r in (2, 3, 4) for m in ranks.arrived(r)] == [
        (0, Kind.RUN, b"activations")
    ] * 3
    assert not ranks.arrived(1)


def test_other_parts_send_the_head_their_time() -> None:
    ranks = ranks_of("0.3*2,0.7*2")
    span = Span(rank=3, start_s=1.0, compute_s=0.5, busy_s=0.6, sent_bytes=0, n_rows=1)
    ranks.pipelines[3].deliver(PartDone(5, span))
    (message,) = ranks.arrived(0)
    assert (message.kind, codec.read_part_span(message.payload)) == (Kind.PART_SPAN, (5, span))
    assert not any(ranks.ended.values())


def test_the_last_stages_part_0_ends_a_run() -> None:
    ranks = ranks_of("0.3*2,0.7*2")
    ended = ResultReady(RunResult(5))
    ranks.pipelines[2].deliver(ended)
    assert ranks.ended[2] == [ended]


def test_cancels_reach_all_parts() -> None:
    ranks = ranks_of("0.3*2,0.7*2")
    cancelled = CancelRuns((3, 4), ((5, 0), (6, 1)))
    ranks.pipelines[0].cancel(cancelled)
    assert ranks.threads[0].cancelled == [cancelled]
    for rank in (1, 2, 3):
        (message,) = ranks.arrived(rank)
        assert (message.kind, codec.read_cancel(message.payload)) == (Kind.CANCEL, cancelled)


# Agreement


class Sums:
    """What the parts of a group in this process agree by."""

    def __init__(self, n_parts: int) -> None:
        self._barrier = threading.Barrier(n_parts)
        self._stops = [False] * n_parts
        self._numbers: list[list[float]] = [[]] * n_parts

    def connect(self, part: int) -> FakeSum:
        return FakeSum(self, part)

    def agree(self, part: int, stop: bool, numbers: Sequence[float] = ()) -> tuple[bool, list[float]]:
        self._stops[part], self._numbers[part] = stop, list(numbers)
        self._barrier.wait(HANG_S)
        stop, sums = any(self._stops), [sum(of_row) for of_row in zip(*self._numbers, strict=True)]
        self._barrier.wait(HANG_S)
        return stop, sums

    def abandon(self) -> None:
        self._barrier.abort()


class FakeSum:
    """A part's end of `Sums`."""

    def __init__(self, sums: Sums, part: int) -> None:
        self._sums, self._part = sums, part
        self.lost = False

    def sum(self, data: int, n: int, stop: bool) -> bool:
        numbers = (ctypes.c_float * n).from_address(data)
        try:
            stop, sums = self._sums.agree(self._part, stop, [float(number) for number in numbers])
            for i, total in enumerate(sums):
                numbers[i] = total
            return stop
        except threading.BrokenBarrierError:
            self.lost = True
            return True

    def abandon(self) -> None:
        self._sums.abandon()


class FakeStage:
    """A part's stage: it sums in the middle of each run, where cancels end the run on all parts."""

    is_last = True
    pauses = None

    def __init__(self, sums: Sums, part: int) -> None:
        self._sums, self._part = sums, part
        self.computed: list[tuple[int, bool, frozenset[int]]] = []
        self.applied: list[KvOp] = []
        self._cancelled: set[int] = set()

    def decode(self, run: Run, incoming: object, headroom: int, dead: frozenset[int]) -> Outcome:
        self.applied += run.ops
        if run.cancelled or not run.rows:
            return Outcome(bytearray(), (), 0.0, run.cancelled)
        cancelled, _ = self._sums.agree(self._part, run.id in self._cancelled)
        self.computed.append((run.id, cancelled, dead))
        return Outcome(bytearray(), (), 0.1, cancelled, dropped=dead)

    def cancel(self, run: int) -> None:
        self._cancelled.add(run)

    def close(self) -> None:
        pass


class Part:
    """A part's thread, with a fake stage."""

    def __init__(self, sums: Sums, part: int, shares: tuple[float, ...]) -> None:
        self.outcomes: list[Any] = []
        self.notices: list[Any] = []
        self.done = threading.Semaphore(0)
        self.stage = FakeStage(sums, part)
        self.group = Membership(part, shares, lambda: sums.connect(part))  # type: ignore[arg-type,return-value]

        def load(_: Callable[[int, int], bool]) -> Stage:
            self.group.join()
            return cast(Stage, self.stage)

        self.thread = StageThread(part, load, self.notices.append, self._deliver, group=self.group)

    def _deliver(self, outcome: object) -> None:
        self.outcomes.append(outcome)
        self.done.release()


def parts_of(n: int) -> list[Part]:
    sums = Sums(n)
    return [Part(sums, part, (1 / n,) * n) for part in range(n)]


@pytest.mark.parametrize("n_parts", [2, 3])
@pytest.mark.parametrize("seed", range(3))
def test_all_parts_skip_the_same_runs_whenever_cancels_arrive(n_parts: int, seed: int) -> None:
    rng = random.Random(seed)
    parts = parts_of(n_parts)
    moves: list[tuple[Part, Run | CancelRuns]] = []
    for part in parts:
        own: list[tuple[Part, Run | CancelRuns]] = [(part, run_of(number, number % 7)) for number in RUNS]
        for number in RUNS[2::3]:  # anywhere behind the run's own message, or in front of it
            rows = () if number % 7 > 5 else ((number + 1, 0), (number + 1, number % 7))
            own.insert(rng.randrange(len(own)), (part, CancelRuns((number,), rows)))
        moves += own
    lanes = {id(part): [move for move in moves if move[0] is part] for part in parts}
    while any(lanes.values()):
        part, message = rng.choice([lane for lane in lanes.values() if lane]).pop(0)
        if isinstance(message, CancelRuns):
            part.thread.cancel(message)
        else:
            part.thread.submit(message)
    for part in parts:
        for _ in range(N_RUNS):
            assert part.done.acquire(timeout=HANG_S)
    for part in parts:
        part.thread.close()
    first = parts[0]
    for part in parts:
        assert part.stage.computed == first.stage.computed
        assert part.stage.applied == [op for number in RUNS for op in run_of(number).ops]
        assert not [notice for notice in part.notices if isinstance(notice, StageFailed)]
    assert [outcome.result.run for outcome in first.outcomes] == list(RUNS)
    ended = {outcome.result.run for outcome in first.outcomes if outcome.result.cancelled}
    assert not ended - set(RUNS[2::3]), "nobody cancelled it"
    computed = {number for number, cancelled, _ in first.stage.computed if not cancelled}
    for number, _, dead in first.stage.computed:
        assert dead in (frozenset(), frozenset({0, (number - 1) % 7})), "rows of another run, or not all at once"
        assert not dead or number % 3 == 1
    n_rows = {outcome.result.run: outcome.result.spans[-1].n_rows for outcome in first.outcomes}
    for number, cancelled, dead in first.stage.computed:
        assert n_rows[number] == (0 if cancelled else number % 7 - len(dead))
    assert computed == {number for number in RUNS if number % 7 > 0} - ended
    for part in parts[1:]:
        assert [outcome.run for outcome in part.outcomes] == list(RUNS)


def test_a_part_that_waits_for_the_others_can_be_closed() -> None:
    parts = parts_of(2)
    parts[0].thread.submit(run_of(0))  # the other part never gets it
    parts[0].thread.close()
    parts[1].thread.close()
    assert not parts[0].outcomes
    assert not [notice for part in parts for notice in part.notices if isinstance(notice, StageFailed)]
