"""Virtual stages: queues of runs that are computed in order, passed on, and skipped or stopped when cancelled."""

from __future__ import annotations

import collections
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from ggpipe.cluster.links import Overheads
from ggpipe.core.dropped_rows import kept, rows_in_group
from ggpipe.core.events import CancelRuns
from ggpipe.core.messages import Row, Run, Span
from ggpipe.core.overtaking import CONTINUES, RunsDone, overtakes
from ggpipe.sim.clock import VirtualClock
from ggpipe.sim.cores import Cores, CpuTask, OwnCores
from ggpipe.sim.groups import GroupCost
from ggpipe.sim.virtual_cluster import StageSpec, VirtualCluster

_REST_S = 2e-3  # after such a rest a decode is `Overheads.cold_s` slower, or others' turn has made it slower
HEADER_BYTES = 120
"""Bytes of a message without its content."""
_ROW_HEADER_BYTES = 24
_WAITING_POLL_S, _DRAFTED_POLL_S = 150e-6, 300e-6  # between two polls: engine/inbox.py


class Process:
    """A rank's Python: its threads work one after the other, since they share an interpreter. The main thread polls
    less often while a stage of the process computes."""

    def __init__(self, clock: VirtualClock, cores: Cores, rank: int, cluster: VirtualCluster) -> None:
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
            self._busy_poll = self._overheads.poll_s / _DRAFTED_POLL_S if cluster.drafts else 0.0
            cores.poll(self._idle_poll)

    def computes(self, more: int) -> None:
        """A stage of this process begins to compute (1), or ends (-1)."""
        before = self._computing
        self._computing += more
        if self._busy_poll != self._idle_poll and not (before and self._computing):
            change = self._busy_poll - self._idle_poll
            self._cores.poll(change if self._computing else -change)

    def receive(self, source: int, action: Callable[[], None], n_events: int = 1) -> None:
        """Call a function, which takes the time of this many events, when a message from another rank or from a local
        stage is received."""
        self._received_at = max(
            self._clock.now + (self._overheads.poll_delay_s if self._computing else 0.0), self._received_at
        )
        work_s = n_events * self._overheads.event_s + (self._overheads.read_s if source != self._rank else 0.0)
        self._clock.at(self._received_at, lambda: self.do(work_s, action))

    def send(self, n_messages: int) -> None:
        """Send this number of messages, after all earlier work."""
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

        self._cores.start(CpuTask(work_s, 1, weight, done))


@dataclass(slots=True, kw_only=True)
class _Job:
    run: Run
    spans: tuple[Span, ...]
    rows: Sequence[Row] = ()
    """Those that are computed."""
    start_s: float = 0.0
    decode_s: float = math.inf
    """Start of its decode."""
    tasks: dict[StagePart, CpuTask] = field(default_factory=dict)
    """What its parts compute now."""
    n_left: int = 0
    """Parts that are still at it."""
    part_s: dict[StagePart, float] = field(default_factory=dict)
    """Of a run that pauses: the time of each of its sections."""
    n_sections: int = 0
    """Those that are left then."""
    resumed_s: float = 0.0
    """When it was begun, or continued."""
    computed_s: float = 0.0
    """Time of the sections that are done."""
    paused_at_s: float = 0.0
    paused_s: float = 0.0
    pauses_from_s: float = 0.0
    """When it may pause again."""


class StagePart:
    """A rank's part of a stage: all of it, or what one rank of a group computes."""

    def __init__(
        self, cores: Cores, process: Process, cluster: VirtualCluster, spec: StageSpec, rank: int, team: int
    ) -> None:
        """`team`: the stage's parts on this rank's node."""
        self.cores = cores
        self.team = team
        self.process = process
        self.spec = spec
        node = cluster.node_of[rank]
        self.weight = cluster.nodes[node].nice_weight if spec.nice else 1.0
        self.alone = isinstance(cores, OwnCores)
        """No other rank takes turns with this one: a shorter way to the same times."""
        self._turns = cluster.nodes[node].turns if cluster.node_of.count(node) > 1 else 1.0
        self._cold_s = cluster.overheads.cold_s

    def work_s(self, job: _Job, changed: bool, rested: bool) -> float:
        """Seconds of a decode. `changed`: the run before had another number of rows; `rested`: the stage rests."""
        cost, past = self.spec.cost, _past(job.rows)
        n_ahead = max([logits_request.n_positions for logits_request in job.run.logits_requests], default=1)
        work_s = cost.seconds(len(job.rows), *past) if self.spec.state_s is None else self._batches_s(job.rows)
        if n_ahead > 1:  # a block, which is decoded on its own
            work_s += cost.seconds(n_ahead + 1, *past)
        if changed:
            work_s += self.spec.change_s
        if rested:
            work_s += max(self._cold_s, (self._turns - 1) * cost.seconds(1, *past))
        return work_s

    def _batches_s(self, rows: Sequence[Row]) -> float:
        """Seconds of these rows in a recurrent model."""
        cost, state_s = self.spec.cost, self.spec.state_s or 0.0
        batches = _equal_batches(rows)
        return sum([cost.seconds(len(batch), *_past(batch)) + state_s * (n - 1) for n, batch in batches])


