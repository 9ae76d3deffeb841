"""Measures how long a rank's stage takes for runs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Collection, Iterable
from dataclasses import dataclass, field

from ggpipe.cluster.profile import Point
from ggpipe.core.events import CancelRuns
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Row, Run, Span
from ggpipe.engine.control_channel import ControlChannel
from ggpipe.engine.stage_thread import Loaded, Notice, PartDone, Passed, ResultReady, StageFailed, StageThread
from ggpipe.llama.group import Membership
from ggpipe.llama.layers import OnProgress
from ggpipe.llama.stage import Stage
from ggpipe.transport import codec

ROWS = (1, 2, 4, 8, 16, 32)
FEW_ROWS = (1, 2, 4, 8)
CHUNK_ROWS = 128
SHORT_CELLS, LONG_CELLS = 32, 512
_TOP = LogitsRequest(LogitsKind.TOP, 40, sums=False)  # what sampling requests by default
_MOST_ROUNDS, _MOST_RUNS, _MOST_LONG_RUNS = 15, 60, 5
_SLICE_S, _SHARED_S = 5e-3, 0.5


class TimedStage:
    """A stage in its thread, which computes runs of sequence 0."""

    def __init__(
        self,
        channel: ControlChannel[Notice],
        load: Callable[[OnProgress], Stage],
        n_vocab: int,
        poll_s: tuple[float, float],
        group: Membership | None = None,
    ) -> None:
        """Load the stage. `load`, `poll_s`, `group`: as for `StageThread`, whose notices go to the channel's inbox."""
        self._n_vocab = max(n_vocab, 1)
        self._channel = channel
        inbox = channel.inbox
        self._thread = StageThread(channel.transport.rank, load, inbox.put, inbox.put, poll_s=poll_s, group=group)
        try:
            notice = self._wait()
            while not isinstance(notice, Loaded):
                notice = self._wait()
        except BaseException:
            self._thread.close()
            raise
        self.stage = notice.stage
        inbox.relieved = self._thread.relief_s
        self.n_past = 0
        """Number of KV cells in use before a run."""
        self._id = 0
        self._last_rows = 0
        self._rolls_back = self.stage.rolls_back

    def run(self, n_rows: int, keep: bool = False) -> Timing:
        """Compute `n_rows` rows after `n_past` others. `keep`: leave their cells in the KV cache.

        Models that cannot roll back always keep them, as long as the context has room.
        """
        stays = keep or not self._rolls_back
        ops: tuple[KvOp, ...] = (KvOp(KvKind.RM, 0, p0=self.n_past),) if self._rolls_back and self.n_past else ()
        if self.n_past + n_rows > self.stage.n_ctx or not self.n_past:
            self.n_past, ops = 0, (KvOp(KvKind.RM, 0),)
        self._id += 1
        wanting = range(n_rows) if n_rows <= ROWS[-1] else (n_rows - 1,)
        rows = tuple(
            Row(
                token=(17 * self._id + 7 * i) % self._n_vocab,
                pos=self.n_past + i,
                seqs=(0,),
                request=0,
                logits_request=0 if i in wanting else -1,
            )
            for i in range(n_rows)
        )
        run = Run(id=self._id, rows=rows, ops=ops, logits_requests=(_TOP,))
        start = time.perf_counter()
        self._thread.submit(run)
        span, _ = self._outcome()
        hand_s = (time.perf_counter() - start - span.busy_s) / 2
        changed, self._last_rows = self._last_rows != n_rows, n_rows
        self.n_past += n_rows if stays else 0
        return Timing(
            compute_s=span.compute_s, run_s=span.busy_s - span.compute_s, hand_s=max(hand_s, 0.0), changed=changed
        )

    def pass_marker(self) -> float:
        """Seconds that the stage takes for a run that was cancelled before it arrived."""
        self._id += 1
        self._thread.submit(Run(id=self._id, rows=(), ops=(), logits_requests=(), cancelled=True))
        return self._outcome()[0].busy_s

    def stop(self, n_rows: int, after_s: float) -> float | None:
        """Cancel a run of `n_rows` rows after `after_s` seconds. Returns the seconds until it stops, or None if it had
        already ended. Only for models that roll back."""
        self._id += 1
        rows = tuple(Row(token=i, pos=self.n_past + i, seqs=(0,), request=0) for i in range(n_rows))
        self._thread.submit(Run(id=self._id, rows=rows, ops=(KvOp(KvKind.RM, 0, p0=self.n_past),), logits_requests=()))
        time.sleep(after_s)
        start = time.monotonic()
        self._thread.cancel(CancelRuns((self._id,)))
        span, cancelled = self._outcome()
        self._last_rows = n_rows
        return max(span.start_s + span.busy_s - start, 0.0) if cancelled else None

    @property
    def rolls_back(self) -> bool:
        """Whether the model's memory can remove the end of a sequence."""
        return self._rolls_back

    def _outcome(self) -> tuple[Span, bool]:
        """This stage's span of the submitted run, and whether the run was cancelled."""
        outcome = self._wait()
        if isinstance(outcome, PartDone):
            return outcome.span, False
        assert isinstance(outcome, Passed | ResultReady)
        if isinstance(outcome, ResultReady):
            return outcome.result.spans[-1], outcome.result.cancelled
        run, _, spans, _ = codec.read_run(outcome.message)
        return spans[-1], run.cancelled

    def fill(self, n_cells: int, chunk_rows: int) -> None:
        """Fill the KV cache to `n_cells` cells, or remove cells beyond them."""
        if n_cells < self.n_past:
            self.n_past = n_cells if self._rolls_back else 0
        while self.n_past < n_cells:
            self.run(min(chunk_rows, n_cells - self.n_past), keep=True)

    def close(self) -> None:
        """Free the stage."""
        self._channel.inbox.relieved = lambda: None
        self._thread.close()

    def _wait(self) -> Notice:
        """The next notice. Raises the error of the stage, or of another rank."""
        notice = self._channel.notice()
        if isinstance(notice, StageFailed):
            raise notice.error
        return notice


