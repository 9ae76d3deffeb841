"""A draft model's drafter as it is in core, on a virtual rank, over its virtual stages."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

from ggpipe.core.draft_messages import BeginDrafting, DrafterMessage, MicroBatch
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.base import DraftEvent, DraftPipeline, StatesArrived, ToHead
from ggpipe.core.drafters.draft_model import DraftModel
from ggpipe.core.events import CancelRuns, RunDone, RunEnded, SubmitRun, Tick
from ggpipe.core.messages import KvKind, KvOp, Row, RowLogits, Run, RunRecord, RunResult, Span
from ggpipe.sim.clock import VirtualClock
from ggpipe.sim.cores import Cores
from ggpipe.sim.network import Network
from ggpipe.sim.pipeline import VirtualPipeline
from ggpipe.sim.stage import Process
from ggpipe.sim.text import SimulatedTokens
from ggpipe.sim.virtual_cluster import PipelineSpec, VirtualCluster
from ggpipe.transport.base import HEAD

_DRAFTER_MESSAGE_BYTES, _MICRO_BATCH_BYTES = 200, 400
MicroBatchArrived = Callable[[MicroBatch, tuple[RunRecord, ...]], None]
"""Called with the draft's message and the draft's runs since the one before."""


class VirtualDraft:
    """The head of the draft model: core's drafter, and the virtual stages that it submits runs to."""

    def __init__(
        self,
        clock: VirtualClock,
        network: Network,
        cores: list[Cores],
        processes: list[Process],
        cluster: VirtualCluster,
        model: PipelineSpec,
        tokens: Mapping[int, SimulatedTokens],
        pipeline: DraftPipeline,
        arrived: MicroBatchArrived,
        drafter: int,
    ) -> None:
        """`model`: the draft, as it lies on the cluster; `tokens`: of each request; `arrived` is called at the head.
        `drafter`: its id."""
        self._clock = clock
        self._network = network
        self._overheads = cluster.overheads
        self._arrived = arrived
        self.rank = model.layout.head
        self._process = processes[self.rank]
        self._drafter = registry.WITH_MODEL[model.drafter](drafter, pipeline)
        self._paths = _Paths(tokens, drafter, skips_first=bool(model.taps) and model.drafter != registry.MTP)
        self._pipeline = VirtualPipeline(
            clock, network, cores, processes, cluster, model, self.rank, self._result_arrived
        )
        self._answers: dict[int, tuple[RowLogits, ...]] = {}
        self._records: list[RunRecord] = []

    def receive(self, message: DrafterMessage) -> int:
        """The head says this; returns the number of messages that it takes."""

        if isinstance(message, BeginDrafting) and isinstance(self._drafter, DraftModel):
            self._paths.first[message.request] = self._drafter.first_read(message)

        def arrive() -> None:
            self._process.receive(HEAD, lambda: self._handle(message))

        if self.rank == HEAD:
            self._handle(message)
            return 0
        self._network.send(HEAD, self.rank, _DRAFTER_MESSAGE_BYTES, arrive)
        return 1

    def states_arrived(self, run: Run) -> None:
        """All states of a run of the target came that a draft head reads, or MTP layers."""
        event = StatesArrived(run.id, tuple((row.request, row.pos) for row in run.rows))
        self._process.receive(HEAD, lambda: self._handle(event))

    def _handle(self, event: DraftEvent) -> None:
        n_messages = 0
        for action in self._drafter.handle(event, self._clock.now):
            match action:
                case SubmitRun(run):
                    self._answers[run.id] = self._paths.answers(run)
                    n_messages += self._pipeline.submit(run)
                case CancelRuns() as cancelled:
                    n_messages += self._pipeline.cancel(cancelled)
                case RunDone(records):
                    self._records += records
                case ToHead(micro_batch):
                    n_messages += self.rank != HEAD
                    self._send(micro_batch, tuple(self._records))
                    self._records = []
        self._process.send(n_messages)
        wake_at = self._drafter.wake_at
        if wake_at is not None:
            self._clock.at(wake_at, self._tick)

    def _send(self, micro_batch: MicroBatch, records: tuple[RunRecord, ...]) -> None:
        self._network.send(self.rank, HEAD, _MICRO_BATCH_BYTES, lambda: self._arrived(micro_batch, records))

    def _tick(self) -> None:
        wake_at = self._drafter.wake_at
        if wake_at is not None and self._clock.now >= wake_at:
            self._process.do(self._overheads.event_s, lambda: self._handle(Tick()))

    def _result_arrived(self, run: Run, spans: tuple[Span, ...]) -> None:
        def ended() -> None:
            answers = self._answers.pop(run.id)
            self._handle(RunEnded(RunResult(run.id, () if run.cancelled else answers, spans, run.cancelled)))

        self._process.receive(spans[-1].rank, ended)


