"""Models, KV caches and pipelines for tests of the core: no libllama, no time, every step on demand.

The caches keep libllama's rules and break the test where libllama would refuse a batch. The models see what lies in
the cache of the last stage, so a cache that is out of step gives a wrong text.
"""

from __future__ import annotations

import collections
import functools
import math
import random
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from ggpipe.core.drafting import Drafter, DraftEvent, Send
from ggpipe.core.events import Cancel, Finish, Limits, RunEnded, Submit, Tick
from ggpipe.core.messages import (
    ROOT,
    Accepted,
    Begin,
    Done,
    Expansion,
    KvKind,
    KvOp,
    MicroBatch,
    Row,
    RowLogits,
    Run,
    Steering,
    Want,
)

END = 0  # the token that ends a text

Tokens = tuple[int, ...]
Move = tuple[str, Callable[[], None]]
"""Something that may happen next: what it is, and how to let it happen."""


def is_below(path: Tokens, text: Tokens) -> bool:
    """It begins with the text, and goes on."""
    return len(path) > len(text) and path[: len(text)] == text


def chance(*what: object) -> int:
    """A number that depends on its arguments and on nothing else."""
    return zlib.crc32(repr(what).encode())


@dataclass(frozen=True)
class FakeModel:
    """Its logits are a hash of all tokens before; a small vocabulary ends texts soon."""

    n_vocab: int
    seed: int = 0
    draws: bool = False
    """The next token is drawn, from the best three: by the request and the number of its tokens, as a sampler does."""

    def ranking(self, history: Tokens, n: int) -> Tokens:
        """The best `n` tokens."""
        best = chance(self.seed, history)
        return tuple((best + i) % self.n_vocab for i in range(min(n, self.n_vocab)))

    def rank(self, request: int, n_accepted: int) -> int:
        """Which of the best tokens is drawn."""
        return chance(self.seed, request, n_accepted) % min(3, self.n_vocab) if self.draws else 0

    def next(self, request: int, history: Tokens, n_prompt: int) -> int:
        return self.ranking(history, 3)[self.rank(request, len(history) - n_prompt)]

    def text(self, request: int, prompt: Tokens, n_predict: int, n_ctx: int) -> tuple[list[int], Finish]:
        """What plain decoding gives, one token after the other, and why it ends. The end token is not part of it."""
        tokens = prompt
        while len(tokens) - len(prompt) != n_predict:
            if len(tokens) > n_ctx:  # the last token has no cell to be computed in
                return list(tokens[len(prompt) :]), Finish.CONTEXT_FULL
            token = self.next(request, tokens, len(prompt))
            if token == END:
                return list(tokens[len(prompt) :]), Finish.END_OF_TEXT
            tokens += (token,)
        return list(tokens[len(prompt) :]), Finish.LENGTH


