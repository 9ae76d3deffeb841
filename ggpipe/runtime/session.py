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
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import TracebackType
from typing import Any

from ggpipe.config import EngineConfig, SamplingConfig
from ggpipe.core.layout import Layout
from ggpipe.core.messages import Run, RunResult, Span
from ggpipe.core.scheduler import (
    Action,
    Arrived,
    Cancel,
    Event,
    Finish,
    Finished,
    Limits,
    Request,
    RunEnded,
    Sample,
    Sampled,
    Scheduler,
    Stop,
    Submit,
)
from ggpipe.engine import machine
from ggpipe.engine.model_file import ModelFile
from ggpipe.engine.sampling import Sampler
from ggpipe.engine.stage import Cut
from ggpipe.engine.vocab import TextDecoder, Vocab
from ggpipe.errors import GgpipeError, RunError, Terminated, UsageError
from ggpipe.runtime import startup
from ggpipe.runtime.inbox import Inbox
from ggpipe.runtime.runner import Broke, Ended, Loaded, Loading, Notice, Outcome, Passed, Runner
from ggpipe.runtime.stats import RankStats, RequestStats
from ggpipe.transport import codec
from ggpipe.transport.base import Kind, Message, Transport

_TICK_S = 0.1  # how often a wait looks whether the user wants to stop


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token and the text that became whole with it (empty inside a character)."""

    id: int
    text: str


class Session:
    """See the module's text. All methods but `stop` belong to the main thread."""

    def __init__(self, transport: Transport, config: EngineConfig) -> None:
        """Nothing is loaded yet, and no other rank is asked anything."""
        self._transport = transport
        self._config = config
        self._inbox: Inbox[Notice] = Inbox(transport)
        self._runner: Runner | None = None
        self._results: dict[int, RunResult] = {}
        self._request_ids = itertools.count(1)
        self._stop = self._terminate = False
        self._quit_sent = False
        self.ranks = [RankStats(rank) for rank in range(transport.size)]
        self.warnings: list[str] = []
        self._layout: Layout
        self._scheduler: Scheduler
        self.vocab: Vocab
        self._ends: frozenset[int]
        self.n_ctx = 0

    # Opening

    def load(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Agree with all ranks, then load everywhere; `ranks` shows how far each is, `on_progress` when it changed.

        Raises the first error that any rank met.
        """
        model_file = ModelFile.open(self._config.model.path)
        own = startup.hello(self._transport, model_file)
        others = self._gather("hello")
        self.warnings += startup.compare([own, *(others[rank] for rank in sorted(others))])
        self._layout = startup.layout_of(self._config, model_file, self._transport.size)
        for rank, content in {0: own, **others}.items():
            self.ranks[rank].host = content["host"]
            self.ranks[rank].layers = self._layout.layers[rank]
        self._tell_all("load", layers=self._layout.layers)
        own_loaded: Loaded | None = None
        if self._layout.stages[0] == 0:
            load = startup.stage_loader(self._config, self._transport, model_file, self._layout.layers[0])
            deliver = self._deliver if self._transport.sends_from_any_thread else self._inbox.put
            self._runner = Runner(0, load, self._inbox.put, deliver)
            self._inbox.relieved = self._runner.relief_s
        self.vocab = Vocab(model_file, self._config.model)
        self._ends = frozenset(self.vocab.end_tokens)
        loaded: dict[int, dict[str, Any]] = {}
        while len(loaded) + (own_loaded is not None) < len(self._layout.stages):
            event = self._next_event()
            if self._stop:
                raise RunError("stopped while loading")
            match event:
                case Loaded() as mine:
                    own_loaded = mine
                    stats = self.ranks[0]
                    stats.loaded_bytes = stats.load_bytes = max(stats.load_bytes, 1)
                    stats.load_s = mine.load_s
                    stats.threads = startup.threads_of(self._config, self._transport)
                case Loading(done, total):
                    self.ranks[0].loaded_bytes, self.ranks[0].load_bytes = done, total
                case dict() as told if told["kind"] == "loading":
                    stats = self.ranks[told["rank"]]
                    stats.loaded_bytes, stats.load_bytes = told["done"], told["all"]
                case dict() as told if told["kind"] == "loaded":
                    loaded[told["rank"]] = told
                    stats = self.ranks[told["rank"]]
                    stats.loaded_bytes = stats.load_bytes = max(stats.load_bytes, 1)
                    stats.load_s, stats.threads = told["load_s"], tuple(told["threads"])
                    stats.resident_bytes = told["resident_bytes"]
            on_progress()
        cuts = [own_loaded.stage.cut] if own_loaded else []
        for rank in sorted(loaded):
            wanted, produced = loaded[rank]["wanted"], loaded[rank]["produced"]
            cuts.append(Cut(collections.Counter(wanted), collections.Counter(produced)))
        startup.check_cuts(cuts, model_file.architecture)
        self.ranks[0].resident_bytes = machine.resident_bytes()
        self.n_ctx = own_loaded.stage.n_ctx if own_loaded else next(iter(loaded.values()))["n_ctx"]
        context = self._config.context
        in_flight = len(self._layout.stages) + 1
        gc.freeze()  # what is there now stays: the collector need not look at it again
        self._scheduler = Scheduler(Limits(self.n_ctx, context.n_batch, context.n_ubatch, in_flight))

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
    ) -> Iterator[Token]:
        """Continue a prompt. `stats` is filled in while the tokens come.

        A token that ends the text is not given out. Raises UsageError for a bad prompt, RunError when a rank breaks.
        """
        self.check_prompt(prompt)
        stats = stats if stats is not None else RequestStats()
        sampler = Sampler(sampling, self.vocab, self.n_ctx)
        request = Request(next(self._request_ids), prompt, n_predict)
        try:
            sampler.accept(prompt)
            decoder = TextDecoder(self.vocab)
            stats.seed, stats.n_prompt, stats.arrived = sampler.seed, len(prompt), time.monotonic()
            stats.ranks = [RankStats(r.rank, r.host, r.layers, r.threads) for r in self.ranks]
            for token in self._run(request, sampler, stats):
                yield Token(token, decoder.push(token))
            if rest := decoder.finish():
                yield Token(-1, rest)
        except GeneratorExit:  # the caller wants no more of it: the next request must find nothing in the way
            self._abandon(request)
            raise
        finally:
            sampler.close()
            self._results.clear()
            self._stop = False  # only now: one that came while loading ends the first request
            stats.ended = time.monotonic()

    def _abandon(self, request: Request) -> None:
        actions = self._handle(Stop(request.id))
        while not any(isinstance(action, Finished) for action in actions):
            for action in actions:
                if isinstance(action, Cancel):
                    self._cancel(action.runs)
            event = self._next_event()
            actions = self._handle(RunEnded(event.run)) if isinstance(event, RunResult) else []

    def _run(self, request: Request, sampler: Sampler, stats: RequestStats) -> Iterator[int]:
        actions = collections.deque(self._handle(Arrived(request, sampler.want())))
        stopping = False
        while True:
            while actions:
                match actions.popleft():
                    case Submit(run):
                        self._submit(run)
                    case Cancel(runs):
                        self._cancel(runs)
                    case Sample(_, run_id, row):
                        result = self._results.pop(run_id)
                        token = sampler.sample(next(r for r in result.rows if r.row == row))
                        drawn = time.monotonic()
                        sampler.accept((token,))
                        ends = token in self._ends
                        actions.extend(self._handle(Sampled(request.id, token, ends, sampler.want())))
                        while actions and isinstance(actions[0], Submit):  # the pipeline first, the user second
                            following = actions.popleft()
                            assert isinstance(following, Submit)
                            self._submit(following.run)
                        if not ends:
                            stats.token_times.append(drawn)
                            yield token
                    case Finished(_, reason):
                        stats.finish = reason.value
                        return
            if self._stop and not stopping:
                stopping = True
                stats.finish = Finish.STOPPED.value
                actions.extend(self._handle(Stop(request.id)))
                continue
            event = self._next_event()
            if isinstance(event, RunResult):
                stats.runs.append(event.spans)
                for span in event.spans:
                    self._count(span, stats)
                if event.rows:
                    self._results[event.run] = event
                actions.extend(self._handle(RunEnded(event.run)))

    def _count(self, span: Span, stats: RequestStats) -> None:
        self.ranks[span.rank].add(span)
        stats.ranks[span.rank].add(span)

    def _handle(self, event: Event) -> list[Action]:
        return self._scheduler.handle(event, time.monotonic())

    def _submit(self, run: Run) -> None:
        if self._runner is not None:
            self._runner.submit(run)
        else:
            header = codec.header_with(codec.run_header(run), (), False)
            self._transport.send(self._layout.stages[0], Kind.RUN, header)

    def _cancel(self, runs: tuple[int, ...]) -> None:
        for rank in self._layout.stages:
            if rank == 0 and self._runner is not None:
                self._runner.cancel(runs)
            else:
                self._transport.send(rank, Kind.CANCEL, codec.ids_message(runs))

    def _deliver(self, outcome: Outcome) -> None:
        """What came of a run in our own stage; from the stage's thread where the transport allows."""
        if isinstance(outcome, Ended):
            self._inbox.put(outcome)
        else:
            following = self._layout.next_of(0)
            assert following is not None
            self._transport.send(following, Kind.RUN, outcome.message)
            self._inbox.wake()  # from now on an answer may come

    # Events

    def _next_event(self) -> RunResult | dict[str, Any] | Notice | None:
        """Wait for something to happen, at most a tick. Raises what another rank, or our stage, failed with."""
        if self._terminate:
            raise Terminated("terminated from outside, or because another rank is gone")
        event = self._inbox.next(_TICK_S)
        match event:
            case Message(_, Kind.RESULT, payload):
                return codec.read_result(payload)
            case Message(_, Kind.CONTROL, payload):
                content = codec.read_control(payload)
                if content["kind"] == "failed":
                    raise startup.as_error(content)
                return content
            case Ended(result):
                return result
            case Passed():
                self._deliver(event)
                return None
            case Broke(error):
                raise error
            case Message():
                raise RunError(f"rank {event.source} sent the head a message that is not for it")
        return event

    def _gather(self, kind: str, timeout_s: float | None = None) -> dict[int, dict[str, Any]]:
        """One control message of this kind from every other rank; those that came, after a timeout."""
        got: dict[int, dict[str, Any]] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(got) < self._transport.size - 1 and (deadline is None or time.monotonic() < deadline):
            event = self._next_event()
            if isinstance(event, dict) and event["kind"] == kind:
                got[event["rank"]] = event
        return got

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for rank in range(1, self._transport.size):
            self._transport.send(rank, Kind.CONTROL, codec.control_message(kind, **fields))

    # Ending

    def stop(self) -> None:
        """End the current request soon, keeping what is generated. From any thread or a signal handler."""
        self._stop = True

    def terminate(self) -> None:
        """Give up waiting for anything. From any thread or a signal handler."""
        self._terminate = True

    def measure(self) -> None:
        """Ask every rank what it has resident and what CPU time it took; fills `ranks`."""
        self._tell_all("stats")
        own = {"rank": 0, "cpu_s": time.process_time(), "resident_bytes": machine.resident_bytes()}
        for rank, content in {0: own, **self._gather("stats", timeout_s=5)}.items():
            self.ranks[rank].cpu_s, self.ranks[rank].resident_bytes = content["cpu_s"], content["resident_bytes"]

    def idle(self, seconds: float) -> None:
        """Stay ready without a request. Raises when a rank breaks."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._next_event()

    def close(self, exit_code: int = 0) -> None:
        """Let all ranks go with this exit code. A second call does nothing."""
        if self._quit_sent:
            return
        self._quit_sent = True
        self._tell_all("quit", code=exit_code)
        self._transport.flush(timeout_s=5)
        if self._runner is not None:
            self._runner.close()
        if hasattr(self, "vocab"):
            self.vocab.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(error.exit_code if isinstance(error, GgpipeError) else int(kind is not None))
