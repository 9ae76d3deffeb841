"""The engine: loaded ranks that serve any number of requests at a time.

request = engine.submit(engine.vocab.tokenize("Once upon"), SamplingConfig(temp=0))
while request.is_active:
    for event in engine.step():
        ...

It knows nothing of terminals and command lines. All methods belong to one thread, which works on requests while it is
in `step`.
"""

from __future__ import annotations

import collections
import itertools
import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ggpipe.config import SamplingConfig, Saves, SpeculationConfig
from ggpipe.core.draft_messages import Begin
from ggpipe.core.events import (
    Arrived,
    Cancel,
    Drafted,
    Embed,
    Emit,
    Event,
    Fetch,
    Finished,
    NoToken,
    Replay,
    RowFetched,
    RowNeeded,
    RunDone,
    RunEnded,
    Sample,
    Sampled,
    Steer,
    Stop,
    Submit,
    TaskDone,
    Tick,
)
from ggpipe.core.messages import RowLogits, Run, RunResult, Want, WantKind
from ggpipe.core.request import Finish, PromptTask, Request, Token, TokenProb, check_prompt
from ggpipe.core.run_cost import RunCost
from ggpipe.core.scheduler import Scheduler
from ggpipe.embeddings import Pooled
from ggpipe.errors import QueueFull
from ggpipe.llama import machine
from ggpipe.llama.grammars.constrained_sampler import ConstrainedSampler, Drawn, NoTokenFits, sampler_at
from ggpipe.llama.model_header import ModelHeader
from ggpipe.llama.sampler import Sampler
from ggpipe.llama.vocab import TextDecoder, Vocab
from ggpipe.metrics.run_counter import RunCounter
from ggpipe.metrics.stats import RankStats, RequestStats
from ggpipe.runtime.control_channel import Received
from ggpipe.runtime.head import DraftUpdate, LoadedHead, News, PartSpan
from ggpipe.runtime.stage_thread import Fetched
from ggpipe.transport.control import PrefixSaved


class ActiveRequest:
    """A request that was submitted."""

    def __init__(
        self, request: Request, sampler: Sampler | ConstrainedSampler, decoder: TextDecoder, stats: RequestStats
    ) -> None:
        self.id = request.id
        self.stats = stats
        """Filled in while the request is served."""
        self.sampler = sampler
        self.decoder = decoder
        self.to_replay: collections.deque[tuple[int, bool]] = collections.deque()
        """Tokens of a resumed text whose rows the sampler has not seen yet, and whether they were drawn again."""
        self.sampled: collections.deque[tuple[str, tuple[TokenProb, ...], bool]] = collections.deque()
        """Of tokens that are sampled and not given out yet: `Token.text`, `probs` and `redrawn`."""
        self.not_saved: list[str] = []
        """Why parts of a prefix are not written, or not restored, a line each."""
        self.n_saved_bytes = 0
        """Of its files."""
        self.restores = request.restores
        self.pooled = Pooled(request.task.pooling if request.task is not None else "last")
        """Its embedding, where that is wanted."""

    @property
    def is_active(self) -> bool:
        """It is waiting or being served."""
        return self.stats.finish is None


