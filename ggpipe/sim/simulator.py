"""Requests on a virtual cluster: core's scheduler and drafter, as they are, over virtual stages."""

from __future__ import annotations

import collections
import functools
import gc
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from msgspec import structs

from ggpipe.config.model import FIRST_DRAFT, TARGET
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import MicroBatch
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.base import DraftPipeline
from ggpipe.core.events import (
    Arrived,
    CancelRuns,
    Drafted,
    Emit,
    Finished,
    RunDone,
    RunEnded,
    Sample,
    Sampled,
    SchedulerAction,
    SchedulerEvent,
    SubmitRun,
    Tick,
    ToDrafter,
)
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits, Run, RunRecord, RunResult, Span
from ggpipe.core.request import Request
from ggpipe.core.request_spec import RequestSpec
from ggpipe.core.scheduler import Scheduler
from ggpipe.sim.arrivals import Arrival
from ggpipe.sim.clock import VirtualClock
from ggpipe.sim.cores import Cores, OwnCores
from ggpipe.sim.draft import VirtualDraft
from ggpipe.sim.limits import Sizes, limits_of, target_limits
from ggpipe.sim.network import Network
from ggpipe.sim.pipeline import VirtualPipeline
from ggpipe.sim.stage import Process
from ggpipe.sim.text import SimulatedTokens
from ggpipe.sim.virtual_cluster import VirtualCluster
from ggpipe.stats.activity import RankWork, part
from ggpipe.stats.records import RankStats, RequestStats
from ggpipe.transport.base import HEAD

_ONE = LogitsRequest(LogitsKind.TOP, 1)


@dataclass(frozen=True, slots=True)
class SimulatedRequest:
    """A request that is to be simulated, with all of its text."""

    tokens: SimulatedTokens
    arrival: Arrival


@dataclass(frozen=True, slots=True)
class SimulationResult:
    """Requests that shared a pipeline. Times are virtual seconds since the simulation's start."""

    requests: tuple[RequestStats, ...]
    ranks: Sequence[RankStats]
    """Each rank's work for all requests."""


def simulate(
    cluster: VirtualCluster,
    tokens: SimulatedTokens,
    speculation: SpeculationConfig,
    n_predict: int,
    sizes: Sizes | None = None,
) -> RequestStats:
    """One request from arrival to end. Times in the result are virtual seconds since it arrived.

    Raises ValueError when the text is shorter than `n_predict`, or the context too small for it.
    """
    if len(tokens.output) < n_predict:
        raise ValueError(f"the text has {len(tokens.output)} tokens, fewer than {n_predict}")
    asked = SimulatedRequest(tokens, Arrival(at_s=0.0, n_predict=n_predict))
    return serve(cluster, (asked,), speculation, sizes).requests[0]


def serve(
    cluster: VirtualCluster,
    requests: Sequence[SimulatedRequest],
    speculation: SpeculationConfig,
    sizes: Sizes | None = None,
) -> SimulationResult:
    """Requests that share the pipeline, until all of them have ended.

    Raises ValueError when the context is too small for one of them.
    """
    sizes = sizes or Sizes()
    for asked in requests:
        n_prompt, n_text = len(asked.tokens.prompt), _n_predict(asked)
        if n_prompt + n_text > sizes.n_ctx:
            raise ValueError(f"{n_prompt} + {n_text} tokens do not fit a context of {sizes.n_ctx}")
    if not _drafters(cluster, speculation):
        speculation = replace(speculation, mode="iterative")
    collects = gc.isenabled()
    gc.disable()  # nothing here goes round in circles, and there is much of it
    try:
        return _Simulation(cluster, requests, speculation, sizes).run()
    finally:
        if collects:
            gc.enable()


def _n_predict(asked: SimulatedRequest) -> int:
    n_predict = asked.arrival.n_predict
    return len(asked.tokens.output) if n_predict is None else n_predict


@dataclass(slots=True)
class _Active:
    """A request of the simulation."""

    request: Request
    tokens: SimulatedTokens
    stats: RequestStats
    work: dict[RankWork, RankStats]
    """Each rank's work for it."""


