"""Measures the time that ggpipe adds to decoding: in a stage around a run, and in the head's Python code."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator

from ggpipe.cluster.links import Overheads
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.events import Arrived, RunEnded, Sample, Sampled, SchedulerEvent, SubmitRun
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits, Run, RunResult, Span
from ggpipe.core.request import Counters, Limits, Request
from ggpipe.core.request_spec import RequestSpec
from ggpipe.core.scheduler import Scheduler
from ggpipe.profiling.stage_timing import Samples, TimedStage
from ggpipe.transport import codec
from ggpipe.transport.wake_event import WakeEvent

_REST_S = 5e-3
_LEAST_ROUNDS, _MOST_ROUNDS = 4, 25
_STOPPED_ROWS = 8
_POLLS, _POLL_S = 100, 100e-6
_GREEDY = LogitsRequest(LogitsKind.TOP, 1)


def measure_stops(timed: TimedStage, budget_s: float) -> tuple[float, float]:
    """Measure (`Overheads.cold_s`, `Overheads.abort_s`) with a small stage, for about `budget_s` seconds."""
    cold_s: list[float] = []
    abort_s: list[float] = []
    n_stopped = min(_STOPPED_ROWS, timed.stage.n_ubatch)
    for _ in _rounds(budget_s):
        before_s = [timed.run(1).compute_s for _ in range(3)][-1]
        time.sleep(_REST_S)
        cold_s.append(timed.run(1).compute_s - before_s)
        if timed.rolls_back and (stopped_s := timed.stop(n_stopped, before_s)) is not None:
            abort_s.append(stopped_s)
    return max(statistics.median(cold_s), 0.0), statistics.median(abort_s) if abort_s else Overheads().abort_s


def measure_overheads(timed: TimedStage, pump: Callable[[], bool], budget_s: float) -> Overheads:
    """Measure what one rank can measure alone, for about `budget_s` seconds. Costs of messages keep their defaults.

    The stage should have a realistic size: its weights evict data from the caches that Python reads again after a
    decode. `pump` polls once for messages.
    """
    head, samples = HeadWork(), Samples()
    marker_s: list[float] = []
    event_s: list[float] = []
    for _ in _rounds(budget_s):
        samples.measure(timed, 1)
        event_s.append(head.token_s())
        timed.run(1)
        marker_s.append(timed.pass_marker())
    return Overheads(
        run_s=statistics.median(samples.run_s),
        hand_s=statistics.median(samples.hand_s),
        marker_s=statistics.median(marker_s),
        event_s=statistics.median(event_s),
        poll_s=_poll_s(pump),
    )


def _rounds(budget_s: float) -> Iterator[int]:
    """Numbers of rounds, from 0, until the budget is spent; at least 4, at most 25."""
    until = time.monotonic() + budget_s
    for i in range(_MOST_ROUNDS):
        if i >= _LEAST_ROUNDS and time.monotonic() > until:
            break
        yield i


def _poll_s(pump: Callable[[], bool]) -> float:
    """CPU seconds of a poll for messages, by a thread that sleeps between polls."""
    wake = WakeEvent()
    start_s = time.thread_time()
    for _ in range(_POLLS):
        pump()
        wake.wait(_POLL_S)
    return (time.thread_time() - start_s) / _POLLS


class HeadWork:
    """The head's work per token of a request, with the real scheduler."""

    def __init__(self) -> None:
        limits = Limits(n_ctx=1 << 20, n_batch=512, n_ubatch=512, n_in_flight=2)
        self._scheduler = Scheduler(limits)
        spec = RequestSpec(prompt=(1,), speculation=SpeculationConfig(mode="iterative"))
        self._request = Request(id=1, spec=spec, prompt=(1,))
        self._run = self._submitted(Arrived(self._request, _GREEDY, Counters()))

    def token_s(self) -> float:
        """Seconds from an encoded result to the next encoded run."""
        row = RowLogits(0, (1,), (0.0,), 0.0)
        span = Span(rank=0, start_s=0.0, compute_s=1e-3, busy_s=1e-3, sent_bytes=0, n_rows=1)
        message = codec.result_message(RunResult(self._run.id, (row,), (span,), False))
        start_s = time.perf_counter()
        self._run = self._submitted(RunEnded(codec.read_result(message)))
        codec.run_header(self._run)
        return time.perf_counter() - start_s

    def _submitted(self, event: SchedulerEvent) -> Run:
        """The run that follows from an event."""
        actions = self._scheduler.handle(event, time.monotonic())
        while actions:
            match actions.pop(0):
                case SubmitRun(run):
                    return run
                case Sample(request, row):
                    token = row.ids[0] if row.ids is not None else 0
                    actions += self._scheduler.handle(Sampled(request, token, _GREEDY), time.monotonic())
        raise RuntimeError("the scheduler submits no run: a bug")