@dataclass(frozen=True, slots=True, kw_only=True)
class Timing:
    """The times of one run."""

    compute_s: float
    """Time in libllama's decode."""
    run_s: float
    """Time of the stage's thread outside `compute_s`."""
    hand_s: float
    """Mean time of a hand-over to or from the stage's thread."""
    changed: bool
    """The previous run had another number of rows."""


@dataclass
class Samples:
    """Times of runs of one stage."""

    same_s: dict[int, list[float]] = field(default_factory=dict)
    """By number of rows: decode times of runs whose predecessor had the same number of rows. With many rows, of all
    runs."""
    change_s: list[float] = field(default_factory=list)
    """Additional decode times of runs of few rows whose predecessor had another number of rows."""
    run_s: list[float] = field(default_factory=list)
    """Times of the stage's thread outside the decode, for runs of one row."""
    hand_s: list[float] = field(default_factory=list)
    """Times of hand-overs to and from the stage's thread, for runs of one row."""

    def measure(self, timed: TimedStage, n_rows: int) -> None:
        """Time a few runs of `n_rows` rows."""
        timings = [timed.run(n_rows) for _ in range(_runs_of(n_rows))]
        alike = [t.compute_s for t in timings if not t.changed] or [timings[-1].compute_s]
        self.same_s.setdefault(n_rows, []).extend(alike)
        if len(timings) > 1 and timings[0].changed:
            self.change_s.append(timings[0].compute_s - statistics.median(alike))
        if n_rows == 1:
            self.run_s += [t.run_s for t in timings]
            self.hand_s += [t.hand_s for t in timings]

    @property
    def more_for_change_s(self) -> float:
        """Typical additional decode time when the number of rows changes."""
        return max(statistics.median(self.change_s), 0.0) if self.change_s else 0.0

    @property
    def fastest_s(self) -> float:
        """Decode time of the fastest run of one row."""
        return min(self.same_s[1])

    def seconds(self, n_rows: int) -> float:
        """Estimated time of a run of `n_rows` rows, scaled from the largest measured number of rows up to `n_rows`."""
        known = [n for n in self.same_s if n <= n_rows]
        return statistics.median(self.same_s[max(known)]) * n_rows / max(known) if known else 0.0

    def points(self, n_past: int) -> list[Point]:
        """The times as points. `n_past`: tokens in the context before each run."""
        return [Point(n, n_past, typical_s(self.same_s[n])) for n in sorted(self.same_s)]


def sample(timed: TimedStage, rows: Iterable[int], needed: Collection[int], until: float) -> Samples:
    """Measure runs with these numbers of rows, each for about the same time, until `until` (`time.monotonic`).

    Those in `needed` are measured at least once, others only if they are expected to end in time.
    """
    samples, sizes = Samples(), tuple(dict.fromkeys(rows))
    spent_s = dict.fromkeys(sizes, 0.0)
    while True:
        start = time.monotonic()
        left = [n for n in sizes if n in needed and n not in samples.same_s] or [
            n
            for n in sizes
            if start + samples.seconds(n) * _runs_of(n) < until and len(samples.same_s.get(n, ())) < _most_runs_of(n)
        ]
        if not left:
            return samples
        n_rows = min(left, key=lambda n: spent_s[n])
        samples.measure(timed, n_rows)
        spent_s[n_rows] += time.monotonic() - start