class _Simulation:
    def __init__(
        self,
        cluster: VirtualCluster,
        requests: Sequence[SimulatedRequest],
        speculation: SpeculationConfig,
        sizes: Sizes,
    ) -> None:
        clock = self._clock = VirtualClock()
        self._overheads = cluster.overheads
        cores = [_cores(clock, cluster, number) for number in range(len(cluster.nodes))]
        processes = [Process(clock, cores[node], rank, cluster) for rank, node in enumerate(cluster.node_of)]
        network = self._network = Network(clock, cluster)
        self._process = processes[HEAD]
        drafters = _drafters(cluster, speculation)
        limits = target_limits(sizes, cluster, speculation, max(len(drafters), 1))
        if speculation.mode == "iterative":
            drafters = ()
        kinds = registry.kinds(_models(cluster))
        self._labels = registry.labels(_models(cluster))
        in_head = {
            drafter: registry.WITHOUT_MODEL[kinds[drafter]](drafter)
            for drafter in drafters
            if kinds[drafter] in registry.WITHOUT_MODEL
        }
        self._scheduler = Scheduler(limits, text_drafters=in_head)
        self._pipeline = VirtualPipeline(
            clock, network, cores, processes, cluster, cluster.target, HEAD, self._result_arrived
        )
        self._groups = {
            model: {stage.ranks[0]: stage.ranks[1:] for stage in pipeline.layout.stages if len(stage.ranks) > 1}
            for model, pipeline in enumerate((cluster.target, *cluster.drafts), TARGET)
        }
        self._asked = requests
        self._active = {i: _active(i, asked, speculation, cluster) for i, asked in enumerate(requests, 1)}
        self._drafts: dict[int, VirtualDraft] = {}
        for drafter in drafters:
            if drafter in in_head:
                continue
            model = cluster.drafts[drafter]
            draft = self._drafts[drafter] = VirtualDraft(
                clock,
                network,
                cores,
                processes,
                cluster,
                model,
                {i: asked.tokens for i, asked in enumerate(requests, 1)},
                DraftPipeline(
                    limits=limits_of(sizes, model, speculation),
                    horizon=model.horizon,
                    window=sizes.window if registry.has_window(model.drafter) else 0,
                ),
                self._micro_batch_arrived,
                drafter,
            )
            if model.taps:
                self._pipeline.tap(model.taps, model.tap_bytes, draft.rank, draft.states_arrived)
        self._ranks = _ranks(cluster)
        self._work = {part(rank): rank for rank in self._ranks}
        self._not_started: set[int] = set()
        self._n_left = len(requests)
        self._wakes_at = math.inf

    def run(self) -> SimulationResult:
        self._arrive(None)
        while self._n_left and self._clock.step():
            pass
        if self._n_left:
            raise RuntimeError("the simulated requests stand still: a bug of the scheduler")
        return SimulationResult(tuple(active.stats for active in self._active.values()), self._ranks)

    def _arrive(self, after: int | None) -> None:
        """Plan the requests that follow the end of `after`, or the start."""
        for i, asked in enumerate(self._asked):
            if asked.arrival.after == after:
                if asked.arrival.at_s:
                    self._clock.after(asked.arrival.at_s, functools.partial(self._arrived, i + 1))
                else:
                    self._arrived(i + 1)

    def _arrived(self, request: int) -> None:
        self._active[request].stats.arrived = self._clock.now
        self._process.do(self._overheads.event_s, functools.partial(self._begin, request))

    def _begin(self, request: int) -> None:
        active = self._active[request]
        self._not_started.add(request)
        self._handle(Arrived(active.request, _ONE, active.stats.counters))

    def _handle(self, event: SchedulerEvent) -> None:
        self._perform(self._scheduler.handle(event, self._clock.now))

    def _perform(self, first: list[SchedulerAction]) -> None:
        actions, n_messages = collections.deque(first), 0
        while actions:
            match actions.popleft():
                case SubmitRun(run):
                    self._started(run)
                    n_messages += self._pipeline.submit(run)
                case CancelRuns() as cancelled:
                    n_messages += self._pipeline.cancel(cancelled)
                case RunDone(records):
                    self._count(records, TARGET)
                case Sample(request, _):
                    active = self._active[request]
                    token = active.tokens.output[active.stats.n_generated]
                    actions.extend(self._scheduler.handle(Sampled(request, token, _ONE), self._clock.now))
                case Emit(request, _, named_by):
                    stats = self._active[request].stats
                    stats.token_times.append(self._clock.now)
                    stats.drafted_by.append(tuple(self._labels[drafter] for drafter in named_by))
                case ToDrafter(drafter, message):
                    n_messages += self._drafts[drafter].receive(message)
                case Finished(request, reason):
                    stats = self._active[request].stats
                    stats.finish, stats.ended = reason, self._clock.now
                    self._n_left -= 1
                    self._arrive(request - 1)
        self._process.send(n_messages)
        wake_at = self._scheduler.wake_at
        if wake_at is not None and wake_at != self._wakes_at:
            self._wakes_at = wake_at
            self._clock.at(wake_at, self._tick)

    def _started(self, run: Run) -> None:
        if self._not_started:
            for request in self._not_started.intersection(row.request for row in run.rows):
                self._active[request].stats.started = self._clock.now
                self._not_started.remove(request)

    def _tick(self) -> None:
        wake_at = self._scheduler.wake_at
        if wake_at is not None and self._clock.now >= wake_at:
            self._handle(Tick())

    def _result_arrived(self, run: Run, spans: tuple[Span, ...]) -> None:
        def ended() -> None:
            rows = (
                () if run.cancelled else tuple(_answer(i) for i, row in enumerate(run.rows) if row.logits_request >= 0)
            )
            self._handle(RunEnded(RunResult(run.id, rows, spans, run.cancelled)))

        self._process.receive(spans[-1].rank, ended, _n_requests(run))

    def _micro_batch_arrived(self, micro_batch: MicroBatch, records: tuple[RunRecord, ...]) -> None:
        """A drafter's message is there."""

        def drafted() -> None:
            self._count(records, FIRST_DRAFT + micro_batch.drafter)
            self._handle(Drafted(micro_batch))

        self._process.receive(self._drafts[micro_batch.drafter].rank, drafted)

    def _count(self, records: Iterable[RunRecord], model: int) -> None:
        """Add runs to the statistics of ranks and requests. The records of one run follow each other."""
        last, groups = -1, self._groups[model]
        for record in records:
            if groups or model != TARGET:
                record = structs.replace(
                    record, spans=(*record.spans, *_other_parts(record.spans, groups)), model=model
                )
            active = self._active[record.request]
            (active.stats.runs if model == TARGET else active.stats.draft_runs).append(record)
            for span in record.spans:
                active.work[span.rank, model].add(span, record.share)
                if record.id != last:
                    self._work[span.rank, model].add(span)
            last = record.id


