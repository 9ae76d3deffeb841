"""Virtual stages: queues of runs, computed one after the other, passed on, skipped or stopped when cancelled."""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

from ggpipe.core.messages import Run, Span
from ggpipe.sim.clock import Clock
from ggpipe.sim.cluster import Cluster, Overheads, Pipeline, Stage
from ggpipe.sim.cores import NICE_WEIGHT, Cores, Task

_TURNS = 1.06  # where ranks of a node take turns, caches and cores change hands: scripts/bench_stage finds 1.03 to 1.10
_HEADER_BYTES, _ROW_HEADER_BYTES, _ANSWER_BYTES = 120, 24, 48


@dataclass(slots=True)
class _Road:
    """A link in use. `node`: whose network card it starts at; -1 within a node."""

    latency_s: float
    byte_s: float
    node: int
    last_at: float = 0.0


class Network:
    """Brings messages to other ranks. A node sends one after the other; what goes from rank to rank stays in order."""

    def __init__(self, clock: Clock, cluster: Cluster) -> None:
        self._clock = clock
        self._cluster = cluster
        self._free_at = [0.0] * len(cluster.nodes)
        self._roads: dict[tuple[int, int], _Road] = {}

    def send(self, source: int, target: int, n_bytes: int, arrive: Callable[[], None]) -> None:
        """Have it arrive when the link has brought it; at once within a rank."""
        clock = self._clock
        if source == target:
            clock.after(0.0, arrive)
            return
        road = self._roads.get((source, target)) or self._build(source, target)
        sent_at = clock.now + n_bytes * road.byte_s
        if road.node >= 0:
            sent_at = max(sent_at, self._free_at[road.node] + n_bytes * road.byte_s)
            self._free_at[road.node] = sent_at
        road.last_at = max(sent_at + road.latency_s, road.last_at)
        clock.at(road.last_at, arrive)

    def _build(self, source: int, target: int) -> _Road:
        link, (a, b) = self._cluster.link(source, target), (self._cluster.node_of[r] for r in (source, target))
        road = self._roads[source, target] = _Road(link.latency_s, 1 / link.bytes_per_s, a if a != b else -1)
        return road


class Process:
    """A rank's main thread: takes up one thing after the other. It looks for messages less often while a stage of its
    process computes."""

    def __init__(self, clock: Clock, cores: Cores, rank: int, overheads: Overheads) -> None:
        self._clock = clock
        self._cores = cores
        self._rank = rank
        self._overheads = overheads
        self._waiting: collections.deque[tuple[float, Callable[[], None]]] = collections.deque()
        self._busy = False
        self._heard_at = 0.0
        self.computing = 0
        """Stages of this process that are at work."""

    def hear(self, source: int, action: Callable[[], None]) -> None:
        """A message came from a rank, or from a stage of our own: do this."""
        self._heard_at = max(self._clock.now + (self._overheads.look_s if self.computing else 0.0), self._heard_at)
        work_s = self._overheads.event_s + (self._overheads.read_s if source != self._rank else 0.0)
        self._clock.at(self._heard_at, lambda: self.do(work_s, action))

    def do(self, work_s: float, action: Callable[[], None]) -> None:
        """Do this when all before it is done."""
        self._waiting.append((work_s, action))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        if not self._waiting:
            self._busy = False
            return
        self._busy = True
        work_s, action = self._waiting.popleft()

        def done() -> None:
            action()
            self._next()

        self._cores.start(Task(work_s, 1, 1.0, done))


@dataclass(slots=True)
class _Job:
    run: Run
    spans: tuple[Span, ...]
    task: Task | None = None