def _runs_of(n_rows: int) -> int:
    """How many runs to time in a row. The first one pays for the change of rows; after it, the caches are in the same
    state as during generation."""
    if n_rows > FEW_ROWS[-1]:
        return 1
    return 3 if n_rows <= 2 else 2


def _most_runs_of(n_rows: int) -> int:
    return _MOST_RUNS if n_rows <= FEW_ROWS[-1] else _MOST_LONG_RUNS


def cells_before(n_ctx: int) -> int:
    """Number of KV cells in use in a short context."""
    return max(min(SHORT_CELLS, n_ctx // 4), 1)


def fitting(rows: Iterable[int], timed: TimedStage) -> tuple[int, ...]:
    """The numbers of rows in `rows` that this stage supports."""
    n_ctx = timed.stage.n_ctx
    return tuple(n for n in rows if n <= min(timed.stage.n_ubatch, n_ctx - cells_before(n_ctx)))


def measure_short(timed: TimedStage, budget_s: float, needed: Collection[int] = FEW_ROWS) -> Samples:
    """Measure runs in a short context: few and many rows, and a chunk of a prompt. `needed`: as for `sample`."""
    until = time.monotonic() + budget_s
    chunk = _chunk(timed)
    timed.fill(cells_before(timed.stage.n_ctx), chunk)
    return sample(timed, (*fitting(ROWS, timed), chunk), needed, until)


def measure_long(timed: TimedStage, short: Samples, budget_s: float) -> list[Point]:
    """Measure the same runs in a long context, with as many cells as there is time to fill. Returns no points if these
    are so few that noise would hide their effect."""
    until, n_ctx = time.monotonic() + budget_s, timed.stage.n_ctx
    chunk, rows = _chunk(timed), fitting(ROWS, timed)
    affordable = int(0.6 * budget_s / (short.seconds(chunk) / chunk))
    n_cells = min(LONG_CELLS, n_ctx - max(rows), cells_before(n_ctx) + affordable) // 32 * 32
    if n_cells < LONG_CELLS // 2:
        return []
    timed.fill(n_cells, timed.stage.n_ubatch)
    return sample(timed, (n for n in (*rows, chunk) if n_cells + n <= n_ctx), (1, 8), until).points(n_cells)


def measure_together(
    timed: TimedStage, budget_s: float, ready: Callable[[], None], enough: Callable[[], bool]
) -> list[Point]:
    """Repeat runs of few rows until `enough` returns True. `ready` is called once this rank has enough samples."""
    n_cells, samples = cells_before(timed.stage.n_ctx), Samples()
    rows = fitting(FEW_ROWS, timed)
    timed.fill(n_cells, _chunk(timed))
    start, n_rounds, is_ready = time.monotonic(), 0, False
    while True:
        for n in rows:
            samples.measure(timed, n)
            if is_ready and enough():
                return samples.points(n_cells)
        n_rounds += 1
        spent_s = time.monotonic() - start
        if not is_ready and (spent_s >= budget_s or (spent_s >= _SHARED_S and n_rounds >= _MOST_ROUNDS)):
            ready()
            is_ready = True


def intercept_s(small: tuple[int, float], large: tuple[int, float]) -> float:
    """Extrapolate two points (bytes, seconds) to the seconds of a stage without weights.

    The result is at most a quarter of the smaller point's seconds. No model comes near that, so more is noise.
    """
    (a, a_s), (b, b_s) = small, large
    return min(max(a_s - (b_s - a_s) * a / (b - a), 0.0), a_s / 4) if b > a else 0.0


def typical_s(seconds: list[float]) -> float:
    """Mean time of runs, without those that take more than three times the median.

    The median would be wrong: on shared machines, cores switch between two speeds, and the kernel delays only a few of
    the runs that share cores, but for a long time.
    """
    most_s = 3 * statistics.median(seconds)
    return statistics.fmean(s for s in seconds if s <= most_s or s <= _SLICE_S)


def _chunk(timed: TimedStage) -> int:
    return max(fitting((*ROWS, CHUNK_ROWS), timed))