def _active(number: int, asked: SimulatedRequest, speculation: SpeculationConfig, cluster: VirtualCluster) -> _Active:
    tokens = asked.tokens
    spec = RequestSpec(prompt=tokens.prompt, n_predict=_n_predict(asked), speculation=speculation)
    drafters = _drafters(cluster, speculation)
    request = Request(id=number, spec=spec, prompt=tokens.prompt, drafters=drafters)
    stats = RequestStats(n_prompt=len(tokens.prompt), speculation=speculation, ranks=_ranks(cluster))
    return _Active(request, tokens, stats, {part(rank): rank for rank in stats.ranks})


def _other_parts(spans: Sequence[Span], groups: Mapping[int, Sequence[int]]) -> Iterator[Span]:
    """The spans of the parts that do not send runs on: as long as part 0's."""
    for span in spans:
        for rank in groups.get(span.rank, ()):
            yield structs.replace(span, rank=rank, sent_bytes=0)


def _answer(row: int) -> RowLogits:
    return RowLogits(row, (0,), (0.0,), 0.0)


def _n_requests(run: Run) -> int:
    """Requests whose next token may be sampled from a run; at least 1."""
    if not run.rows or run.cancelled or run.rows[0].request == run.rows[-1].request:  # a request's rows are together
        return 1
    return max(len({row.request for row in run.rows if row.logits_request >= 0}), 1)


def _cores(clock: VirtualClock, cluster: VirtualCluster, number: int) -> Cores:
    node = cluster.nodes[number]
    ranks = [rank for rank, place in enumerate(cluster.node_of) if place == number]
    heads = (HEAD, *(draft.layout.head for draft in cluster.drafts))
    if len(ranks) == 1 and ranks[0] not in heads:
        own = (pipeline.stages.get(ranks[0]) for pipeline in (cluster.target, *cluster.drafts))
        stage = next((stage for stage in own if stage is not None), None)
        if stage is not None and stage.threads <= node.cores:
            return OwnCores(clock, node.cores)
    return Cores(clock, node.cores, node.crowd)


def _drafters(cluster: VirtualCluster, speculation: SpeculationConfig) -> tuple[int, ...]:
    """The ids of the drafters of each request."""
    return registry.chosen(speculation.drafters, _models(cluster))


def _models(cluster: VirtualCluster) -> tuple[str, ...]:
    """The kinds of the drafters of its draft models."""
    return tuple(draft.drafter for draft in cluster.drafts)


def _ranks(cluster: VirtualCluster) -> list[RankStats]:
    """All ranks, the target's first, then those of each draft model, which may be in the head's process."""
    parts = []
    for model, pipeline in enumerate((cluster.target, *cluster.drafts), TARGET):
        for rank in pipeline.layout.ranks:
            stage = pipeline.stages.get(rank)
            threads = stage.threads if stage else 0
            host = cluster.nodes[cluster.node_of[rank]].name
            parts.append(
                RankStats(
                    rank=rank,
                    model=model,
                    drafter="" if model == TARGET else pipeline.drafter,
                    host=host,
                    layers=pipeline.layout.layers_of(rank),
                    threads=(threads, threads),
                )
            )
    return parts
