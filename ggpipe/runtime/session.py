"""The head: loads once with all ranks, then serves requests, one after the other.

with Session(transport, config) as session:
    session.load()
    for token in session.generate(session.vocab.tokenize("Once upon"), SamplingConfig(temp=0)):
        print(token.text, end="")
"""

from __future__ import annotations

import collections
import gc
import itertools
import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from types import TracebackType

from ggpipe.config import EngineConfig, SamplingConfig, SpeculationConfig
from ggpipe.core.events import (
    Action,
    Arrived,
    Cancel,
    Emit,
    Event,
    Finish,
    Finished,
    Guessed,
    Request,
    RunEnded,
    Sample,
    Sampled,
    Steer,
    Stop,
    Submit,
    Tick,
)
from ggpipe.core.messages import RunRecord, RunResult, Span
from ggpipe.core.scheduler import Scheduler
from ggpipe.engine import machine
from ggpipe.engine.sampling import Sampler
from ggpipe.engine.vocab import TextDecoder, Vocab
from ggpipe.errors import GgpipeError, UsageError
from ggpipe.runtime.hub import DraftNews, Hub, News
from ggpipe.runtime.loading import load_all
from ggpipe.runtime.stats import RankStats, RequestStats
from ggpipe.transport.base import Transport

_PINGS = 9


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token and the text that became whole with it (empty inside a character)."""

    id: int
    text: str
    guessed: bool = False
    """It was in the pipeline as a guess before it was drawn."""


class Session:
    """See the module's text. All methods but `stop` belong to the main thread."""

    def __init__(self, transport: Transport, config: EngineConfig) -> None:
        """Nothing is loaded yet, and no other rank is asked anything."""
        self._hub = Hub(transport, config)
        self.ranks = self._hub.ranks
        """All ranks in order; behind them the draft inside the head's process, if there is one."""
        self.warnings: list[str] = []
        self._request_ids = itertools.count(1)
        self._stop = self._quit_sent = False
        self._scheduler: Scheduler
        self._runs: dict[int, tuple[int, int]] = {}
        """Of each run in flight: rows, guesses."""
        self._stats = RequestStats()
        self.vocab: Vocab
        self._ends: frozenset[int]
        self.can_speculate = False
        self.n_ctx = 0

    def load(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Agree with all ranks, then load everywhere; `ranks` shows how far each is, `on_progress` when it changed.

        Raises the first error that any rank met.
        """
        models = load_all(self._hub, on_progress, lambda: self._stop)
        self.vocab, self.can_speculate = models.vocab, models.can_speculate
        self.warnings += models.warnings
        self._ends = frozenset(self.vocab.end_tokens)
        self.n_ctx = models.limits.n_ctx
        self._scheduler = Scheduler(models.limits)
        gc.freeze()  # what is there now stays: the collector need not look at it again

    # Serving

    def check_prompt(self, prompt: tuple[int, ...]) -> None:
        """Raises UsageError for a prompt that is empty or that leaves no room for an answer."""
        if not prompt:
            raise UsageError("the prompt is empty: give one with -p or -f")
        if len(prompt) >= self.n_ctx:
            raise UsageError(
                f"the prompt has {len(prompt)} tokens and the context {self.n_ctx}: raise -c above the prompt's length"
            )

    def generate(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingConfig,
        n_predict: int = -1,
        stats: RequestStats | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> Iterator[Token]:
        """Continue a prompt. `stats` is filled in while the tokens come. `speculation` needs a draft model.

        A token that ends the text is not given out. Raises UsageError for a bad prompt, RunError when a rank breaks.
        """
        self.check_prompt(prompt)
        stats = stats if stats is not None else RequestStats()
        sampler = Sampler(sampling, self.vocab, self.n_ctx)
        speculation = speculation or SpeculationConfig()
        if not self.can_speculate:
            speculation = replace(speculation, mode="iterative")
        if self._hub.config.context.exact:  # branches would change the order of the cells
            speculation = replace(speculation, n_parallel=1)
        request = Request(
            next(self._request_ids), prompt, n_predict, speculation, self._ends, sampler.banned, sampling.penalizes
        )
        try:
            sampler.accept(prompt)
            decoder = TextDecoder(self.vocab)
            stats.seed, stats.n_prompt, stats.arrived = sampler.seed, len(prompt), time.monotonic()
            stats.ranks = [RankStats(r.rank, r.draft, r.host, r.layers, r.threads) for r in self.ranks]
            stats.speculation = speculation
            self._stats = stats
            for emitted in self._run(request, sampler, stats):
                yield Token(emitted.token, decoder.push(emitted.token), emitted.guessed)
            if rest := decoder.finish():
                yield Token(-1, rest)
        except GeneratorExit:  # the caller wants no more of it: the next request must find nothing in the way
            self._abandon(request)
            raise
        finally:
            sampler.close()
            self._stop = False  # only now: one that came while loading ends the first request
            stats.ended = time.monotonic()

    def _abandon(self, request: Request) -> None:
        actions = self._handle(Stop(request.id))
        while not any(isinstance(action, Finished) for action in actions):
            for action in actions:
                self._perform(action)
            event = self._hub.next()
            actions = self._on_event(event)
        for action in actions:
            self._perform(action)

    def _run(self, request: Request, sampler: Sampler, stats: RequestStats) -> Iterator[Emit]:
        actions = collections.deque(self._handle(Arrived(request, sampler.want())))
        stats.counters = self._scheduler.counters(request.id)
        stopping = False
        while True:
            emitted: list[Emit] = []
            finished = False
            while actions:  # the pipeline first, the user second
                match actions.popleft():
                    case Sample(_, row):
                        token = sampler.sample(row)
                        sampler.accept((token,))
                        actions.extend(self._handle(Sampled(request.id, token, token in self._ends, sampler.want())))
                    case Emit() as action:
                        stats.token_times.append(time.monotonic())
                        stats.guessed.append(action.guessed)
                        emitted.append(action)
                    case Finished(_, reason):
                        stats.finish = reason.value
                        finished = True
                    case action:
                        self._perform(action)
            stats.n_in_flight = self._scheduler.n_in_flight
            yield from emitted
            if finished:
                return
            if self._stop and not stopping:
                stopping = True
                stats.finish = Finish.STOPPED.value
                actions.extend(self._handle(Stop(request.id)))
                continue
            actions.extend(self._on_event(self._hub.next(self._scheduler.wake_at)))

    def _on_event(self, event: News) -> list[Action]:
        match event:
            case RunResult(run, rows, spans, cancelled):
                n_rows, n_guesses = self._runs.pop(run)
                if n_rows:
                    self._stats.runs.append(RunRecord(run, n_rows, n_guesses, cancelled, spans))
                    self._count(spans, draft=False)
                compute_s = max((span.compute_s for span in spans), default=0.0)
                return self._handle(RunEnded(run, rows, compute_s, sum(span.busy_s for span in spans)))
            case DraftNews(batch, records):
                self._stats.draft_runs += records
                for record in records:
                    self._count(record.spans, draft=True)
                return self._handle(Guessed(batch))
            case None if (wake_at := self._scheduler.wake_at) is not None and time.monotonic() >= wake_at:
                return self._handle(Tick())
        return []

    def _count(self, spans: Sequence[Span], draft: bool) -> None:
        for span in spans:
            entry = -1 if draft and self._hub.draft_inside else span.rank
            self.ranks[entry].add(span)
            if self._stats.ranks:
                self._stats.ranks[entry].add(span)

    def _handle(self, event: Event) -> list[Action]:
        return self._scheduler.handle(event, time.monotonic())

    def _perform(self, action: Action) -> None:
        match action:
            case Submit(run, n_guesses):
                self._runs[run.id] = len(run.rows), n_guesses
                self._hub.submit(run)
            case Cancel(runs):
                self._hub.cancel(runs)
            case Steer(message):
                self._hub.steer(message)

    def _attend(self, event: News) -> None:
        """What comes while no request is served: the end of what carried the last one's KV operations."""
        for action in self._on_event(event):
            self._perform(action)

    # Ending

    def stop(self) -> None:
        """End the current request soon, keeping what is generated. From any thread or a signal handler."""
        self._stop = True

    def terminate(self) -> None:
        """Give up waiting for anything. From any thread or a signal handler."""
        self._hub.terminate()

    def measure(self) -> None:
        """Ask every rank what it has resident and what CPU time it took; fills `ranks`."""
        self._hub.tell_all("stats")
        own = {"rank": 0, "cpu_s": time.process_time(), "resident_bytes": machine.resident_bytes()}
        for rank, content in {0: own, **self._hub.gather("stats", self._attend, timeout_s=5)}.items():
            self.ranks[rank].cpu_s, self.ranks[rank].resident_bytes = content["cpu_s"], content["resident_bytes"]

    def align_clocks(self) -> None:
        """Fill in `clock_offset_s` of all ranks, from the quickest of some pings. One machine's ranks share a clock."""
        for stats in self.ranks:
            if stats.host == self.ranks[0].host:
                continue
            best_s = math.inf
            for _ in range(_PINGS):
                sent = time.monotonic()
                self._hub.tell(stats.rank, "clock")
                while not (isinstance(event := self._hub.next(), dict) and event["kind"] == "clock"):
                    self._attend(event)
                took_s = time.monotonic() - sent
                if took_s < best_s:
                    best_s, stats.clock_offset_s = took_s, sent + took_s / 2 - event["now"]

    def idle(self, seconds: float) -> None:
        """Stay ready without a request. Raises when a rank breaks."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._attend(self._hub.next())

    def close(self, exit_code: int = 0) -> None:
        """Let all ranks go with this exit code. A second call does nothing."""
        if self._quit_sent:
            return
        self._quit_sent = True
        self._hub.tell_all("quit", code=exit_code)
        self._hub.transport.flush(timeout_s=5)
        self._hub.close()
        if hasattr(self, "vocab"):
            self.vocab.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(error.exit_code if isinstance(error, GgpipeError) else int(kind is not None))