@dataclass(frozen=True, slots=True)
class TokenReady:
    """The next token of a request."""

    request: ActiveRequest
    token: Token


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request is over; `stats.finish` says why."""

    request: ActiveRequest
    rest: str
    """Text behind the last token's: what may have begun a stop string, a character whose last bytes never came, as a
    replacement character; mostly empty."""
    embedding: tuple[bytes, ...] = ()
    """As `ClientRequest.embedding`."""


EngineEvent = TokenReady | RequestEnded


class Engine:
    """See the module's text."""

    def __init__(self, head: LoadedHead) -> None:
        """`head`: everything is loaded."""
        self.vocab: Vocab = head.vocab
        self.ranks: Sequence[RankStats] = head.head.ranks
        """All ranks in order; behind them the draft inside the head's process, if there is one."""
        self.n_ctx = head.limits.n_ctx
        """KV cells, for all requests together."""
        self.can_speculate = head.can_speculate
        self._head = head
        self._scheduler = Scheduler(head.limits, head.restored)
        prompt_cache = head.head.config.prompt_cache
        self._saves: Saves = prompt_cache.saves if prompt_cache is not None and head.limits.n_prefixes else "nothing"
        self._n_unsaved: collections.Counter[int] = collections.Counter()
        """By request: ranks that are to save their parts."""
        self._unsaved: dict[int, Finish] = {}
        """Requests that are over but for that."""
        self._ends = frozenset(head.vocab.end_tokens)
        self._ids = itertools.count(1)
        self._active: dict[int, ActiveRequest] = {}
        self._events: list[EngineEvent] = []
        self._unsettled: list[ConstrainedSampler] = []
        """They have left something for when the next run is being computed."""
        self._counter = RunCounter(self.ranks, self._stats_of)
        machine.collect_new_objects()

    @property
    def run_cost(self) -> RunCost:
        """What runs of this pipeline take."""
        return self._scheduler.cost

    @property
    def n_cells(self) -> int:
        """KV cells in use: of requests, kept prefixes and draft tokens."""
        return self._scheduler.n_cells

    # Requests

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raises UsageError for a prompt that is empty or that leaves no room for an answer."""
        check_prompt(prompt, self.n_ctx)

    def submit(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingConfig,
        n_predict: int = -1,
        speculation: SpeculationConfig | None = None,
        stats: RequestStats | None = None,
        cache_prompt: bool = True,
        tokens: Sequence[int] = (),
        redrawn: Collection[int] = (),
        task: PromptTask | None = None,
        user: str = "",
    ) -> ActiveRequest:
        """Have a prompt continued by at most `n_predict` tokens (-1: until the text ends or the context is full).

        A token that ends the text is not given out; with a stop string, the text ends in front of it and the tokens
        behind it. `speculation` needs a draft model. `stats` is filled in while the request is served. With
        `cache_prompt`, what earlier requests computed of the prompt is not computed again, and its cells are kept for
        later ones. Requests beyond those that fit wait.

        `tokens`: the first of its text, which other ranks generated with the same settings and seed. The text goes on
        behind them, and `n_predict` counts them; `stats` may have their times already. `redrawn`: the places of those
        that were drawn at the second attempt (`Token.redrawn`). `task`: what is done instead of all this. `user`: as of
        `Request`.

        Raises UsageError for a bad prompt or grammar, QueueFull when too many wait.
        """
        self.check_prompt(prompt)
        if task is not None:
            task.check(self._head.limits, self._head.head.config.slot_save_path is not None)
            if task.kind == "embed":
                ModelHeader(self._head.model_file).check_embedding(len(prompt), task.pooling)
                cache_prompt = False
            n_predict, speculation = 0, SpeculationConfig(mode="iterative")
        n_most = self._head.limits.n_requests + self._head.head.config.n_queued
        if len(self._active) >= n_most:
            raise QueueFull(
                f"{len(self._active)} requests are being served or wait: try again later, or raise `n_queued`"
            )
        stats = stats if stats is not None else RequestStats()
        sampler = sampler_at(prompt, sampling, tokens, redrawn, self.vocab, self.n_ctx)
        want = sampler.replay_want(len(tokens)) if sampling.remembers_rows and tokens else sampler.want()
        decoder = TextDecoder(self.vocab, sampling.stop)
        for token in tokens:
            decoder.push(token)
        request = Request(
            id=next(self._ids),
            prompt=prompt,
            n_predict=n_predict,
            speculation=self._head.possible(speculation or SpeculationConfig()),
            ends=self._ends,
            banned=sampler.banned,
            want_grows=sampler.want_grows,
            cache_prompt=cache_prompt,
            user=user,
            remembers_rows=sampling.remembers_rows,
            is_stopped=decoder.is_stopped,
            saves=self._saves if task is None else "prompt" if task.kind == "save" else "nothing",
            task=task,
        ).after(tokens)
        want = Want(WantKind.HIDDEN) if request.embeds else want
        stats.seed, stats.n_prompt = sampler.seed, len(prompt)
        stats.arrived = stats.arrived or time.monotonic()
        stats.ranks = [rank.unused() for rank in self.ranks]
        stats.speculation = request.speculation
        active = self._active[request.id] = ActiveRequest(request, sampler, decoder, stats)
        if sampling.remembers_rows:
            active.to_replay.extend((token, place in redrawn) for place, token in enumerate(tokens))
        draft_check = sampler.draft_check if isinstance(sampler, ConstrainedSampler) else None
        self._work([Arrived(request, want, stats.counters, draft_check)])
        return active

    def cancel(self, request: ActiveRequest) -> None:
        """End a request soon, if it is not over; `RequestEnded` follows, after tokens that are generated already."""
        if request.is_active:
            self._work([Stop(request.id)])

    # Work

    def step(self) -> list[EngineEvent]:
        """Wait for something to happen, at most 0.1 s, and work on it. Returns what came of it, in order.

        Raises RunError when a rank breaks, Terminated when this process is to end.
        """
        if not self._events:
            for sampler in self._unsettled:
                sampler.settle()
            self._unsettled.clear()
            self._take(self._head.next(self._scheduler.wake_at))
        events, self._events = self._events, []
        return events

    def idle(self, seconds: float) -> None:
        """Stay ready for so long. No request may be active."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            self._take(self._head.next())

    def _take(self, news: News) -> None:
        match news:
            case RunResult() as result:
                self._work([RunEnded(result)])
            case Fetched(request, row):
                self._work([RowFetched(request, row)])
            case DraftUpdate(batch, records):
                self._counter.add(records, draft=True)
                self._work([Drafted(batch)])
            case PartSpan(run, span):
                self._counter.add_part(run, span)
            case Received(_, PrefixSaved() as saved):
                self._saved(saved)
            case None if (wake_at := self._scheduler.wake_at) is not None and time.monotonic() >= wake_at:
                self._work([Tick()])

    def _work(self, events: Sequence[Event]) -> None:
        """Give the scheduler events and do all that comes of them: the pipeline first, the user second."""
        waiting = collections.deque(events)
        for_user: list[Emit | Finished | RunDone] = []
        while waiting:
            for action in self._scheduler.handle(waiting.popleft(), time.monotonic()):
                if isinstance(action, Emit | Finished | RunDone):
                    for_user.append(action)
                elif (event := self._perform(action)) is not None:
                    waiting.append(event)
        for action in for_user:
            self._show(action)
        for active in self._active.values():
            active.stats.n_in_flight = self._scheduler.n_in_flight

    def _perform(self, action: Submit | Cancel | Steer | Sample | Fetch | Replay | Embed) -> Event | None:
        """Perform one action; returns the event that follows from it, if any."""
        match action:
            case Submit(run):
                self._head.submit(run)
                self._note_starts(run)
                if run.save is not None:
                    self._n_unsaved[run.save.request] += self._head.n_ranks
            case Cancel(runs):
                self._head.cancel(runs)
            case Steer(_, message):
                self._head.steer(message)
                if isinstance(message, Begin) and message.saves != "nothing":
                    self._n_unsaved[message.request] += self._head.n_draft_ranks
            case Replay(request, rows):
                active = self._active[request]
                for row in rows:
                    active.sampler.replay(row, *active.to_replay.popleft())
            case Embed(request, rows):
                for row in rows:
                    self._active[request].pooled.add(row.logits)
            case Sample(request, row):
                return self._sample(self._active[request], row)
            case Fetch(request, run_id, row_number):
                self._head.fetch(request, run_id, row_number)
        return None

    def _show(self, action: Emit | Finished | RunDone) -> None:
        match action:
            case Emit(request, token, drafted):
                self._emit(self._active[request], token, drafted)
            case RunDone(records):
                self._counter.add(records, draft=False)
            case Finished(request, reason):
                self._active[request].stats.ended = time.monotonic()
                self._unsaved[request] = reason
                self._finish_saved(request)

    def _note_starts(self, run: Run) -> None:
        for request in {row.request for row in run.rows}:
            stats = self._active[request].stats
            if stats.started is None:
                stats.started = time.monotonic()

    def _sample(self, active: ActiveRequest, row: RowLogits) -> Sampled | RowNeeded | NoToken:
        try:
            drawn = active.sampler.sample(row)
            if drawn is None:
                return RowNeeded(active.id)
            token, redrawn = (drawn.token, drawn.is_second) if isinstance(drawn, Drawn) else (drawn, False)
            active.sampler.accept((token,))
        except NoTokenFits:
            return NoToken(active.id)
        if is_end := token in self._ends:
            return Sampled(active.id, token, is_end, active.sampler.want())
        probs = [TokenProb(id, self.vocab.piece(id), logprob) for id, logprob in active.sampler.probs]
        active.sampled.append((active.decoder.push(token), tuple(probs), redrawn))
        return Sampled(active.id, token, is_end, active.sampler.want(), active.decoder.is_stopped)

    def _emit(self, active: ActiveRequest, token: int, drafted: bool) -> None:
        active.stats.token_times.append(time.monotonic())
        active.stats.drafted.append(drafted)
        if isinstance(active.sampler, ConstrainedSampler):
            self._unsettled.append(active.sampler)
        text, probs, redrawn = active.sampled.popleft()
        self._events.append(TokenReady(active, Token(token, text, drafted, probs, redrawn)))

    def _saved(self, saved: PrefixSaved) -> None:
        request, active = saved.request, self._active[saved.request]
        self._n_unsaved[request] -= 1
        active.n_saved_bytes += saved.n_bytes
        if saved.problem:
            active.not_saved.append(saved.problem)
        if active.restores and not self._n_unsaved[request]:
            self._work([TaskDone(request, is_whole=not active.not_saved)])
        self._finish_saved(request)

    def _finish_saved(self, request: int) -> None:
        """A request is over when nothing of it is in flight, and its prompt cache is written."""
        if request not in self._unsaved or self._n_unsaved[request]:
            return
        del self._n_unsaved[request]
        self._counter.end()
        active = self._active.pop(request)
        active.stats.finish = self._unsaved.pop(request)
        active.sampler.close()
        embedding = tuple(vector.tobytes() for vector in active.pooled.vectors)
        if not all(embedding):
            active.not_saved.append(f"'{self._head.model_file.architecture}' models give no embeddings here")
        self._events.append(RequestEnded(active, active.decoder.finish(), embedding))

    def _stats_of(self, request: int) -> RequestStats | None:
        return active.stats if (active := self._active.get(request)) is not None else None

    # Measuring, ending

    def measure_usage(self) -> None:
        """Fill in the CPU time and resident memory of all `ranks`."""
        self._head.head.measure_usage(self._head.next, self._take)

    def align_clocks(self) -> None:
        """Fill in `clock_offset_s` of all `ranks`."""
        self._head.head.align_clocks(self._head.next, self._take)

    def close(self) -> None:
        """Free what is in this process. Requests that are still active are lost. A second call does nothing."""
        for active in self._active.values():
            active.sampler.close()
        self._active.clear()
        self._head.close()
