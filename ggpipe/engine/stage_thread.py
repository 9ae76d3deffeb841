"""A stage and the thread that computes it."""

from __future__ import annotations

import collections
import functools
import threading
import time
from collections.abc import Callable

import msgspec
from msgspec import structs

from ggpipe.core.dropped_rows import DeadRow
from ggpipe.core.events import CancelRuns
from ggpipe.core.messages import Restore, Restored, RowLogits, Run, RunResult, Save, Span
from ggpipe.core.overtaking import RunsDone, overtakes
from ggpipe.engine.inbox import poll_interval
from ggpipe.errors import GgpipeError, RunError
from ggpipe.llama.group import Membership
from ggpipe.llama.layers import OnProgress
from ggpipe.llama.pauses import Pauses
from ggpipe.llama.prompt_cache import PrefixFiles, PromptCache
from ggpipe.llama.stage import Outcome, Stage
from ggpipe.transport import codec
from ggpipe.transport.base import Payload
from ggpipe.transport.wake_event import WakeEvent

_POLL_QUIET_S = 50e-3
_NAMING_S = 5.0


class Loading(msgspec.Struct, frozen=True):
    """How far the stage's loading is."""

    done_bytes: int
    all_bytes: int


class Loaded(msgspec.Struct, frozen=True):
    """The stage is ready."""

    stage: Stage
    load_s: float
    restored: Restored


class Passed(msgspec.Struct, frozen=True):
    """A run is computed and its message ready for the next rank."""

    message: Payload


class ResultReady(msgspec.Struct, frozen=True):
    """A run is through: this was the last stage."""

    result: RunResult


class Fetched(msgspec.Struct, frozen=True):
    """A whole row of a run that is through, for a request."""

    request: int
    row: RowLogits


class PartDone(msgspec.Struct, frozen=True):
    """A run is computed, and another part of our group sends it on."""

    run: int
    span: Span


class InputsReady(msgspec.Struct, frozen=True):
    """Inputs of this stage's layers in a run that is computed, ready for a draft head."""

    message: Payload


class Saved(msgspec.Struct, frozen=True):
    """A sequence of a request is on disk, or restored, or `problem` says why it is not."""

    request: int
    problem: str
    n_bytes: int = 0
    """Size of the file."""


class StageFailed(msgspec.Struct, frozen=True):
    """Loading or a run failed; nothing more is computed."""

    error: GgpipeError


RunNotice = Passed | ResultReady | PartDone | Fetched | InputsReady
Notice = Loading | Loaded | RunNotice | Saved | StageFailed


class _Job(msgspec.Struct, frozen=True):
    run: Run
    header: bytes
    spans: tuple[Span, ...]
    incoming: Payload | None
    dead: frozenset[int] = frozenset()
    """Numbers of the rows that are known to be dead."""