class _Paths:
    """Which of the draft's sequences have left the text, and what it therefore says of a row."""

    def __init__(self, tokens: Mapping[int, SimulatedTokens], drafter: int, skips_first: bool) -> None:
        """`tokens`: of each request. `drafter`: whose candidates they are, by its id. `skips_first`: its sequences
        begin with the request's second token, as those of a draft head."""
        self._tokens = tokens
        self._drafter = drafter
        self._skips_first = skips_first
        self.first: dict[int, int] = {}
        """By request: the token of its prompt where the drafter's sequences begin."""
        self._left: dict[int, int] = {}
        """By sequence: the position of its first token that is not the text's."""
        self._known: dict[tuple[int, int, bool], tuple[tuple[int, ...], tuple[float, ...]]] = {}

    def answers(self, run: Run) -> tuple[RowLogits, ...]:
        """For the rows of a run that want something, as if it were computed now."""
        for op in run.ops:
            self._apply(op)
        for row in run.rows:
            self._follow(row)
        return tuple(
            self._answer(i, row, run.logits_requests[row.logits_request].n_positions)
            for i, row in enumerate(run.rows)
            if row.logits_request >= 0
        )

    def _apply(self, op: KvOp) -> None:
        at = self._left.get(op.seq)
        match op.kind:
            case KvKind.RM:
                if at is not None and max(op.p0, 0) <= at:
                    del self._left[op.seq]
            case KvKind.CP:
                self._left.pop(op.dst, None)
                if at is not None and (op.p1 < 0 or at < op.p1):
                    self._left[op.dst] = at

    def _follow(self, row: Row) -> None:
        tokens = self._tokens[row.request]
        i, text = row.pos + self._shift(row) - len(tokens.prompt), tokens.output
        if i >= 0 and (i >= len(text) or text[i] != row.token):
            for seq in row.seqs:
                self._left[seq] = min(self._left.get(seq, row.pos), row.pos)

    def _answer(self, i: int, row: Row, n_positions: int) -> RowLogits:
        left = self._left
        lost = bool(left) and all(left.get(seq, row.pos + 1) <= row.pos for seq in row.seqs)
        after = row.pos + self._shift(row) + 1
        first, *later = [self._said(row.request, after + ahead, lost) for ahead in range(n_positions)]
        return RowLogits(i, *first, 0.0, later=tuple(RowLogits(i, *one, 0.0) for one in later))

    def _shift(self, row: Row) -> int:
        """Tokens of the request before the drafter's own first one, see `core.drafters`."""
        skipped = int(self._skips_first and len(self._tokens[row.request].prompt) > 1)
        return skipped + self.first.get(row.request, 0)

    def _said(self, request: int, pos: int, lost: bool) -> tuple[tuple[int, ...], tuple[float, ...]]:
        key = request, pos, lost
        if key not in self._known:
            tokens = self._tokens[request]
            found = tokens.candidates(pos - len(tokens.prompt), lost, self._drafter)
            self._known[key] = tuple(t for t, _ in found), tuple(math.log(max(p, 1e-30)) for _, p in found)
        return self._known[key]
