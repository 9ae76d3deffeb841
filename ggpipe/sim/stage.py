"""Virtual stages: queues of runs that are computed in order, passed on, and skipped or stopped when cancelled."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ggpipe.core.messages import Row, Run, Span
from ggpipe.sim.clock import Clock
from ggpipe.sim.cores import Cores, OwnCores, Task
from ggpipe.sim.network import Network
from ggpipe.sim.virtual_cluster import PipelineSpec, StageSpec, VirtualCluster

_REST_S = 2e-3  # after such a rest a decode is `Overheads.cold_s` slower, or others' turn has made it slower
_WAITING_POLL_S, _DRAFTED_POLL_S = 150e-6, 300e-6  # between two polls: runtime/inbox.py
_HEADER_BYTES, _ROW_HEADER_BYTES, _ANSWER_BYTES = 120, 24, 48


class Process:
    """A rank's Python: its threads work one after the other, since they share an interpreter. The main thread polls
    less often while a stage of the process computes."""

    def __init__(self, clock: Clock, cores: Cores, rank: int, cluster: VirtualCluster) -> None:
        self._clock = clock
        self._cores = cores
        self._rank = rank
        self._overheads = cluster.overheads
        self._waiting: collections.deque[tuple[float, float, Callable[[], None]]] = collections.deque()
        self._busy = False
        self._received_at = 0.0
        self._computing = 0
        """Number of this process's stages that compute."""
        self._idle_poll, self._busy_poll = 0.0, 0.0
        """Share of a core that polling takes while no stage computes, and while one does."""
        if cluster.node_of.count(cluster.node_of[rank]) > 1:
            self._idle_poll = self._overheads.poll_s / _WAITING_POLL_S
            self._busy_poll = self._overheads.poll_s / _DRAFTED_POLL_S if cluster.draft is not None else 0.0
            cores.poll(self._idle_poll)

    def computes(self, more: int) -> None:
        """A stage of this process begins to compute (1), or ends (-1)."""
        before = self._computing
        self._computing += more
        if self._busy_poll != self._idle_poll and not (before and self._computing):
            change = self._busy_poll - self._idle_poll
            self._cores.poll(change if self._computing else -change)

    def receive(self, source: int, action: Callable[[], None], n_events: int = 1) -> None:
        """Do this, the work of so many events, when a message from a rank, or from a stage of our own, is received."""
        self._received_at = max(
            self._clock.now + (self._overheads.poll_delay_s if self._computing else 0.0), self._received_at
        )
        work_s = n_events * self._overheads.event_s + (self._overheads.read_s if source != self._rank else 0.0)
        self._clock.at(self._received_at, lambda: self.do(work_s, action))

    def send(self, n_messages: int) -> None:
        """Send so many messages, after all earlier work."""
        if n_messages:
            self.do(n_messages * self._overheads.send_s, lambda: None)

    def do(self, work_s: float, action: Callable[[], None], weight: float = 1.0) -> None:
        """Do this after all earlier work."""
        self._waiting.append((work_s, weight, action))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not self._waiting:
            self._busy = False
            return
        self._busy = True
        work_s, weight, action = self._waiting.popleft()

        def done() -> None:
            action()
            self._next()

        self._cores.start(Task(work_s, 1, weight, done))


@dataclass(slots=True, kw_only=True)
class _Job:
    run: Run
    spans: tuple[Span, ...]
    start_s: float = 0.0
    decode_s: float = math.inf
    """Start of its decode."""
    task: Task | None = None