class StageThread:
    """Loads a stage and computes runs in the order in which they are given, in a thread of its own."""

    def __init__(
        self,
        rank: int,
        load: Callable[[OnProgress], Stage],
        notify: Callable[[Notice], None],
        deliver: Callable[[RunNotice], None],
        pump: Callable[[], bool] | None = None,
        poll_s: tuple[float, float] = (1e-3, 10e-3),
        prompt_cache: PromptCache | None = None,
        group: Membership | None = None,
        prefix_files: PrefixFiles | None = None,
    ) -> None:
        """`load` makes the stage and reports its progress. `notify`, and `deliver` for what comes of runs, are called
        from the thread. `pump` is called while the thread has nothing to do: it polls, and submits what came.
        `poll_s`: while a run is computed, the main thread polls after a quarter of a run, within these seconds.
        `prompt_cache`, `prefix_files`: `load` has described the stage to them. `group`: `load` joins it.
        """
        self._rank = rank
        self._load = load
        self._notify = notify
        self._deliver = deliver
        self._pump = pump
        self._poll_s = poll_s
        self._prompt_cache = prompt_cache
        self._prefix_files = prefix_files
        self._group = group
        self._jobs: collections.deque[_Job] = collections.deque()
        self._wake = WakeEvent()
        self._last_run_s = 0.0
        self._last_active = time.monotonic()
        self._cancelled: set[int] = set()
        self._dead_rows: set[DeadRow] = set()
        """Of runs that are not done."""
        self._kept: dict[int, dict[int, RowLogits]] = {}
        """Whole rows, by run and row."""
        self._keeping = threading.Lock()
        self._done = RunsDone()
        self._resumed_at = 0.0
        """When the run that pauses was begun, or continued."""
        self._failed: Exception | None = None
        """What a run in a pause raised."""
        self._computing: Run | None = None
        self._closing = False
        self._stage: Stage | None = None
        self._pauses: Pauses | None = None
        self._inputs: InputsReady | None = None
        """Layer inputs of the last computed run, until they are delivered."""
        self._thread = threading.Thread(target=self._work, name="stage", daemon=True)
        self._thread.start()

    def submit(self, run: Run) -> None:
        """Compute a run as the first stage."""
        self._take(_Job(run, b"", (), None))
        if threading.current_thread() is not self._thread:
            self._wake.set()
            time.sleep(0)  # let the stage's thread have the GIL

    def submit_message(self, message: Payload) -> None:
        """Compute the run of a message from the rank before this one."""
        run, header, spans, at = codec.read_run(message)
        self._take(_Job(run, header, spans, memoryview(message)[at:]))
        self._wake.set()

    def _take(self, job: _Job) -> None:
        self._jobs.append(job)
        if self._pauses is not None and self._computing is not None and self._computing.pauses:
            self._pauses.want()

    def cancel(self, cancelled: CancelRuns) -> None:
        """Cancel these runs: skip them, or stop the one that is being computed. Their markers are still passed on. Of
        others that are not begun, drop the dead rows."""
        self._dead_rows.update(row for row in cancelled.dead_rows if row[0] not in self._done)
        self._cancelled.update(run for run in cancelled.runs if run not in self._done)
        if self._stage is not None:
            for run in cancelled.runs:
                self._stage.cancel(run)

    def fetch(self, request: int, run: int, row: int) -> None:
        """Deliver a whole row that was kept, for a request. Raises RunError where there is none."""
        with self._keeping:
            kept = self._kept.get(run, {}).get(row)
        if kept is None:
            raise RunError(f"row {row} of run {run} is not kept; the ranks are out of step")
        self._deliver(Fetched(request, kept))

    def close(self) -> None:
        """Drop the runs that are not done yet, stop the one being computed, free the stage."""
        self._closing = True
        self._wake.set()
        if self._group is not None:
            self._group.leave()
        while self._thread.is_alive() and not (self._group is not None and self._group.is_joining):
            stage, run = self._stage, self._computing  # which the thread may take back at any time
            if stage is not None and run is not None:
                stage.cancel(run.id)
            self._thread.join(0.01)

    def _work(self) -> None:
        try:
            start = time.perf_counter()
            stage = self._load(self._report_progress)
            self._stage = stage
            load_s = time.perf_counter() - start
            restored = self._prompt_cache.restore(stage) if self._prompt_cache is not None else Restored()
            self._notify(Loaded(stage, load_s, restored))
            if stage.pauses is not None:
                stage.pauses.at(functools.partial(self._pause, stage, stage.pauses))
                self._pauses = stage.pauses
            while (job := self._next_job()) is not None:
                self._finish(stage, job)
            self._stage = self._pauses = None
            stage.close()
        except GgpipeError as e:
            if self._group is not None and self._group.is_lost:  # whoever finds a rank dead can say which
                self._wake.wait(_NAMING_S)
            if not self._closing:
                self._notify(StageFailed(e))
        except Exception as e:  # a bug, but the other ranks must be informed
            error = RunError(f"internal error: {type(e).__name__}: {e}")
            error.__cause__ = e
            self._notify(StageFailed(error))

    def _finish(self, stage: Stage, job: _Job) -> None:
        """Compute a run, or skip it, and deliver what comes of it."""
        outer, self._computing, save = self._computing, job.run, job.run.save
        run, dead = self._decided(job.run)
        job = structs.replace(job, run=run, dead=dead)
        if isinstance(save, Save) and job.run.cancelled:
            save = structs.replace(save, tokens=())  # they are not computed
        self._resumed_at = time.monotonic()
        outcome = self._compute(stage, job)
        if self._failed is not None:
            raise self._failed
        self._computing = outer
        self._done.add(job.run.id)
        self._last_active = time.monotonic()
        self._cancelled.discard(job.run.id)
        with self._keeping:  # these rows are only requested after the result was sent
            self._deliver(outcome)
            if isinstance(outcome, ResultReady) and outcome.result.rows:
                self._keep(stage, job.run)
        if self._inputs is not None:
            self._deliver(self._inputs)
            self._inputs = None
        if save is not None:  # the next stages save theirs meanwhile
            self._notify(self._save(stage, save))

    def _pause(self, stage: Stage, pauses: Pauses) -> None:
        """Called by the stage between two layers of a run that pauses: compute what may overtake it."""
        paused = self._computing
        assert paused is not None
        now_s = time.monotonic()
        end_s = 2 * now_s - self._resumed_at  # after as long as it was computed before, or after one run
        try:
            overtaking = functools.partial(self._overtaking, paused, pauses.n_rows, stage.sharing)
            with stage.paused():
                job = overtaking(is_over=False)
                while job is not None:
                    self._finish(stage, job)
                    if is_over := time.monotonic() >= end_s:
                        pauses.want()  # the others wait for its next layer
                    job = overtaking(is_over=is_over)
        except Exception as e:  # it cannot go up through libllama
            self._failed = e
        self._resumed_at = time.monotonic()
        if self._failed or paused.id in self._cancelled:
            stage.cancel(paused.id)

    def _overtaking(self, paused: Run, most_rows: int, sharing: frozenset[int] | None, is_over: bool) -> _Job | None:
        """The next run that is computed in a pause, unless that is over. Part 0 of a group chooses for all parts."""
        place = None
        if not (is_over or self._closing):
            waiting = [job.run for job in tuple(self._jobs)]  # other threads add to them
            place = overtakes(paused, waiting, most_rows, sharing)
        chosen = 0 if place is None else self._jobs[place].run.id
        if self._group is not None:
            chosen = self._group.told(chosen)
        return self._arrived(chosen) if chosen else None

    def _arrived(self, run: int) -> _Job | None:
        """The job of a run; wait for it if it has only arrived at another part of the group. None: it does not come,
        since this rank or another one leaves."""
        start = time.monotonic()
        while not self._closing and not (self._group is not None and self._group.is_lost):
            for place, job in enumerate(tuple(self._jobs)):
                if job.run.id == run:
                    del self._jobs[place]
                    return job
            if self._pump is None or not self._pump():
                self._wake.wait(poll_interval(time.monotonic() - start))
        return None

    def _keep(self, stage: Stage, run: Run) -> None:
        if rows := stage.kept(run):
            self._kept[run.id] = rows

    def _decided(self, run: Run) -> tuple[Run, frozenset[int]]:
        """The run, cancelled or not, and its dead rows. All parts of a group decide alike, or some would wait for sums
        of the others."""
        cancelled, known = run.id in self._cancelled, tuple(self._dead_rows)  # which other threads add to
        dead = frozenset(row for number, row in known if number == run.id)
        self._dead_rows.difference_update([row for row in known if row[0] <= run.id])
        if self._group is not None and not run.cancelled and (run.rows or run.save is not None):
            cancelled, dead = self._group.agree(cancelled, dead, len(run.rows))
        return structs.replace(run, cancelled=True) if cancelled else run, dead

    def _save(self, stage: Stage, save: Save | Restore) -> Saved:
        files, problem, n_bytes = self._prefix_files, "", 0
        if isinstance(save, Restore):
            assert files is not None
            problem, n_bytes = files.restore(stage, save.seq, save.tokens, save.file)
        elif save.file and save.tokens:
            assert files is not None
            problem, n_bytes = files.save(stage, save.seq, save.tokens, save.file)
        elif save.tokens:
            assert self._prompt_cache is not None
            problem = self._prompt_cache.save(stage, save.seq, save.tokens)
        self._last_active = time.monotonic()
        return Saved(save.request, problem, n_bytes)

    def _report_progress(self, done_bytes: int, all_bytes: int) -> bool:
        self._notify(Loading(done_bytes, all_bytes))
        return not self._closing

    def _next_job(self) -> _Job | None:
        start = time.monotonic()
        while not self._closing:
            if self._jobs:
                return self._jobs.popleft()
            if self._pump is None:
                self._wake.wait(None)
            elif not self._pump():
                self._wake.wait(poll_interval(time.monotonic() - start))
        return None

    def relief_s(self) -> float | None:
        """Seconds for which the main thread may stop polling; None if it must poll.

        While the stage computes, the main thread polls a few times in a run: often enough to cancel that run,
        and seldom enough not to take the core and the GIL from it. Else this thread polls, if it has a `pump`.
        """
        if self._computing is None and (self._pump is None or self._stage is None):
            return None
        if self._computing is None and time.monotonic() - self._last_active > 1:
            return _POLL_QUIET_S
        least_s, most_s = self._poll_s
        return min(max(self._last_run_s / 4, least_s), most_s)

    def _compute(self, stage: Stage, job: _Job) -> RunNotice:
        start = time.monotonic()
        run = job.run
        header = b"" if stage.is_last else (job.header or codec.run_header(run))
        if header and (job.dead or run.dropped):
            header = codec.header_without(header, len(run.rows), run.dropped)
        room = (*job.spans, self._span(start, Outcome(bytearray(), (), 0.0, False), 0, 0))
        headroom = 0 if stage.is_last else len(codec.header_with(header, room, False))
        for old in [old for old in self._kept if old < run.kept_from]:
            del self._kept[old]
        outcome = stage.decode(run, job.incoming, headroom, job.dead)
        self._last_run_s = outcome.compute_s
        if outcome.cancelled and not run.cancelled:
            run = structs.replace(run, cancelled=True)
        if header and outcome.dropped:
            header = codec.header_without(header, len(run.rows), outcome.dropped)
        n_rows = 0 if run.cancelled else len(run.rows) - len(outcome.dropped)
        if self._group is not None and self._group.part > 0:  # libllama reads states of all parts from part 0
            return PartDone(run.id, self._span(start, outcome, 0, n_rows))
        if outcome.layer_inputs:
            self._inputs = InputsReady(codec.states_message(run, stage.tapped, outcome.layer_inputs))
        if stage.is_last:
            span = self._span(start, outcome, 0, n_rows)
            return ResultReady(RunResult(run.id, outcome.rows, (*job.spans, span), run.cancelled))
        message = outcome.outgoing
        span = self._span(start, outcome, len(message), n_rows)
        message[:headroom] = codec.header_with(header, (*job.spans, span), run.cancelled)
        return Passed(message)

    def _span(self, start_s: float, outcome: Outcome, sent_bytes: int, n_rows: int) -> Span:
        return Span(
            rank=self._rank,
            start_s=start_s,
            compute_s=outcome.compute_s,
            busy_s=time.monotonic() - start_s - outcome.paused_s,
            sent_bytes=sent_bytes,
            n_rows=n_rows,
        )