@dataclass(frozen=True)
class FakeDraftModel:
    """Thinks as the target does in `agreement` of all cases (0 to 1), and names further candidates."""

    target: FakeModel
    agreement: float

    def candidates(self, history: Tokens, n: int) -> list[tuple[int, float]]:
        """The best `n` tokens with their probabilities."""
        ranking = self.target.ranking(history, n)
        roll = chance("draft", self.target.seed, history)
        if roll % 1000 >= 1000 * self.agreement:
            ranking = ranking[1 + roll % 2 :] + ranking[: 1 + roll % 2]
        best = 0.2 + 0.75 * (roll // 1000 % 100) / 100
        return [(token, best * (1 - best) ** i) for i, token in enumerate(ranking)]


@dataclass(eq=False)
class Cell:
    token: int
    pos: int
    seqs: set[int]


class FakeCache:
    """A unified KV cache: cells that hold a token at a position for a set of sequences."""

    def __init__(self, n_ctx: int, n_seq: int) -> None:
        self.n_ctx, self.n_seq = n_ctx, n_seq
        self.cells: set[Cell] = set()
        self._sequences: dict[int, dict[int, Cell]] = collections.defaultdict(dict)

    def apply(self, op: KvOp) -> None:
        """As `llama_memory_seq_rm`, `_cp` and `_keep`."""
        assert 0 <= op.seq < self.n_seq
        p0, p1 = max(op.p0, 0), op.p1 if op.p1 >= 0 else math.inf
        match op.kind:
            case KvKind.RM:
                self._remove(op.seq, p0, p1)
            case KvKind.CP:
                assert 0 <= op.dst < self.n_seq
                assert op.dst != op.seq
                assert not self._sequences[op.dst], "cells of an earlier user are left in that sequence"
                for pos, cell in self._sequences[op.seq].items():
                    if p0 <= pos < p1:
                        cell.seqs.add(op.dst)
                        self._sequences[op.dst][pos] = cell
            case KvKind.KEEP:
                for seq in set(self._sequences) - {op.seq}:
                    self._remove(seq, 0, math.inf)

    def _remove(self, seq: int, p0: float, p1: float) -> None:
        cells = self._sequences[seq]
        for pos in [pos for pos in cells if p0 <= pos < p1]:
            cell = cells.pop(pos)
            cell.seqs.remove(seq)
            if not cell.seqs:
                self.cells.remove(cell)

    def history(self, seq: int) -> Tokens:
        """The tokens of a sequence. It must have no gap."""
        cells = self._sequences[seq]
        assert sorted(cells) == list(range(len(cells))), "a hole in the sequence"
        return tuple(cells[pos].token for pos in range(len(cells)))

    def decode(self, rows: Sequence[Row]) -> list[Tokens]:
        """All tokens that each row sees, its own last."""
        for row in rows:
            assert row.seqs
            assert len(set(row.seqs)) == len(row.seqs)
            spans = {(min(cells, default=-1), max(cells, default=-1)) for cells in map(self._cells_of, row.seqs)}
            assert len(spans) == 1, "libllama: coupled sequences have diverged"
        histories = []
        for row in rows:
            cell = Cell(row.token, row.pos, set(row.seqs))
            self.cells.add(cell)
            for seq in row.seqs:
                cells = self._cells_of(seq)
                assert row.pos == max(cells, default=-1) + 1, "libllama: inconsistent sequence positions"
                cells[row.pos] = cell
            seen = {self.history(seq) for seq in row.seqs}
            assert len(seen) == 1, "coupled sequences hold different tokens"
            histories.append(seen.pop())
        assert len(self.cells) <= self.n_ctx, "libllama: no free cells"
        return histories

    def _cells_of(self, seq: int) -> dict[int, Cell]:
        assert 0 <= seq < self.n_seq
        return self._sequences[seq]

    def forget(self, rows: Sequence[Row]) -> None:
        """After an abort: the rows' cells go, for all their sequences."""
        for seq in {seq for row in rows for seq in row.seqs}:
            self._remove(seq, min(row.pos for row in rows if seq in row.seqs), math.inf)


Answer = Callable[[int, Row, Want, Tokens], RowLogits]
"""What a model says of a row: its place in the run, the row, what it wants, and the tokens that it sees."""


@dataclass
class FakeStage:
    """Runs and cancel messages come over different ways: each keeps its order, none waits for the other."""

    cache: FakeCache
    runs: collections.deque[Run] = field(default_factory=collections.deque)
    cancels: collections.deque[Tokens] = field(default_factory=collections.deque)
    cancelled: set[int] = field(default_factory=set)
    past: set[int] = field(default_factory=set)
    computing: Run | None = None
    histories: list[Tokens] = field(default_factory=list)

    def start(self) -> Run | None:
        """Take the next run. Returns it when there is nothing to compute, so that it is through."""
        run = self.runs.popleft()
        for op in run.ops:
            self.cache.apply(op)
        if run.id in self.cancelled:
            run = replace(run, cancelled=True)
        if run.cancelled or not run.rows:
            return self._through(run)
        self.computing, self.histories = run, self.cache.decode(run.rows)
        return None

    def finish(self) -> Run:
        """The run that is computed."""
        assert self.computing is not None
        return self._through(self.computing)

    def hear(self) -> Run | None:
        """Take a cancel message. Returns the run that it aborts."""
        runs = set(self.cancels.popleft()) - self.past
        self.cancelled |= runs
        if self.computing is None or self.computing.id not in runs:
            return None
        self.cache.forget(self.computing.rows)
        return self._through(replace(self.computing, cancelled=True))

    def _through(self, run: Run) -> Run:
        self.computing = None
        self.past.add(run.id)
        self.cancelled.discard(run.id)
        return run


class FakePipeline:
    """Stages in a row, and what must hold of whoever feeds them. Nothing moves by itself."""

    def __init__(self, n_stages: int, n_ctx: int, n_seq: int, n_rows: int, answer: Answer) -> None:
        self.stages = [FakeStage(FakeCache(n_ctx, n_seq)) for _ in range(n_stages)]
        self.results: collections.deque[tuple[Run, tuple[RowLogits, ...]]] = collections.deque()
        self.in_flight: dict[int, Run] = {}
        self.cancelled: set[int] = set()
        """Of those in flight."""
        self.run_of: dict[tuple[int, Tokens], int] = {}
        """(request, tokens up to a row) -> the run that carries the row."""
        self.rows_of: dict[int, list[tuple[int, Tokens]]] = {}
        self.ended: set[int] = set()
        self._n_rows = n_rows
        self._answer = answer
        self._plan = FakeCache(n_ctx, n_seq)
        """What the cache holds after all runs so far, if none is cancelled."""

    # What its head does

    def submit(self, run: Run) -> None:
        assert not run.cancelled
        assert run.rows or run.ops
        assert run.id not in self.in_flight
        assert run.id not in self.ended
        assert len(run.rows) <= self._n_rows, "more rows than a batch holds"
        for op in run.ops:
            self._plan.apply(op)
        self.rows_of[run.id] = []
        for row, history in zip(run.rows, self._plan.decode(run.rows), strict=True):
            assert (row.request, history) not in self.run_of, "evaluated twice"
            self.run_of[row.request, history] = run.id
            self.rows_of[run.id].append((row.request, history))
        self.in_flight[run.id] = run
        self.stages[0].runs.append(run)

    def cancel(self, runs: Tokens) -> None:
        assert runs
        assert set(runs) <= set(self.in_flight)
        assert not self.cancelled & set(runs)
        self.cancelled |= set(runs)
        for stage in self.stages:
            stage.cancels.append(runs)

    def take_result(self) -> tuple[int, tuple[RowLogits, ...]]:
        """The oldest that has come back. Each run ends once."""
        run, rows = self.results.popleft()
        assert self.in_flight.pop(run.id).rows == run.rows
        self.cancelled.discard(run.id)
        self.ended.add(run.id)
        return run.id, rows

    # What happens in it

    def moves(self, name: str, hear_result: Callable[[], None]) -> list[Move]:
        """All that can happen next; `name` goes into theirs."""
        moves: list[Move] = []
        for i, stage in enumerate(self.stages):
            if stage.runs or stage.computing:
                moves.append((f"{name} stage {i}", functools.partial(self.step, i)))
            if stage.cancels:
                moves.append((f"{name} cancel {i}", functools.partial(self.hear, i)))
        if self.results:
            moves.append((f"{name} result", hear_result))
        return moves

    def step(self, stage: int) -> None:
        """A stage starts its next run or ends the one that it computes."""
        here = self.stages[stage]
        run = here.start() if here.computing is None else here.finish()
        self._pass_on(stage, run)

    def hear(self, stage: int) -> None:
        self._pass_on(stage, self.stages[stage].hear())

    def _pass_on(self, stage: int, run: Run | None) -> None:
        if run is None:
            return
        if stage + 1 < len(self.stages):
            self.stages[stage + 1].runs.append(run)
            return
        rows: tuple[RowLogits, ...] = ()
        if not run.cancelled:
            seen = zip(run.rows, self.stages[stage].histories if run.rows else [], strict=True)
            rows = tuple(
                self._answer(i, row, run.wants[row.want], history)
                for i, (row, history) in enumerate(seen)
                if row.want >= 0
            )
        self.results.append((run, rows))

    # What must hold

    @property
    def live(self) -> list[Run]:
        """Runs in flight that are not cancelled, markers left out."""
        return [run for run in self.in_flight.values() if run.rows and run.id not in self.cancelled]

    def depends(self, run: int, on: Iterable[int]) -> bool:
        """A row of this run hangs on a row of those."""
        parents = {self.run_of.get((request, history[:-1])) for request, history in self.rows_of[run]}
        return bool((parents - {run}) & set(on))

    def check_empty(self) -> None:
        """All is over."""
        assert not self.in_flight
        for stage in self.stages:
            assert not stage.runs
            assert not stage.cancels
            assert not stage.cache.cells, "cells are left behind"


class RealDraft:
    """The core's drafter over a fake pipeline, and the way to and from it."""

    def __init__(self, limits: Limits, n_stages: int, model: FakeDraftModel) -> None:
        self.drafter = Drafter(limits)
        self.model = model
        self.n_rows = min(limits.n_batch, limits.n_ubatch)
        self.pipeline = FakePipeline(n_stages, limits.n_ctx, limits.n_seq, self.n_rows, self._answer)
        self.steering: collections.deque[Steering] = collections.deque()
        self.batches: collections.deque[MicroBatch] = collections.deque()
        self.text: dict[int, Tokens] = {}
        """Of each request, as far as the drafter was told."""
        self.begun: dict[int, Begin] = {}
        self.lead: dict[int, int] = {}
        self.paths: dict[tuple[int, int], Tokens] = {}
        """(request, number of a guess) -> all tokens up to it."""
        self.now = 0.0

    def _answer(self, i: int, row: Row, want: Want, history: Tokens) -> RowLogits:
        best = self.model.candidates(history, want.n)
        return RowLogits(i, tuple(token for token, _ in best), tuple(math.log(prob) for _, prob in best), 0.0)

    def moves(self) -> list[Move]:
        moves = self.pipeline.moves("draft", self._hear_result)
        if self.steering:
            moves.append(("steering", self._hear_steering))
        if self.drafter.wake_at is not None:
            moves.append(("tick", self._tick))
        return moves

    def _hear_steering(self) -> None:
        message = self.steering.popleft()
        match message:
            case Begin(request, prompt):
                self.text[request] = prompt
                self.begun[request] = message
                self.lead[request] = message.lead
            case Accepted(request, epoch, tokens, lead):
                self.text[request] += tokens
                self.lead[request] = lead
                assert len(self.text[request]) == len(self.begun[request].prompt) + epoch
            case Done(request):
                del self.text[request]
        self.handle(message)

    def _hear_result(self) -> None:
        self.handle(RunEnded(*self.pipeline.take_result()))

    def _tick(self) -> None:
        assert self.drafter.wake_at is not None
        self.now = max(self.now, self.drafter.wake_at)
        self.handle(Tick())

    def handle(self, event: DraftEvent) -> None:
        self.now += 0.001
        for action in self.drafter.handle(event, self.now):
            match action:
                case Submit(run):
                    self._submitted(run)
                case Cancel(runs):
                    self.pipeline.cancel(runs)
                case Send(batch):
                    self._sent(batch)
        for run in self.pipeline.live:
            assert any(self._lives(*row) for row in self.pipeline.rows_of[run.id]), "a hopeless run goes on"

    def _lives(self, request: int, history: Tokens) -> bool:
        text = self.text.get(request)
        return text is not None and history[: len(text)] == text[: len(history)]

    def _submitted(self, run: Run) -> None:
        guessing = [other for other in self.pipeline.live if self._guesses(other)]
        self.pipeline.submit(run)
        if not run.rows:
            return
        (request,) = {row.request for row in run.rows}
        begin, text = self.begun[request], self.text[request]
        assert run.epoch == len(text) - len(begin.prompt)
        for _, history in self.pipeline.rows_of[run.id]:
            assert self._lives(request, history), "a token that is known to be wrong"
            assert len(history) <= len(text) + self.lead[request] - 1, "deeper than allowed"
        if self._guesses(run):
            assert not guessing, "two runs of guesses in flight"
            assert len(run.rows) <= begin.speculation.n_parallel
        for row in run.rows:
            assert row.want == -1 or run.wants[row.want].banned == begin.banned

    def _guesses(self, run: Run) -> bool:
        return any(row.pos >= len(self.text.get(row.request, ())) for row in run.rows)

    def _sent(self, batch: MicroBatch) -> None:
        speculation = self.begun[batch.request].speculation
        n = sum(expansion.n for expansion in batch.expansions)
        assert n <= speculation.n_draft
        assert n or batch.complete, "nothing in it"
        n_text = len(self.begun[batch.request].prompt) + batch.epoch
        text = self.text[batch.request][:n_text]
        assert len(text) == n_text
        for expansion in batch.expansions:
            assert 0 < expansion.n <= speculation.n_parallel
            path = text if expansion.parent == ROOT else self.paths[batch.request, expansion.parent]
            assert path[: len(text)] == text, "a guess that is known to be wrong"
            assert [token for token, _ in expansion.candidates] == [
                token for token, _ in self.model.candidates(path, len(expansion.candidates))
            ]
            for i, (token, _) in enumerate(expansion.candidates[: expansion.n]):
                self.paths[batch.request, expansion.first + i] = (*path, token)
        paths = [path for (request, _), path in self.paths.items() if request == batch.request and is_below(path, text)]
        leaves = set(paths) - {path[:-1] for path in paths}
        assert len(leaves) <= speculation.n_parallel
        self.batches.append(batch)

    def check_empty(self) -> None:
        assert not self.steering
        assert not self.batches
        self.pipeline.check_empty()


class Adversary:
    """A draft that sends any tree: wrong tokens, old epochs, unknown parents, the same token twice, end tokens."""

    def __init__(self, target: FakeModel, agreement: float, seed: int) -> None:
        self.target, self.agreement = target, agreement
        self.random = random.Random(seed)
        self.steering: collections.deque[Steering] = collections.deque()
        self.batches: collections.deque[MicroBatch] = collections.deque()
        self._begun: dict[int, Begin] = {}
        self._text: dict[int, Tokens] = {}
        self._paths: dict[int, dict[int, Tokens]] = {}
        """Request -> number of a guess -> all tokens up to it."""
        self._to_send: dict[int, int] = {}

    def moves(self) -> list[Move]:
        moves: list[Move] = [("steering", self._hear)] if self.steering else []
        moves += [("draft", functools.partial(self._guess, request)) for request in self._to_send]
        return moves

    def _hear(self) -> None:
        match self.steering.popleft():
            case Begin(request, prompt) as begin:
                self._begun[request], self._text[request], self._paths[request] = begin, prompt, {}
                self._to_send[request] = self.random.randint(1, 5)
            case Accepted(request, _, tokens, _):
                self._text[request] += tokens
                self._to_send[request] = self.random.randint(1, 5)
            case Done(request):
                self._to_send.pop(request, None)

    def _guess(self, request: int) -> None:
        self._to_send[request] -= 1
        if complete := not self._to_send[request]:
            del self._to_send[request]
        text, n_prompt = self._text[request], len(self._begun[request].prompt)
        epoch = len(text) - n_prompt
        if self.random.random() < 0.2:
            epoch = self.random.randint(0, epoch)
        expansions = [self._expand(request, text[: n_prompt + epoch]) for _ in range(self.random.randint(0, 4))]
        complete = complete and epoch == len(text) - n_prompt
        if not complete and request not in self._to_send:
            self._to_send[request] = 1  # it must say so at the newest epoch
        self.batches.append(MicroBatch(request, epoch, tuple(expansions), complete))

    def _expand(self, request: int, text: Tokens) -> Expansion:
        paths = self._paths[request]
        live = [guess for guess, path in paths.items() if path[: len(text)] == text][-12:]
        parent = self.random.choice([ROOT, *live, *live])
        if self.random.random() < 0.1:
            parent = self.random.choice([*paths, 10**6])
        path = text if parent == ROOT else paths.get(parent, text)
        right = self.target.next(request, path, len(self._begun[request].prompt))
        tokens = [self.random.randrange(self.target.n_vocab) for _ in range(self.random.randint(0, 3))]
        if self.random.random() < self.agreement:
            tokens.insert(self.random.randint(0, len(tokens)), right)
        first = len(paths) + 1
        for i, token in enumerate(tokens):
            paths[first + i] = (*path, token)
        n = max(len(tokens) - (self.random.random() < 0.2), 0)
        return Expansion(parent, first, n, tuple((token, self.random.random()) for token in tokens))

    def check_empty(self) -> None:
        assert not self.steering
        assert not self.batches