class VirtualStage:
    """A rank's part of a pipeline at work."""

    def __init__(
        self,
        clock: Clock,
        cores: Cores,
        process: Process,
        cluster: Cluster,
        stage: Stage,
        rank: int,
        row_bytes: int,
        deliver: Callable[[Run, tuple[Span, ...], int], None],
    ) -> None:
        """`row_bytes` go on for each row. `deliver` gets what came of a run, its spans so far, and our rank."""
        self._clock = clock
        self._cores = cores
        self._process = process
        self._overheads = cluster.overheads
        self._stage = stage
        self._weight = NICE_WEIGHT if stage.nice else 1.0
        several = cluster.node_of.count(cluster.node_of[rank]) > 1
        self._slower = _TURNS if several else 1.0
        self._rank = rank
        self._row_bytes = row_bytes
        self._deliver = deliver
        self._queue: collections.deque[_Job] = collections.deque()
        self._current: _Job | None = None
        self._cancelled: set[int] = set()
        self._last_done = -1
        self._last_rows = 0

    def take(self, run: Run, spans: tuple[Span, ...]) -> None:
        """A run arrived."""
        self._queue.append(_Job(run, spans))
        if self._current is None:
            self._next()

    def cancel(self, runs: tuple[int, ...], by_message: bool) -> None:
        """Nobody needs these runs. A rank that computes finds a message only when it looks."""
        self._cancelled.update(run for run in runs if run > self._last_done)
        job = self._current
        if job is not None and job.run.id in runs and not job.run.cancelled:
            look_s = self._overheads.look_s if by_message else 0.0
            self._clock.after(look_s + self._overheads.abort_s, lambda: self._abort(job))

    def _abort(self, job: _Job) -> None:
        if self._current is job and job.task is not None:
            self._cores.stop(job.task)
            job.run = replace(job.run, cancelled=True)
            self._done()

    def _next(self) -> None:
        if not self._queue:
            return
        job = self._current = self._queue.popleft()
        run = job.run
        if run.id in self._cancelled and not run.cancelled:
            run = job.run = replace(run, cancelled=True)
        self._process.computing += 1
        if run.cancelled or not run.rows:
            work_s, threads = self._overheads.marker_s, 1
        else:
            n_rows = len(run.rows)
            work_s = self._overheads.run_s + self._stage.cost.seconds(n_rows, run.rows[0].pos) * self._slower
            if n_rows != self._last_rows:
                self._last_rows = n_rows
                work_s += self._stage.change_s
            threads = self._stage.threads
        job.task = Task(work_s, threads, self._weight, self._done)
        self._cores.start(job.task)

    def _done(self) -> None:
        job = self._current
        assert job is not None
        assert job.task is not None
        run, start_s = job.run, job.task.begun_at
        self._current, self._last_done = None, run.id
        self._cancelled.discard(run.id)
        self._process.computing -= 1
        busy_s, n_bytes = self._clock.now - start_s, _HEADER_BYTES + _ROW_HEADER_BYTES * len(run.rows)
        if run.cancelled or not run.rows:
            compute_s = max(busy_s - self._overheads.marker_s, 0.0)
        else:
            compute_s = max(busy_s - self._overheads.run_s, 0.0)
            n_bytes += self._row_bytes * len(run.rows)
        self._deliver(run, (*job.spans, Span(self._rank, start_s, compute_s, busy_s, n_bytes)), self._rank)
        if self._current is None:
            self._next()


class VirtualPipeline:
    """All stages of a pipeline. What ends in the last one goes to the head."""

    def __init__(
        self,
        clock: Clock,
        network: Network,
        cores: list[Cores],
        processes: list[Process],
        cluster: Cluster,
        pipeline: Pipeline,
        head: int,
        ended: Callable[[Run, tuple[Span, ...]], None],
    ) -> None:
        """`head`: the rank that submits; `ended` is called when a result arrives there."""
        self._network = network
        self._first = pipeline.layout.stages[0]
        self._following = {rank: pipeline.layout.next_of(rank) for rank in pipeline.layout.stages}
        self._head = head
        self._ended = ended
        last = pipeline.layout.stages[-1]
        self._stages = {}
        for rank, stage in pipeline.stages.items():
            node, row_bytes = cores[cluster.node_of[rank]], 0 if rank == last else pipeline.row_bytes
            self._stages[rank] = VirtualStage(
                clock, node, processes[rank], cluster, stage, rank, row_bytes, self._pass_on
            )

    def submit(self, run: Run) -> int:
        """Put a run in; returns the number of messages that this takes."""
        first = self._first
        n_bytes = _HEADER_BYTES + _ROW_HEADER_BYTES * len(run.rows)
        self._network.send(self._head, first, n_bytes, lambda: self._stages[first].take(run, ()))
        return int(first != self._head)

    def cancel(self, runs: tuple[int, ...]) -> int:
        """Nobody needs these runs; returns the number of messages that this takes."""
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
