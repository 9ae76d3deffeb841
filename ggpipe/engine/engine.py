"""The engine: loaded ranks that serve any number of requests at a time.

engine.submit(1, RequestSpec(prompt=b"Once upon", sampling=SamplingConfig(temp=0)))
while not any(isinstance(event, RequestEnded) for event in engine.step()):
    ...

It knows nothing of terminals and command lines. All methods belong to one thread, which works on requests while it is
in `step`.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Sequence

import msgspec

from ggpipe.channel.events import Failure, RequestAccepted, RequestEnded, RequestEvent, RequestRefused, TokenReady
from ggpipe.config.engine import Saves
from ggpipe.config.model import FIRST_DRAFT, TARGET
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import BeginDrafting
from ggpipe.core.events import (
    Arrived,
    CancelRuns,
    Drafted,
    Embed,
    Emit,
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
    SchedulerEvent,
    StopRequest,
    SubmitRun,
    Tick,
    ToDrafter,
)
from ggpipe.core.messages import RowLogits, Run, RunResult
from ggpipe.core.prefixes import PrefixDone, PrefixOrder
from ggpipe.core.request import Finish, Request, check_order, check_prompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.core.scheduler import Scheduler
from ggpipe.engine.active_request import ActiveRequest, PreparingRequest
from ggpipe.engine.control_channel import Received
from ggpipe.engine.grammars import GrammarReady, Grammars
from ggpipe.engine.head import DraftUpdate, HeadEvent, LoadedHead, PartSpan
from ggpipe.engine.prompt_reader import PromptReader
from ggpipe.engine.stage_thread import Fetched
from ggpipe.errors import GgpipeError, QueueFull, Setting, UsageError, Wording
from ggpipe.llama import machine
from ggpipe.llama.constrained_sampler import ConstrainedSampler, NoTokenFits
from ggpipe.llama.model_header import ModelHeader
from ggpipe.llama.vocab import Vocab
from ggpipe.stats.records import RankStats, RequestStats
from ggpipe.stats.run_counter import RunCounter
from ggpipe.text.grammar.check import Constraint
from ggpipe.transport.control import PrefixSaved


class EngineCore:
    """See the module's text."""

    def __init__(self, head: LoadedHead) -> None:
        """`head`: everything is loaded."""
        self.vocab: Vocab = head.vocab
        self.prompts = PromptReader(head.vocab)
        self.ranks: Sequence[RankStats] = head.head.ranks
        """All ranks in order, followed by the draft models inside the head's process, if any."""
        self.n_ctx = head.limits.n_ctx
        """KV cells, for all requests together."""
        self.can_speculate = head.can_speculate
        self._head = head
        self._scheduler = Scheduler(head.limits, head.restored, head.drafters.in_head)
        prompt_cache = head.head.config.prompt_cache
        self._saves: Saves = prompt_cache.saves if prompt_cache is not None and head.limits.n_prefixes else "nothing"
        self._n_unsaved: collections.Counter[int] = collections.Counter()
        """By request: ranks that are to save their parts."""
        self._unsaved: dict[int, RequestEnded] = {}
        """Requests that are over but for that."""
        self._orders: dict[int, list[PrefixSaved]] = {}
        """By order that is not carried out: what the ranks said that have done their part."""
        self._ends = frozenset(head.vocab.end_tokens)
        self._grammars = Grammars(head.vocab, head.head.channel.inbox.put, head.drafters.takes_back)
        self._preparing: dict[int, PreparingRequest] = {}
        self._active: dict[int, ActiveRequest] = {}
        self._events: list[RequestEvent] = []
        self._unsettled: list[ConstrainedSampler] = []
        """Samplers with work that can be done while the next run is being computed."""
        self._counter = RunCounter(self.ranks, self._stats_of)
        machine.collect_new_objects()

    @property
    def n_cells(self) -> int:
        """KV cells in use: of requests, kept prefixes and draft tokens."""
        return self._scheduler.n_cells

    # Requests

    def submit(self, number: int, spec: RequestSpec, stats: RequestStats | None = None) -> None:
        """Have a request served: `RequestAccepted` or `RequestRefused` comes of it next.

        `number` names it in all events; no other active request has it. `stats`: figures are filled in while the
        request is served, all that `RequestFigures` has. A token that ends the text is not given out; with a stop
        string, the text ends before it and the tokens after it. Requests beyond those that fit wait.
        """
        try:
            self._begin(number, spec, stats if stats is not None else RequestStats())
        except (UsageError, QueueFull) as e:
            self._events.append(RequestRefused(number, Failure.of(e)))

    def order(self, order: PrefixOrder) -> None:
        """Have a prefix saved, restored or erased: `PrefixDone` or `RequestRefused` comes of it. It waits as requests
        do, and its id is none of theirs."""
        try:
            self._check_room()
            self.prompts.check(order.tokens)
            check_order(order, self._head.limits, self._head.head.config.slot_save_path is not None)
        except (UsageError, QueueFull) as e:
            self._events.append(RequestRefused(order.id, Failure.of(e)))
        else:
            self._orders[order.id] = []
            self._work([order])

    def _check_room(self) -> None:
        n = len(self._active) + len(self._preparing) + len(self._orders)
        if n >= self._head.limits.n_requests + self._head.head.config.n_queued:
            raise QueueFull(f"{n} requests are being served or wait: try again later, or raise ", Setting("n_queued"))

    def _begin(self, number: int, spec: RequestSpec, stats: RequestStats) -> None:
        self._check_room()
        read = self.prompts.read(spec.prompt, spec.sampling)
        check_prompt(read.tokens, self.n_ctx)
        own, constraint = PreparingRequest(spec=spec, read=read, stats=stats), Constraint.of(read.sampling)
        if constraint is None or spec.pooling is not None:
            self._begin_read(number, own)
        elif (known := self._grammars.known(number, constraint)) is not None:
            self._begin_read(number, own, known)
        else:
            self._preparing[number] = own
            self._grammars.prepare(number, constraint)

    def _prepared(self, ready: GrammarReady) -> None:
        """Begin a request whose grammar is compiled."""
        own = self._preparing.pop(ready.request, None)
        if own is None:  # cancelled
            if ready.grammar is not None:
                ready.grammar.close()
            return
        try:
            if ready.error is not None:
                raise ready.error
            self._begin_read(ready.request, own, ready)
        except GgpipeError as e:
            self._events.append(RequestRefused(ready.request, Failure.of(e)))

    def _begin_read(self, number: int, own: PreparingRequest, ready: GrammarReady | None = None) -> None:
        """Begin a request whose prompt is read, and whose grammar is compiled."""
        spec, read, stats, saves = own.spec, own.read, own.stats, self._saves
        config = self._head.head.config
        if not config.cache_prompt and config.prompt_cache is None:  # nothing is kept, n-grams included
            spec = msgspec.structs.replace(spec, cache_prompt=False)
        if spec.pooling is not None:
            ModelHeader(self._head.model_file).check_embedding(len(read.tokens), spec.pooling)
            iterative, saves = SpeculationConfig(mode="iterative"), "nothing"
            spec = msgspec.structs.replace(spec, n_predict=0, speculation=iterative, cache_prompt=False)
        self._head.drafters.check(spec.speculation)
        forces = ready is not None and ready.grammar is not None and ready.grammar.forces
        possible = self._head.possible(spec.speculation, forces)
        active = ActiveRequest(
            msgspec.structs.replace(spec, sampling=read.sampling, speculation=possible),
            read.tokens,
            self.vocab,
            self.n_ctx,
            stats,
            ready.grammar if ready is not None else None,
        )
        sampler = active.sampler
        request = Request(
            id=number,
            spec=active.spec,
            prompt=(*read.tokens, *spec.resumed),
            drafters=self._head.drafters.chosen(possible, forces),
            ends=self._ends,
            banned=sampler.banned,
            logits_request_grows=sampler.logits_request_grows,
            is_stopped=active.decoder.is_stopped,
            saves=saves,
            drawing=active.drawing,
            adjustments=sampler.adjustments if self._head.drafters.have_models(possible) else None,
        )
        stats.ranks = [rank.unused() for rank in self.ranks]
        self._active[number] = active
        accepted = RequestAccepted(
            request=number,
            prompt=() if read.tokens == spec.prompt else read.tokens,
            answer_format=read.answer_format,
            sampling=None if read.sampling == spec.sampling else read.sampling,
            seed=sampler.seed,
            speculation=possible,
            arrived_s=time.monotonic(),
            ranks=tuple(stats.ranks),
            warnings=tuple(Wording(Setting("json_schema"), " ", line) for line in (ready.warnings if ready else ())),
        )
        self._events.append(accepted)
        draft_check = sampler.draft_check if isinstance(sampler, ConstrainedSampler) else None
        self._work([Arrived(request, active.logits_request(), stats.counters, draft_check)])

    def cancel(self, number: int) -> None:
        """End a request soon, if it is not over; `RequestEnded` follows, after tokens that are generated already. Or an
        order, which is carried out all the same when ranks are at it; `PrefixDone` follows."""
        if self._preparing.pop(number, None) is not None:
            ended = RequestEnded(request=number, finish=Finish.STOPPED, ended_s=time.monotonic())
            self._events.append(ended)
        if number in self._active or number in self._orders:
            self._work([StopRequest(number)])

    # Work

    def step(self) -> list[RequestEvent]:
        """Wait for something to happen, at most 0.1 s, and work on it. Returns what came of it, in order.

        Raises RunError when a rank breaks, Terminated when this process is to end.
        """
        self.prompts.forget()
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

    def _take(self, news: HeadEvent) -> None:
        match news:
            case RunResult() as result:
                self._work([RunEnded(result)])
            case Fetched(request, row):
                self._work([RowFetched(request, row)])
            case DraftUpdate(micro_batch, records):
                self._counter.add(records, FIRST_DRAFT + micro_batch.drafter)
                self._work([Drafted(micro_batch)])
            case PartSpan(run, span):
                self._counter.add_part(run, span)
            case Received(_, PrefixSaved() as saved):
                self._saved(saved)
            case GrammarReady() as ready:
                self._prepared(ready)
            case None if (wake_at := self._scheduler.wake_at) is not None and time.monotonic() >= wake_at:
                self._work([Tick()])

    def _work(self, events: Sequence[SchedulerEvent]) -> None:
        """Give the scheduler events and do all that comes of them: the pipeline first, the user second."""
        waiting = collections.deque(events)
        for_user: list[Emit | Finished | RunDone | PrefixDone] = []
        while waiting:
            for action in self._scheduler.handle(waiting.popleft(), time.monotonic()):
                if isinstance(action, Emit | Finished | RunDone | PrefixDone):
                    for_user.append(action)
                else:
                    waiting.extend(self._perform(action))
        for action in for_user:
            self._show(action)
        for active in self._active.values():
            active.stats.n_in_flight = self._scheduler.n_in_flight

    def _perform(
        self, action: SubmitRun | CancelRuns | ToDrafter | Sample | Fetch | Replay | Embed
    ) -> Sequence[SchedulerEvent]:
        """Perform one action; returns the events that follow from it at once."""
        match action:
            case SubmitRun(run):
                self._head.submit(run)
                self._note_starts(run)
                if run.save is not None and run.save.request in self._active:
                    self._n_unsaved[run.save.request] += self._head.n_ranks
            case CancelRuns() as cancelled:
                self._head.cancel(cancelled)
            case ToDrafter(drafter, message):
                if isinstance(message, BeginDrafting) and message.saves != "nothing":
                    self._n_unsaved[message.request] += self._head.drafters.n_ranks(drafter)
                self._head.drafters.send(drafter, message)
            case Replay(request, rows):
                self._active[request].replay(rows)
            case Embed(request, rows):
                for row in rows:
                    self._active[request].pooled.add(row.logits)
            case Sample(request, row):
                return (self._sample(request, self._active[request], row),)
            case Fetch(request, run_id, row_number):
                self._head.fetch(request, run_id, row_number)
        return ()

    def _show(self, action: Emit | Finished | RunDone | PrefixDone) -> None:
        match action:
            case Emit(request, _, drafters):
                self._emit(request, self._active[request], drafters)
            case RunDone(records):
                self._counter.add(records, TARGET)
            case Finished(request, reason):
                self._unsaved[request] = RequestEnded(request=request, finish=reason, ended_s=time.monotonic())
                self._finish_saved(request)
            case PrefixDone(request):
                del self._orders[request]
                self._events.append(action)

    def _note_starts(self, run: Run) -> None:
        for request in {row.request for row in run.rows}:
            stats = self._stats_of(request)
            if stats is not None and stats.started is None:
                stats.started = time.monotonic()

    def _sample(self, request: int, active: ActiveRequest, row: RowLogits) -> Sampled | RowNeeded | NoToken:
        try:
            token = active.sample(row, self._ends)
        except NoTokenFits:
            return NoToken(request)
        if token is None:
            return RowNeeded(request)
        finish = active.finish(token, self._ends)
        return Sampled(request, token, active.sampler.logits_request(), finish, active.n_draws)

    def _emit(self, request: int, active: ActiveRequest, drafters: Sequence[int]) -> None:
        if isinstance(active.sampler, ConstrainedSampler):
            self._unsettled.append(active.sampler)
        labels = tuple(map(self._head.drafters.labels.__getitem__, drafters))
        self._events.append(TokenReady(request, active.take(labels), time.monotonic()))

    def _saved(self, saved: PrefixSaved) -> None:
        request = saved.request
        if (parts := self._orders.get(request)) is not None:
            parts.append(saved)
            if len(parts) == self._head.n_ranks:
                problems = tuple(part.problem for part in parts if part.problem)
                self._work([PrefixDone(request, sum(part.n_bytes for part in parts), problems)])
            return
        self._n_unsaved[request] -= 1
        if saved.problem:
            self._active[request].not_saved.append(saved.problem)
        self._finish_saved(request)

    def _finish_saved(self, request: int) -> None:
        """A request is over when nothing of it is in flight, and its prompt cache is written."""
        if request not in self._unsaved or self._n_unsaved[request]:
            return
        del self._n_unsaved[request]
        self._counter.end()
        active = self._active.pop(request)
        active.sampler.close()
        embedding = tuple(vector.tobytes() for vector in active.pooled.vectors)
        if not all(embedding):
            active.not_saved.append(f"'{self._head.model_file.architecture}' models give no embeddings here")
        ended = msgspec.structs.replace(
            self._unsaved.pop(request),
            rest=active.decoder.finish(),
            not_saved=tuple(active.not_saved),
            embedding=embedding,
        )
        self._events.append(ended)

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
        self._grammars.close()
        self.prompts.close()
        self._head.close()