class VirtualStage:
    """A stage at work, on one rank or on a group, whose parts compute at the same time and then wait for their sums."""

    def __init__(
        self,
        clock: VirtualClock,
        parts: Sequence[StagePart],
        group: GroupCost | None,
        overheads: Overheads,
        rank: int,
        n_layers: int,
        row_bytes: int,
        deliver: Callable[[Run, tuple[Span, ...], int], None],
    ) -> None:
        """`group`: None where there is one part. `row_bytes` go to the next stage for each row. `deliver` gets a
        computed run, its spans, and `rank`, that of part 0."""
        self._clock = clock
        self._overheads = overheads
        self._group = group
        self._alone = [part for part in parts if part.alone]
        self._shared = [part for part in parts if not part.alone]
        self._rank = rank
        self._n_sections = 2 * n_layers if group is None else group.n_sums  # attention or FFN; then runs may pause
        self._row_bytes = row_bytes
        self._deliver = deliver
        self._queue: collections.deque[_Job] = collections.deque()
        self._current: _Job | None = None
        self._paused: _Job | None = None
        self._cancelled: set[int] = set()
        self._dead_rows: dict[int, set[int]] = collections.defaultdict(set)
        """By run."""
        self._runs_done = RunsDone()
        self._last_rows = 0
        self._rests_since = -_REST_S

    def take(self, run: Run, spans: tuple[Span, ...]) -> None:
        """Queue a run that arrived, at all parts."""
        self._queue.append(_Job(run=run, spans=spans))
        if self._current is None and self._paused is None:
            self._next()

    def cancel(self, cancelled: CancelRuns, by_message: bool) -> None:
        """Cancel runs, and drop rows of those that are not begun. A rank that computes finds a message only when it
        polls; what one part finds, all do."""
        for run, row in cancelled.dead_rows:
            if run not in self._runs_done:
                self._dead_rows[run].add(row)
        self._cancelled.update(run for run in cancelled.runs if run not in self._runs_done)
        job = self._current
        if job is not None and job.run.id in cancelled.runs and not job.run.cancelled:
            delay_s = self._overheads.poll_delay_s if by_message else 0.0
            self._clock.after(delay_s + self._overheads.abort_s, lambda: self._abort(job))

    def _abort(self, job: _Job) -> None:
        if self._current is job and job.decode_s < math.inf:
            self._skip(job)

    def _skip(self, job: _Job) -> None:
        for part, task in job.tasks.items():
            part.cores.stop(task)
        job.run = structs.replace(job.run, cancelled=True)
        self._done(job)

    def _next(self) -> None:
        if self._queue:
            self._begin(self._queue.popleft())

    def _begin(self, job: _Job) -> None:
        self._current = job
        job.start_s = self._clock.now
        run = job.run
        if run.id in self._cancelled and not run.cancelled:
            run = job.run = structs.replace(run, cancelled=True)
        run = job.run = self._without_dead_rows(run)
        job.rows = kept(run.rows, run.dropped)
        bare = run.cancelled or not run.rows
        job.n_left = bool(self._alone) + len(self._shared)
        changed = rested = False
        if not bare:
            changed, self._last_rows = len(job.rows) != self._last_rows, len(job.rows)
            rested = job.start_s - self._rests_since > _REST_S
        if self._alone:  # the slowest of them
            before_s = self._overheads.marker_s if bare else self._overheads.run_s
            if not bare:
                job.decode_s = self._clock.now + before_s
                work_s = max(part.work_s(job, changed, rested) for part in self._alone)
                before_s += self._first_s(job, self._alone[0], work_s)
            self._start(job, self._alone[0], before_s)
        for part in self._shared:
            part.process.computes(1)
            if bare:
                part.process.do(self._overheads.marker_s, functools.partial(self._part_done, job, part), part.weight)
            else:
                decode = functools.partial(self._decode, job, part, changed, rested)
                part.process.do(self._overheads.run_s, decode, part.weight)

    def _without_dead_rows(self, run: Run) -> Run:
        """The run without the rows that are dropped now. A group fills up with dead ones, as if it always could."""
        dead = self._dead_rows.pop(run.id, set()) - run.dropped
        if not dead or run.cancelled:
            return run
        n_rows = len(run.rows) - len(run.dropped)
        if self._group is not None:
            n_more = rows_in_group(n_rows - len(dead), n_rows) - (n_rows - len(dead))
            dead = set(sorted(dead)[n_more:])
        return structs.replace(run, dropped=run.dropped | dead, cancelled=len(dead) == n_rows)

    def _decode(self, job: _Job, part: StagePart, changed: bool, rested: bool) -> None:
        if self._current is not job:
            return
        if job.run.id in self._cancelled:
            self._skip(job)
        else:
            job.decode_s = min(job.decode_s, self._clock.now)
            self._start(job, part, self._first_s(job, part, part.work_s(job, changed, rested)))

    def _first_s(self, job: _Job, part: StagePart, work_s: float) -> float:
        """What a part computes before it may pause, of a run that takes this long."""
        job.resumed_s = self._clock.now
        if job.run.pauses:
            job.n_sections = self._n_sections
            work_s = job.part_s[part] = work_s / self._n_sections
        return work_s

    def _start(self, job: _Job, part: StagePart, work_s: float) -> None:
        done = functools.partial(self._part_done, job, part)
        task = job.tasks[part] = CpuTask(work_s, part.spec.threads, part.weight, done, part.team)
        part.cores.start(task)

    def _part_done(self, job: _Job, part: StagePart) -> None:
        if self._current is not job:
            return
        job.tasks.pop(part, None)
        job.n_left -= 1
        if job.n_left:
            return
        end = functools.partial(self._section_done if job.n_sections > 1 else self._done, job)
        if self._group is not None and job.run.rows and not job.run.cancelled:
            n_wanted = sum(row.logits_request >= 0 for row in job.rows)
            sums_s = self._group.seconds(len(job.rows), n_wanted) / (self._n_sections if job.run.pauses else 1)
            self._clock.after(sums_s, end)
        else:
            end()

    def _section_done(self, job: _Job) -> None:
        """A run that pauses may do so now."""
        if self._current is not job:
            return
        job.n_sections -= 1
        job.computed_s += self._clock.now - max(job.resumed_s, job.decode_s)
        if self._clock.now < job.pauses_from_s or not self._overtake(job):
            self._continue(job)

    def _overtake(self, job: _Job) -> bool:
        """Compute the next run that overtakes this one, if there is one."""
        sharing = None if (self._alone or self._shared)[0].spec.state_s is None else ()
        place = overtakes(job.run, [waiting.run for waiting in self._queue], math.inf, sharing)
        if place is None:
            return False
        if self._paused is None:
            self._paused, job.paused_at_s = job, self._clock.now
        short = self._queue[place]
        del self._queue[place]
        self._begin(short)
        return True

    def _continue(self, job: _Job) -> None:
        self._current, now = job, self._clock.now
        if self._paused is job:
            self._paused = None
            job.paused_s += now - job.paused_at_s
            job.pauses_from_s = now + CONTINUES * (now - job.paused_at_s)
        job.resumed_s = now
        if job.run.id in self._cancelled:
            self._skip(job)
            return
        job.n_left = len(job.part_s)
        for part, part_s in job.part_s.items():
            self._start(job, part, part_s)

    def _done(self, job: _Job) -> None:
        if self._current is not job:
            return
        run, now = job.run, self._clock.now
        self._runs_done.add(run.id)
        self._current, self._rests_since = None, now
        self._cancelled.discard(run.id)
        for part in self._shared:
            part.process.computes(-1)
        n_rows = 0 if run.cancelled else len(job.rows)
        n_bytes = header_bytes(run) + self._row_bytes * n_rows
        span = Span(
            rank=self._rank,
            start_s=job.start_s,
            compute_s=job.computed_s + max(now - max(job.resumed_s, job.decode_s), 0.0),
            busy_s=now - job.start_s - job.paused_s,
            sent_bytes=n_bytes,
            n_rows=n_rows,
        )
        self._deliver(run, (*job.spans, span), self._rank)
        if (paused := self._paused) is not None and self._current is None:
            is_due = now - paused.paused_at_s >= paused.paused_at_s - paused.resumed_s
            if is_due or not self._overtake(paused):
                self._continue(paused)
        elif self._current is None:
            self._next()


def header_bytes(run: Run) -> int:
    """Bytes of a run without its activations."""
    return HEADER_BYTES + _ROW_HEADER_BYTES * len(run.rows)


def _equal_batches(rows: Sequence[Row]) -> Sequence[tuple[int, Sequence[Row]]]:
    """The rows as libllama computes those of a recurrent model: batches, each with its number of sequences. In a batch,
    all sequences that have rows left have the same number of them, that of the sequence with the fewest."""
    if rows[0].request == rows[-1].request:
        return ((1, rows),)
    left: dict[int, list[Row]] = {}
    for row in rows:
        left.setdefault(row.request, []).append(row)
    batches = []
    while left:
        n_each = min(map(len, left.values()))
        batches.append((len(left), [row for own in left.values() for row in own[:n_each]]))
        left = {request: own[n_each:] for request, own in left.items() if len(own) > n_each}
    return batches


def _past(rows: Sequence[Row]) -> tuple[float, float]:
    """Average number of tokens before a run's rows, and the number of other KV cells that it reads. Rows of the same
    request are next to each other."""
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
