"""Pipelines for tests of the core: no libllama, no time, every step on demand.

The models see what lies in the cache of the last stage, so a cache that is out of step gives a wrong text.
"""

from __future__ import annotations

import collections
import enum
import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from ggpipe.core.dropped_rows import DeadRow, kept
from ggpipe.core.events import CancelRuns
from ggpipe.core.messages import LogitsRequest, Restore, Row, RowLogits, Run, RunResult, Save, Span
from ggpipe.core.overtaking import SharedStates, divided, overtakes
from ggpipe.core.request import Limits
from support.fake_cache import FakeCache
from support.fake_model import Tokens, chance

Move = tuple[str, Callable[[], None]]
"""Something that may happen next: what it is, and how to let it happen."""


_SHORT = 6
"""Rows of a run that overtakes another one, at most."""


def restorable(restore: Restore) -> Tokens:
    """What files have of a prefix: some are damaged."""
    return restore.tokens[: len(restore.tokens) // 2] if restore.file == "damaged" else restore.tokens


@dataclass(frozen=True)
class Restored:
    """What files have before the first request."""

    tokens: Tokens | None = None
    """In all stages; None: there are no files."""
    more: Tokens = ()
    """Behind them in the last stage's."""


NO_FILES = Restored()

Answer = Callable[[int, Row, LogitsRequest, Tokens], RowLogits]
"""What a model says of a row: its place in the run, the row, what it wants, and the tokens that it sees."""


Whole = Callable[[int, Tokens], Tokens]
"""A request's tokens up to a row, of those that the row sees."""


class Dropping(enum.Enum):
    """Which dead rows a stage drops."""

    ALL = enum.auto()
    SOME = enum.auto()
    """As a group, it computes some whose sequences have no gap."""
    NONE = enum.auto()


@dataclass
class FakeStage:
    """Runs and cancel messages come over different ways: each keeps its order, none waits for the other."""

    cache: FakeCache
    runs: collections.deque[Run] = field(default_factory=collections.deque)
    cancels: collections.deque[CancelRuns] = field(default_factory=collections.deque)
    cancelled: set[int] = field(default_factory=set)
    dead_rows: set[DeadRow] = field(default_factory=set)
    drops: Dropping = Dropping.ALL
    past: set[int] = field(default_factory=set)
    computing: Run | None = None
    paused: tuple[Run, list[Tokens]] | None = None
    """While `computing` overtakes it, and what its rows see."""
    states: SharedStates = field(default_factory=SharedStates)
    sharing: frozenset[int] = frozenset()
    """Of the run that is computed or paused."""
    histories: list[Tokens] = field(default_factory=list)
    """Of the rows that are computed: what they see."""
    through: list[Tokens] = field(default_factory=list)
    """The same of the latest run that is through."""
    saved: list[Save] = field(default_factory=list)

    @property
    def overtaking(self) -> int | None:
        """Place of the run that may overtake what is computed."""
        if self.computing is None or self.paused is not None or not self.computing.pauses:
            return None
        return overtakes(self.computing, self.runs, _SHORT, self.sharing if self.cache.hybrid else None)

    def overtake(self) -> Run | None:
        """Take a run that overtakes what is computed. Returns it when there is nothing to compute."""
        place = self.overtaking
        assert place is not None
        assert self.computing is not None
        self.paused = self.computing, self.histories
        self.cache.hold({seq for row in self.computing.rows for seq in row.seqs})
        run = self.runs[place]
        del self.runs[place]
        sharing = self.sharing
        started = self._start(run)
        self.sharing = sharing
        return started

    def start(self) -> Run | None:
        """Take the next run. Returns it when there is nothing to compute, so that it is through."""
        return self._start(self.runs.popleft())

    def _start(self, run: Run) -> Run | None:
        for op in run.ops:
            self.cache.apply(op)
        if run.id in self.cancelled:
            run = structs.replace(run, cancelled=True)
        self.sharing = self.states.begin(run)
        if isinstance(run.save, Restore):
            assert not run.rows
            self.cache.restore(restorable(run.save), run.save.seq)
        elif run.save is not None:
            assert not run.rows
            assert run.cancelled or not run.save.tokens or self.cache.history(run.save.seq) == run.save.tokens
            self.saved.append(run.save)
        if run.cancelled or not run.rows:
            return self._through(run)
        run = structs.replace(run, dropped=run.dropped | self._dropped(run))
        if len(run.dropped) == len(run.rows):
            return self._through(structs.replace(run, cancelled=True))
        self.computing, self.histories = run, self.cache.decode(kept(run.rows, run.dropped))
        return None

    def _dropped(self, run: Run) -> set[int]:
        """Dead rows of a run that are not computed here."""
        dead = {row for number, row in self.dead_rows if number == run.id} - run.dropped
        match self.drops:
            case Dropping.NONE:
                return set()
            case Dropping.SOME:
                tips: dict[int, int] = {}
                for number, row in enumerate(run.rows):
                    if number in dead and len(row.seqs) == 1 and chance(run.id, number) % 2:
                        seq = row.seqs[0]
                        if row.pos - 1 == tips.get(seq, self.cache.tip(seq)):
                            dead.remove(number)
                    if number not in dead | run.dropped:
                        tips |= dict.fromkeys(row.seqs, row.pos)
        return dead

    def finish(self) -> Run:
        """The run that is computed. One that was cancelled in a pause stops."""
        assert self.computing is not None
        if self.computing.id in self.cancelled:
            return self._stop(self.computing)
        return self._through(self.computing)

    def hear(self) -> Run | None:
        """Take a cancel message. Returns the run that it aborts."""
        message = self.cancels.popleft()
        runs = set(message.runs) - self.past
        self.cancelled |= runs
        self.dead_rows |= {(run, row) for run, row in message.dead_rows if run not in self.past}
        if self.computing is None or self.computing.id not in runs:
            return None
        return self._stop(self.computing)

    def _stop(self, run: Run) -> Run:
        self.cache.forget(kept(run.rows, run.dropped))
        return self._through(structs.replace(run, cancelled=True))

    def _through(self, run: Run) -> Run:
        self.computing = None
        if self.paused is not None:
            self.through, self.histories = self.histories, self.paused[1]
            self.computing, self.paused = self.paused[0], None
            self.cache.let_go()
        else:
            self.through = self.histories
        self.past.add(run.id)
        self.cancelled.discard(run.id)
        self.dead_rows = {one for one in self.dead_rows if one[0] != run.id}
        return run


class FakePipeline:
    """Stages in a row, and what must hold of whoever feeds them. Nothing moves by itself."""

    def __init__(
        self,
        n_stages: int,
        limits: Limits,
        n_rows: int,
        answer: Answer,
        hybrid: bool = False,
        drops: Sequence[Dropping] = (),
        whole: Whole | None = None,
    ) -> None:
        """`drops`: of each stage; those without drop all dead rows. `whole`: without it, no row's past is hidden."""
        may_hide, n_ctx, n_seq = whole is not None, limits.n_ctx, limits.n_seq
        self.stages = [FakeStage(FakeCache(n_ctx, n_seq, hybrid, may_hide)) for _ in range(n_stages)]
        for stage, own in zip(self.stages, drops, strict=False):
            stage.drops = own
        self.results: collections.deque[tuple[Run, tuple[RowLogits, ...]]] = collections.deque()
        self.in_flight: dict[int, Run] = {}
        self.cancelled: set[int] = set()
        """Of those in flight."""
        self.dead_rows: set[DeadRow] = set()
        """All that the stages were told of."""
        self.run_of: dict[tuple[int, Tokens], int] = {}
        """(request, tokens up to a row) -> the run that carries the row."""
        self.rows_of: dict[int, list[tuple[int, Tokens]]] = {}
        self.ended: set[int] = set()
        self._n_rows = n_rows
        self._answer = answer
        self._whole = whole or (lambda _, history: history)
        self._plan = FakeCache(n_ctx, n_seq, hybrid, may_hide, limits.most_taken_back)
        """What the cache holds after all runs so far, if none is cancelled."""

    def restore(self, tokens: Tokens, more: Tokens) -> None:
        """Before the first run: what files have. The last stage's has `more` tokens behind the others'."""
        for stage in self.stages:
            stage.cache.restore(tokens + (more if stage is self.stages[-1] else ()))
        self._plan.restore(tokens + more)

    @property
    def saved(self) -> list[Save]:
        """What the stages were to save; the same in all of them when nothing is in flight."""
        assert all(stage.saved == self.stages[0].saved for stage in self.stages)
        return self.stages[0].saved

    # What its head does

    def submit(self, run: Run) -> None:
        assert not run.cancelled
        assert run.rows or run.ops or run.save
        assert run.id not in self.in_flight
        assert run.id not in self.ended
        assert len(run.rows) <= self._n_rows, "more rows than a batch holds"
        _, foreign = divided(run.ops, {seq for row in run.rows for seq in row.seqs})
        assert not (run.pauses and foreign), "others wait for their own operations"
        for op in run.ops:
            self._plan.apply(op)
        if isinstance(run.save, Restore):
            self._plan.restore(restorable(run.save), run.save.seq)
        self.rows_of[run.id] = []
        for row, seen in zip(run.rows, self._plan.decode(run.rows), strict=True):
            history = self._whole(row.request, seen)
            is_again = self._plan.hybrid and row.logits_request < 0
            assert is_again or (row.request, history) not in self.run_of, "evaluated twice"
            self.run_of[row.request, history] = run.id
            self.rows_of[run.id].append((row.request, history))
        self.in_flight[run.id] = run
        self.stages[0].runs.append(run)

    def cancel(self, message: CancelRuns) -> None:
        runs = set(message.runs)
        assert runs or message.dead_rows
        assert runs <= set(self.in_flight)
        assert not self.cancelled & runs
        self.cancelled |= runs
        dead_rows = set(message.dead_rows)
        assert len(dead_rows) == len(message.dead_rows)
        assert not self.dead_rows & dead_rows, "a row dies twice"
        assert not self.cancelled & {run for run, _ in dead_rows}
        assert all(row < len(self.in_flight[run].rows) for run, row in dead_rows)
        self.dead_rows |= dead_rows
        for stage in self.stages:
            stage.cancels.append(message)

    def take_result(self, seconds: float = 0.0, total_s: float = 0.0) -> RunResult:
        """The oldest that has come back. Each run ends once. `seconds`: in its slowest stage, `total_s`: in all."""
        run, rows = self.results.popleft()
        assert self.in_flight.pop(run.id).rows == run.rows
        self.cancelled.discard(run.id)
        self.ended.add(run.id)
        n_rows = 0 if run.cancelled else len(run.rows) - len(run.dropped)
        spans = (
            Span(rank=0, start_s=0.0, compute_s=seconds, busy_s=seconds, sent_bytes=0, n_rows=len(run.rows)),
            Span(rank=1, start_s=0.0, compute_s=0.0, busy_s=total_s - seconds, sent_bytes=0, n_rows=n_rows),
        )
        return RunResult(run.id, rows, spans, run.cancelled)

    # What happens in it

    def moves(self, name: str, hear_result: Callable[[], None]) -> list[Move]:
        """All that can happen next; `name` goes into theirs."""
        moves: list[Move] = []
        for i, stage in enumerate(self.stages):
            if stage.runs or stage.computing:
                moves.append((f"{name} stage {i}", functools.partial(self.step, i)))
            if stage.overtaking is not None:
                moves.append((f"{name} stage {i} overtakes", functools.partial(self.overtake, i)))
            if stage.cancels:
                moves.append((f"{name} cancel {i}", functools.partial(self.hear, i)))
        if self.results:
            moves.append((f"{name} result", hear_result))
        return moves

    def step(self, stage: int) -> None:
        """A stage starts its next run or ends the one that it computes."""
        here = self.stages[stage]
        run = here.start() if here.computing is None else here.finish()
        self._pass_on(stage, run)

    def overtake(self, stage: int) -> None:
        """A stage pauses, and starts a run that came later."""
        self._pass_on(stage, self.stages[stage].overtake())

    def hear(self, stage: int) -> None:
        self._pass_on(stage, self.stages[stage].hear())

    def _pass_on(self, stage: int, run: Run | None) -> None:
        if run is None:
            return
        if stage + 1 < len(self.stages):
            self.stages[stage + 1].runs.append(run)
            return
        rows: tuple[RowLogits, ...] = ()
        if not run.cancelled:
            numbered = kept(list(enumerate(run.rows)), run.dropped)
            seen = zip(numbered, self.stages[stage].through if run.rows else [], strict=True)
            rows = tuple(
                self._answer(i, row, run.logits_requests[row.logits_request], self._whole(row.request, history))
                for (i, row), history in seen
                if row.logits_request >= 0
            )
        self.results.append((run, rows))

    # What must hold

    @property
    def live(self) -> list[Run]:
        """Runs in flight that are not cancelled, markers left out."""
        return [run for run in self.in_flight.values() if run.rows and run.id not in self.cancelled]

    def beside(self, run: Run) -> list[Run]:
        """Live runs that keep their order as this one does: prompts' runs pause for others."""
        return [live for live in self.live if live.pauses == run.pauses]

    def depends(self, run: int, on: Iterable[int]) -> bool:
        """A row of this run hangs on a row of those."""
        parents = {self.run_of.get((request, history[:-1])) for request, history in self.rows_of[run]}
        return bool((parents - {run}) & set(on))

    def check_empty(self, kept: Mapping[int, Tokens]) -> None:
        """All is over; sequences with these tokens are kept."""
        assert not self.in_flight
        for stage in self.stages:
            assert not stage.runs
            assert not stage.cancels
            assert {seq: stage.cache.history(seq) for seq in kept} == kept
            assert all(cell.seqs <= kept.keys() for cell in stage.cache.cells), "cells are left behind"
            assert stage.cache.with_state <= kept.keys(), "states are left behind"


def cut_as_libllama(n_tokens: int, n_batch: int, n_ubatch: int) -> list[int]:
    """llama.cpp's tools feed `n_batch` tokens to llama_decode, which computes `n_ubatch` at a time."""
    lengths = []
    while n_tokens > 0:
        batch = min(n_tokens, n_batch)
        n_tokens -= batch
        while batch > 0:
            lengths.append(min(batch, n_ubatch))
            batch -= lengths[-1]
    return lengths
