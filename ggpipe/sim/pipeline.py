"""Virtual stages: queues of runs, computed one after the other, passed on, skipped or stopped when cancelled."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace

from ggpipe.core.messages import Run, Span
from ggpipe.sim.clock import Clock
from ggpipe.sim.cluster import Cluster, Pipeline, Stage
from ggpipe.sim.cores import NICE_WEIGHT, STICKS_S, Cores, OwnCores, Task

_TURNS = 1.06  # where ranks of a node take turns, caches and cores change hands: scripts/bench_stage finds 1.03 to 1.10
_REST_S = 2e-3  # after which a decode is `Overheads.cold_s` slower
_WAITING_POLL_S, _DRAFTED_POLL_S = 150e-6, 300e-6  # between two looks for messages: runtime/inbox.py, startup.look_s
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
        """Have it arrive when the link has brought it; within a rank, when the other thread is awake."""
        clock = self._clock
        if source == target:
            clock.after(self._cluster.overheads.hand_s, arrive)
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
    """A rank's Python: its threads do one thing after the other, since they share an interpreter. The main thread looks
    for messages less often while a stage of the process computes."""

    def __init__(self, clock: Clock, cores: Cores, rank: int, cluster: Cluster) -> None:
        self._clock = clock
        self._cores = cores
        self._rank = rank
        self._overheads = cluster.overheads
        self._waiting: collections.deque[tuple[float, float, Callable[[], None]]] = collections.deque()
        self._busy = False
        self._heard_at = 0.0
        self._computing = 0
        """Stages of this process that are at work."""
        self._waits, self._works = 0.0, 0.0
        """What looking for messages takes of a core: while no stage is at work, and else."""
        if cluster.node_of.count(cluster.node_of[rank]) > 1:
            self._waits = self._overheads.poll_s / _WAITING_POLL_S
            self._works = self._overheads.poll_s / _DRAFTED_POLL_S if cluster.draft is not None else 0.0
            cores.look(self._waits)

    def computes(self, more: int) -> None:
        """A stage of this process begins to work (1), or is done (-1)."""
        before = self._computing
        self._computing += more
        if self._works != self._waits and not (before and self._computing):
            change = self._works - self._waits
            self._cores.look(change if self._computing else -change)

    def hear(self, source: int, action: Callable[[], None]) -> None:
        """A message came from a rank, or from a stage of our own: do this."""
        self._heard_at = max(self._clock.now + (self._overheads.look_s if self._computing else 0.0), self._heard_at)
        work_s = self._overheads.event_s + (self._overheads.read_s if source != self._rank else 0.0)
        self._clock.at(self._heard_at, lambda: self.do(work_s, action))

    def do(self, work_s: float, action: Callable[[], None], weight: float = 1.0) -> None:
        """Do this when all before it is done."""
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


@dataclass(slots=True)
class _Job:
    run: Run
    spans: tuple[Span, ...]
    start_s: float = 0.0
    decode_s: float = math.inf
    """When its decode began."""
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
        self._alone = isinstance(cores, OwnCores)  # nobody takes turns with us: a shorter way to the same times
        several = cluster.node_of.count(cluster.node_of[rank]) > 1
        self._is_guest = several and stage.nice and stage is not cluster.target.stages.get(rank, stage)
        self._slower = _TURNS if several else 1.0
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
        work_s = before_s + self._stage.cost.seconds(n_rows, job.run.rows[0].pos) * self._slower
        if n_rows != self._last_rows:
            self._last_rows = n_rows
            work_s += self._stage.change_s
        if job.start_s - self._rests_since > _REST_S:
            work_s += self._overheads.cold_s
        sticks = self._is_guest and work_s < STICKS_S
        job.task = Task(work_s, self._stage.threads, self._weight, self._done, sticks)
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
        span = Span(self._rank, job.start_s, compute_s, now - job.start_s, n_bytes)
        self._deliver(run, (*job.spans, span), self._rank)
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
