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
from dataclasses import asdict, dataclass, replace
from types import TracebackType
from typing import Any

from ggpipe.config import ContextConfig, EngineConfig, SamplingConfig, SpeculationConfig
from ggpipe.core.events import (
    Action,
    Arrived,
    Cancel,
    Emit,
    Event,
    Finish,
    Finished,
    Guessed,
    Limits,
    Request,
    RunEnded,
    Sample,
    Sampled,
    Steer,
    Stop,
    Submit,
)
from ggpipe.core.layout import Layout, lay_out
from ggpipe.core.messages import Begin, MicroBatch, RunRecord, RunResult, Span, Steering
from ggpipe.core.scheduler import Scheduler
from ggpipe.engine import machine
from ggpipe.engine.model_file import ModelFile
from ggpipe.engine.sampling import Sampler
from ggpipe.engine.stage import Cut
from ggpipe.engine.vocab import TextDecoder, Vocab
from ggpipe.errors import GgpipeError, RunError, Terminated, UsageError
from ggpipe.runtime import startup
from ggpipe.runtime.drafter import DraftHead
from ggpipe.runtime.inbox import Inbox
from ggpipe.runtime.pipe import Pipe
from ggpipe.runtime.runner import Broke, Ended, Loaded, Loading, Notice, Passed, Runner
from ggpipe.runtime.stats import RankStats, RequestStats
from ggpipe.transport import codec
from ggpipe.transport.base import Kind, Message, Transport

_PINGS = 9
_TICK_S = 0.1  # how often a wait looks whether the user wants to stop


@dataclass(frozen=True, slots=True)
class Token:
    """A generated token and the text that became whole with it (empty inside a character)."""

    id: int
    text: str
    guessed: bool = False
    """It was in the pipeline as a guess before it was drawn."""


@dataclass(frozen=True, slots=True)
class _FromDraft:
    """A notice of the draft's stage inside this process."""

    notice: Notice