class VirtualStage:
    """A rank's stage at work."""

    def __init__(
        self,
        clock: Clock,
        cores: Cores,
        process: Process,
        cluster: VirtualCluster,
        stage: StageSpec,
        rank: int,
        row_bytes: int,
        deliver: Callable[[Run, tuple[Span, ...], int], None],
    ) -> None:
        """`row_bytes` go to the next stage for each row. `deliver` gets a computed run, its spans, and our rank."""
        self._clock = clock
        self._cores = cores
        self._process = process
        self._overheads = cluster.overheads
        self._stage = stage
        self._weight = cluster.nodes[cluster.node_of[rank]].nice_weight if stage.nice else 1.0
        self._alone = isinstance(
            cores, OwnCores
        )  # no other rank takes turns with this one: a shorter way to the same times
        several = cluster.node_of.count(cluster.node_of[rank]) > 1
        self._turns = cluster.nodes[cluster.node_of[rank]].turns if several else 1.0
        self._rank = rank
        self._row_bytes = row_bytes
        self._deliver = deliver
        self._queue: collections.deque[_Job] = collections.deque()
        self._current: _Job | None = None
        self._cancelled: set[int] = set()
        self._last_done = -1
        self._last_rows = 0
        self._rests_since = -_REST_S

    def take(self, run: Run, spans: tuple[Span, ...]) -> None:
        """Queue a run that arrived."""
        self._queue.append(_Job(run=run, spans=spans))
        if self._current is None:
            self._next()

    def cancel(self, runs: tuple[int, ...], by_message: bool) -> None:
        """Cancel runs. A rank that computes finds a message only when it polls."""
        self._cancelled.update(run for run in runs if run > self._last_done)
        job = self._current
        if job is not None and job.run.id in runs and not job.run.cancelled:
            delay_s = self._overheads.poll_delay_s if by_message else 0.0
            self._clock.after(delay_s + self._overheads.abort_s, lambda: self._abort(job))

    def _abort(self, job: _Job) -> None:
        if self._current is job and job.task is not None:
            self._cores.stop(job.task)
            job.run = replace(job.run, cancelled=True)
            self._done()

    def _next(self) -> None:
        if not self._queue:
            return
        job = self._current = self._queue.popleft()
        job.start_s = self._clock.now
        run = job.run
        if run.id in self._cancelled and not run.cancelled:
            run = job.run = replace(run, cancelled=True)
        bare = run.cancelled or not run.rows
        if self._alone and bare:
            job.task = Task(self._overheads.marker_s, 1, 1.0, self._done)
            self._cores.start(job.task)
        elif self._alone:
            self._start(job, self._overheads.run_s)
        else:
            self._process.computes(1)
            if bare:
                self._process.do(self._overheads.marker_s, self._done, self._weight)
            else:
                self._process.do(self._overheads.run_s, self._decode, self._weight)

    def _decode(self) -> None:
        job = self._current
        assert job is not None
        if job.run.id in self._cancelled:
            job.run = replace(job.run, cancelled=True)
            self._done()
        else:
            self._start(job, 0.0)

    def _start(self, job: _Job, before_s: float) -> None:
        n_rows = len(job.run.rows)
        job.decode_s = self._clock.now + before_s
        decode_s = self._stage.cost.seconds(n_rows, *_past(job.run.rows))
        work_s = before_s + decode_s
        if n_rows != self._last_rows:
            self._last_rows = n_rows
            work_s += self._stage.change_s
        if job.start_s - self._rests_since > _REST_S:
            row_s = self._stage.cost.seconds(1, *_past(job.run.rows))
            work_s += max(self._overheads.cold_s, (self._turns - 1) * row_s)
        job.task = Task(work_s, self._stage.threads, self._weight, self._done)
        self._cores.start(job.task)

    def _done(self) -> None:
        job = self._current
        assert job is not None
        run, now = job.run, self._clock.now
        self._current, self._last_done, self._rests_since = None, run.id, now
        self._cancelled.discard(run.id)
        if not self._alone:
            self._process.computes(-1)
        compute_s = max(now - job.decode_s, 0.0)
        n_bytes = _HEADER_BYTES + _ROW_HEADER_BYTES * len(run.rows)
        if run.rows and not run.cancelled:
            n_bytes += self._row_bytes * len(run.rows)
        span = Span(
            rank=self._rank, start_s=job.start_s, compute_s=compute_s, busy_s=now - job.start_s, sent_bytes=n_bytes
        )
        self._deliver(run, (*job.spans, span), self._rank)
        if self._current is None:
            self._next()


def _past(rows: Sequence[Row]) -> tuple[float, float]:
    """Tokens that a run's rows stand behind, on average, and further KV cells that it reads. A request's rows are
    together in a run."""
    if rows[0].request == rows[-1].request:
        return rows[0].pos, 0
    n_cells = n_past = begins = 0
    for i, row in enumerate(rows):
        if row.request != rows[begins].request:
            n_past += (i - begins) * rows[begins].pos
            n_cells += rows[begins].pos
            begins = i
    n_past += (len(rows) - begins) * rows[begins].pos
    n_cells += rows[begins].pos
    return n_past / len(rows), n_cells - n_past / len(rows)


class VirtualPipeline:
    """All stages of a pipeline. Runs that the last stage has computed go to the head."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        cores: list[Cores],
        processes: list[Process],
        cluster: VirtualCluster,
        pipeline: PipelineSpec,
        head: int,
        ended: Callable[[Run, tuple[Span, ...]], None],
    ) -> None:
        """`head`: the rank that submits; `ended` is called when a result arrives there."""
        self._network = network
        self._first = pipeline.layout.stage_ranks[0]
        layout = pipeline.layout
        self._following = {rank: next(iter(layout.receivers_of(rank)), None) for rank in layout.stage_ranks}
        self._head = head
        self._ended = ended
        last = pipeline.layout.stage_ranks[-1]
        self._stages = {}
        for rank, stage in pipeline.stages.items():
            node, row_bytes = cores[cluster.node_of[rank]], 0 if rank == last else pipeline.row_bytes
            self._stages[rank] = VirtualStage(
                clock, node, processes[rank], cluster, stage, rank, row_bytes, self._pass_on
            )

    def submit(self, run: Run) -> int:
        """Submit a run; returns the number of messages that this takes."""
        first = self._first
        n_bytes = _HEADER_BYTES + _ROW_HEADER_BYTES * len(run.rows)
        self._network.send(self._head, first, n_bytes, lambda: self._stages[first].take(run, ()))
        return int(first != self._head)

    def cancel(self, runs: tuple[int, ...]) -> int:
        """Cancel runs; returns the number of messages that this takes."""
        for rank, stage in self._stages.items():
            by_message = rank != self._head
            self._network.send(self._head, rank, _HEADER_BYTES, functools.partial(stage.cancel, runs, by_message))
        return len(self._stages) - (self._head in self._stages)

    def _pass_on(self, run: Run, spans: tuple[Span, ...], rank: int) -> None:
        following = self._following[rank]
        if following is None:
            n_bytes = spans[-1].sent_bytes + _ANSWER_BYTES * sum(row.want >= 0 for row in run.rows)
            self._network.send(rank, self._head, n_bytes, lambda: self._ended(run, spans))
        else:
            stage = self._stages[following]
            self._network.send(rank, following, spans[-1].sent_bytes, lambda: stage.take(run, spans))