class Session:
    """See the module's text. All methods but `stop` belong to the main thread."""

    def __init__(self, transport: Transport, config: EngineConfig) -> None:
        """Nothing is loaded yet, and no other rank is asked anything."""
        self._transport = transport
        self._config = config
        self._inbox: Inbox[Notice | _FromDraft] = Inbox(transport)
        self._request_ids = itertools.count(1)
        self._stop = self._terminate = False
        self._quit_sent = False
        n_target = transport.size - config.n_draft_ranks
        self.ranks = [RankStats(rank, rank >= n_target) for rank in range(transport.size)]
        self._draft_inside = config.draft is not None and config.n_draft_ranks == 0
        if self._draft_inside:
            self.ranks.append(RankStats(0, True))
        self.warnings: list[str] = []
        self._pipe: Pipe
        self._draft_pipe: Pipe | None = None
        self._draft_head: DraftHead | None = None
        self._scheduler: Scheduler
        self._runs: dict[int, tuple[int, int]] = {}
        """Of each run in flight: rows, guesses."""
        self._guesses: collections.deque[Guessed] = collections.deque()
        """From the draft in this process."""
        self._stats = RequestStats()
        self.vocab: Vocab
        self._ends: frozenset[int]
        self._n_draft_vocab = 0
        self.n_ctx = 0
        self.can_speculate = config.draft is not None

    # Opening

    def load(self, on_progress: Callable[[], None] = lambda: None) -> None:
        """Agree with all ranks, then load everywhere; `ranks` shows how far each is, `on_progress` when it changed.

        Raises the first error that any rank met.
        """
        config, transport = self._config, self._transport
        model_file = ModelFile.open(config.model.path)
        draft_file = ModelFile.open(config.draft.model.path) if config.draft and self._draft_inside else None
        own = startup.hello(transport, model_file, False)
        others = self._gather("hello")
        hellos = [own, *(others[rank] for rank in sorted(others))]
        self.warnings += startup.compare(hellos)
        n_target = transport.size - config.n_draft_ranks
        layout = lay_out(model_file.n_layer, n_target, config.pipeline.shares)
        draft_layout: Layout | None = None
        if config.draft is not None:
            if draft_file is not None:
                draft_layout = Layout(((0, draft_file.n_layer),))
            else:
                n_layer = hellos[n_target]["n_layer"]
                draft_layout = lay_out(n_layer, config.n_draft_ranks, config.draft.shares, n_target)
        for content in hellos:
            rank = content["rank"]
            part = draft_layout if draft_layout is not None and content["draft"] else layout
            self.ranks[rank].host, self.ranks[rank].layers = content["host"], part.layers_of(rank)
            if rank > 0:
                self._tell(rank, "load", layers=part.layers, head=part.head)
        self._pipe = Pipe(transport, layout, 0, self._inbox.put)
        if layout.stages[0] == 0:
            self._start(self._pipe, model_file, draft=False)
        if draft_layout is not None:
            self._draft_pipe = Pipe(transport, draft_layout, draft_layout.head, self._put_from_draft)
            if draft_file is not None:
                self.ranks[-1].host, self.ranks[-1].layers = own["host"], draft_layout.layers_of(0)
                self._start(self._draft_pipe, draft_file, draft=True)
        self.vocab = Vocab(model_file, config.model)
        self._ends = frozenset(self.vocab.end_tokens)
        outline: dict[str, Any] | None = None
        if draft_file is not None and config.draft is not None:
            draft_vocab = Vocab(draft_file, config.draft.model)
            outline = draft_vocab.outline()
            draft_vocab.close()
        outline = self._await_loaded(outline, on_progress)
        if outline is not None:
            self._check_draft(outline)
        startup.check_cuts([self._cuts[rank, False] for rank in layout.stages], model_file.architecture)
        if draft_layout is not None and draft_file is None:
            cuts = [self._cuts[rank, True] for rank in draft_layout.stages]
            startup.check_cuts(cuts, hellos[draft_layout.head]["architecture"])
        self.ranks[0].resident_bytes = machine.resident_bytes()
        self.n_ctx = self._n_ctx_of[False]
        self._scheduler = Scheduler(self._limits(config.context, layout, self.n_ctx))
        if config.draft is not None and draft_layout is not None and self.can_speculate:
            limits = self._limits(config.draft.context, draft_layout, self._n_ctx_of[True])
            if self._draft_inside:
                assert self._draft_pipe is not None
                self._draft_head = DraftHead(self._draft_pipe, limits, self._guessed)
            else:
                self._tell(draft_layout.head, "draft", limits=asdict(limits))
        gc.freeze()  # what is there now stays: the collector need not look at it again

    def _limits(self, context: ContextConfig, layout: Layout, n_ctx: int) -> Limits:
        return Limits(n_ctx, context.n_batch, context.n_ubatch, len(layout.stages) + 1, context.n_seq)

    def _start(self, pipe: Pipe, model_file: ModelFile, draft: bool) -> None:
        """Have this process's stage of a pipeline load, in a thread of its own."""
        layers = pipe.layout.layers_of(0)
        load = startup.stage_loader(self._config, self._transport, model_file, layers, draft)
        if draft:  # what comes of its runs stays in this process
            pipe.runner = Runner(0, load, self._put_from_draft, self._put_from_draft)
            return
        deliver = self._deliver if self._transport.sends_from_any_thread else self._inbox.put
        pipe.runner = Runner(0, load, self._inbox.put, deliver, look_s=startup.look_s(self._config))
        self._inbox.relieved = pipe.runner.relief_s

    def _put_from_draft(self, notice: Notice) -> None:
        self._inbox.put(_FromDraft(notice))

    def _await_loaded(self, outline: dict[str, Any] | None, on_progress: Callable[[], None]) -> dict[str, Any] | None:
        """Until all stages are there. Returns the draft's vocabulary when there is one."""
        self._cuts: dict[tuple[int, bool], Cut] = {}
        self._n_ctx_of: dict[bool, int] = {}
        expected = len(self._pipe.layout.stages)
        if self._draft_pipe is not None:
            expected += len(self._draft_pipe.layout.stages)
        while len(self._cuts) < expected or (self._draft_pipe is not None and outline is None):
            event = self._next_event()
            if self._stop:
                raise RunError("stopped while loading")
            inside = isinstance(event, _FromDraft)
            match event.notice if isinstance(event, _FromDraft) else event:
                case Loaded(stage, load_s):
                    stats = self.ranks[-1 if inside else 0]
                    stats.load_s, stats.threads = load_s, startup.threads_of(self._config, self._transport, inside)
                    self._loaded(stats, stage.cut, stage.n_ctx)
                case Loading(done, total):
                    stats = self.ranks[-1 if inside else 0]
                    stats.loaded_bytes, stats.load_bytes = done, total
                case dict() as told if told["kind"] == "loading":
                    stats = self.ranks[told["rank"]]
                    stats.loaded_bytes, stats.load_bytes = told["done"], told["all"]
                case dict() as told if told["kind"] == "loaded":
                    stats = self.ranks[told["rank"]]
                    stats.load_s, stats.threads = told["load_s"], tuple(told["threads"])
                    stats.resident_bytes = told["resident_bytes"]
                    wanted, produced = told["wanted"], told["produced"]
                    self._loaded(stats, Cut(collections.Counter(wanted), collections.Counter(produced)), told["n_ctx"])
                case dict() as told if told["kind"] == "vocab":
                    outline = told
            on_progress()
        return outline

    def _loaded(self, stats: RankStats, cut: Cut, n_ctx: int) -> None:
        stats.loaded_bytes = stats.load_bytes = max(stats.load_bytes, 1)
        self._cuts[stats.rank, stats.draft] = cut
        self._n_ctx_of[stats.draft] = n_ctx

    def _check_draft(self, outline: dict[str, Any]) -> None:
        self.vocab.check_draft(outline)
        self._n_draft_vocab = len(outline["texts"])
        for what, able in (("-m", self.vocab.rolls_back), ("-md", outline["rolls_back"])):
            if not able:
                self.can_speculate = False
                self.warnings.append(f"the model under {what} cannot take tokens back: generating without speculation")

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
            event = self._next_event()
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
            actions.extend(self._on_event(self._next_event()))

    def _on_event(self, event: object) -> list[Action]:
        match event:
            case RunResult(run, rows, spans, cancelled):
                n_rows, n_guesses = self._runs.pop(run)
                if n_rows:
                    self._stats.runs.append(RunRecord(run, n_rows, n_guesses, cancelled, spans))
                    self._count(spans, draft=False)
                return self._handle(RunEnded(run, rows))
            case Guessed():
                return self._handle(event)
        return []

    def _count(self, spans: Sequence[Span], draft: bool) -> None:
        for span in spans:
            entry = -1 if draft and self._draft_inside else span.rank
            self.ranks[entry].add(span)
            if self._stats.ranks:
                self._stats.ranks[entry].add(span)

    def _handle(self, event: Event) -> list[Action]:
        return self._scheduler.handle(event, time.monotonic())

    def _perform(self, action: Action) -> None:
        match action:
            case Submit(run, n_guesses):
                self._runs[run.id] = len(run.rows), n_guesses
                self._pipe.submit(run)
            case Cancel(runs):
                self._pipe.cancel(runs)
            case Steer(message):
                self._steer(message)

    def _deliver(self, outcome: Passed | Ended) -> None:
        self._pipe.deliver(outcome)
        if isinstance(outcome, Passed):
            self._inbox.wake()  # from now on an answer may come

    # The draft

    def _steer(self, message: Steering) -> None:
        if isinstance(message, Begin) and self._n_draft_vocab > self.vocab.n_tokens:  # its padding means nothing to us
            extra = range(self.vocab.n_tokens, self._n_draft_vocab)
            message = replace(message, banned=(*message.banned, *extra))
        if self._draft_head is not None:
            self._draft_head.handle(message)
        else:
            assert self._draft_pipe is not None
            self._transport.send(self._draft_pipe.layout.head, Kind.STEER, codec.steering_message(message))

    def _guessed(self, batch: MicroBatch, records: Sequence[RunRecord]) -> None:
        """Guesses of the draft in this process, or on other ranks."""
        self._stats.draft_runs += records
        for record in records:
            self._count(record.spans, draft=True)
        self._guesses.append(Guessed(batch))

    # Events

    def _next_event(self) -> RunResult | Guessed | dict[str, Any] | Notice | _FromDraft | None:
        """Wait for something to happen, at most a tick. Raises what another rank, or a stage of ours, failed with."""
        if self._terminate:
            raise Terminated("terminated from outside, or because another rank is gone")
        if self._guesses:
            return self._guesses.popleft()
        wait_s = self._draft_head.wait_s() if self._draft_head is not None else None
        event = self._inbox.next(_TICK_S if wait_s is None else min(wait_s, _TICK_S))
        match event:
            case Message(_, Kind.RESULT, payload):
                return codec.read_result(payload)
            case Message(_, Kind.GUESS, payload):
                self._guessed(*codec.read_guesses(payload))
                return self._guesses.popleft()
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
            case Broke(error) | _FromDraft(Broke(error)):
                raise error
            case _FromDraft(Ended(result)) if self._draft_head is not None:
                self._draft_head.ended(result)
                return self._guesses.popleft() if self._guesses else None
            case Message():
                raise RunError(f"rank {event.source} sent the head a message that is not for it")
            case None if self._draft_head is not None:
                self._draft_head.tick()
        return event

    def _gather(self, kind: str, timeout_s: float | None = None) -> dict[int, dict[str, Any]]:
        """One control message of this kind from every other rank; those that came, after a timeout."""
        got: dict[int, dict[str, Any]] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(got) < self._transport.size - 1 and (deadline is None or time.monotonic() < deadline):
            event = self._next_event()
            if isinstance(event, dict) and event["kind"] == kind:
                got[event["rank"]] = event
            else:
                self._attend(event)
        return got

    def _attend(self, event: object) -> None:
        """What comes while no request is served: the end of what carried the last one's KV operations."""
        for action in self._on_event(event):
            self._perform(action)

    def _tell(self, rank: int, kind: str, **fields: Any) -> None:
        self._transport.send(rank, Kind.CONTROL, codec.control_message(kind, **fields))

    def _tell_all(self, kind: str, **fields: Any) -> None:
        for rank in range(1, self._transport.size):
            self._tell(rank, kind, **fields)

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

    def align_clocks(self) -> None:
        """Fill in `clock_offset_s` of all ranks, from the quickest of some pings. One machine's ranks share a clock."""
        for stats in self.ranks:
            if stats.host == self.ranks[0].host:
                continue
            best_s = math.inf
            for _ in range(_PINGS):
                sent = time.monotonic()
                self._tell(stats.rank, "clock")
                while not (isinstance(event := self._next_event(), dict) and event["kind"] == "clock"):
                    self._attend(event)
                took_s = time.monotonic() - sent
                if took_s < best_s:
                    best_s, stats.clock_offset_s = took_s, sent + took_s / 2 - event["now"]

    def idle(self, seconds: float) -> None:
        """Stay ready without a request. Raises when a rank breaks."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._attend(self._next_event())

    def close(self, exit_code: int = 0) -> None:
        """Let all ranks go with this exit code. A second call does nothing."""
        if self._quit_sent:
            return
        self._quit_sent = True
        self._tell_all("quit", code=exit_code)
        self._transport.flush(timeout_s=5)
        for pipe in (getattr(self, "_pipe", None), self._draft_pipe):
            if pipe is not None and pipe.runner is not None:
                pipe.runner.close()
        if hasattr(self, "vocab"):
            self.vocab.close()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close(error.exit_code if isinstance(error, GgpipeError) else int(kind is not None))
