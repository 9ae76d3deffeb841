"""Drafts for tests of the core: the drafter itself over a fake pipeline, and one that says anything at any time."""

from __future__ import annotations

import collections
import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ggpipe.core.draft_messages import (
    ROOT,
    Accepted,
    BeginDrafting,
    BlockOf,
    DrafterMessage,
    EndDrafting,
    Expansion,
    MicroBatch,
    Shared,
)
from ggpipe.core.drafters.adjusted_rows import N_MORE
from ggpipe.core.drafters.base import DraftEvent, DraftPipeline
from ggpipe.core.drafters.draft_model import DraftModel
from ggpipe.core.drafters.foresight import N_CANDIDATES
from ggpipe.core.drafters.grammar import GrammarDrafter
from ggpipe.core.drafters.ngram import Ngrams
from ggpipe.core.messages import LogitsRequest, Row, RowLogits, Run
from ggpipe.core.request import DraftCheck, Limits
from support.drafter_driver import DrafterDriver
from support.fake_cache import HIDDEN
from support.fake_model import FakeModel, Tokens, chance, is_below
from support.fake_pipeline import NO_FILES, FakePipeline, Move, Restored


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


class RealDraft(DrafterDriver):
    """The core's drafter over a fake pipeline, and the way to and from it."""

    def __init__(
        self,
        limits: Limits,
        n_stages: int,
        model: FakeDraftModel,
        restored: Restored = NO_FILES,
        id: int = 0,
        window: int = 0,
    ) -> None:
        self.id = id
        self.window = window if limits.rolls_back else 0
        self.model = model
        self.n_rows = min(limits.n_batch, limits.n_ubatch)
        super().__init__(
            DraftModel(id, DraftPipeline(limits=limits, restored=restored.tokens, window=window)),
            FakePipeline(n_stages, limits, self.n_rows, self._answer, whole=self._whole),
        )
        if restored.tokens is not None:
            self.pipeline.restore(restored.tokens, restored.more)
        self.steering: collections.deque[DrafterMessage] = collections.deque()
        self.batches: collections.deque[MicroBatch] = collections.deque()
        self.text: dict[int, Tokens] = {}
        """Of each request, as far as the drafter was sent."""
        self.last_text: dict[int, Tokens] = {}
        """The same, of ended requests too."""
        self.begun: dict[int, BeginDrafting] = {}
        self.look_ahead: dict[int, int] = {}
        self.paths: dict[tuple[int, int], Tokens] = {}
        """(request, number of a draft token) -> all tokens up to it."""

    def _answer(self, i: int, row: Row, want: LogitsRequest, history: Tokens) -> RowLogits:
        best = self.model.candidates(history, want.n)
        return RowLogits(i, tuple(token for token, _ in best), tuple(math.log(prob) for _, prob in best), 0.0)

    def _first(self, request: int) -> int:
        first: int = self.drafter.first_read(self.begun[request])
        assert bool(first) <= bool(self.window)
        return first

    def _whole(self, request: int, history: Tokens) -> Tokens:
        text, first = self.last_text[request], self._first(request)
        seen = sum(token != HIDDEN for token in history)
        assert seen == len(history) or self.window
        return text[:first] + tuple(text[first + i] if token == HIDDEN else token for i, token in enumerate(history))

    def moves(self) -> list[Move]:
        moves = self.pipeline_moves("draft")
        if self.steering:
            moves.append(("steering", self._hear_steering))
        return moves

    def _hear_steering(self) -> None:
        message = self.steering.popleft()
        match message:
            case BeginDrafting(request=request, prompt=prompt):
                self.text[request] = prompt
                self.begun[request] = message
                self.look_ahead[request] = message.look_ahead
            case Accepted(request, epoch, tokens, look_ahead):
                self.text[request] += tokens
                self.look_ahead[request] = look_ahead
                assert len(self.text[request]) == len(self.begun[request].prompt) + epoch
            case Shared(request, epoch, tokens):
                for one in tokens:
                    self.paths[request, one.number] = (*self.text[request], *one.path)
            case EndDrafting(request):
                del self.text[request]
        self.last_text |= self.text
        self.handle(message)

    def handle(self, event: DraftEvent) -> None:
        super().handle(event)
        for run in self.pipeline.live:
            assert any(self._lives(*row) for row in self.pipeline.rows_of[run.id]), "a run that nobody needs goes on"

    def _lives(self, request: int, history: Tokens) -> bool:
        text = self.text.get(request)
        return text is not None and history[: len(text)] == text[: len(history)]

    def _submitted(self, run: Run) -> None:
        speculating = [other for other in self.pipeline.live if self._draft_tokens(other)]
        self.pipeline.submit(run)
        if not run.rows:
            return
        for request, history in self.pipeline.rows_of[run.id]:
            assert self._lives(request, history), "a token that is known to be rejected"
            assert len(history) <= len(self.text[request]) + self.look_ahead[request] - 1, "deeper than allowed"
        if drafted := self._draft_tokens(run):
            assert not speculating, "two runs of draft tokens in flight"
            n_drafted = collections.Counter(row.request for row in drafted)
            assert all(n <= self.begun[request].speculation.draft_rows for request, n in n_drafted.items())
        for row in run.rows:
            assert (
                row.logits_request == -1
                or run.logits_requests[row.logits_request].banned == self.begun[row.request].banned
            )

    def _draft_tokens(self, run: Run) -> list[Row]:
        return [row for row in run.rows if row.pos + self._first(row.request) >= len(self.text.get(row.request, ()))]

    def _sent(self, batch: MicroBatch) -> None:
        speculation = self.begun[batch.request].speculation
        n = sum(expansion.n for expansion in batch.expansions)
        assert n <= speculation.most_drafted
        assert n or batch.complete, "nothing in it"
        n_text = len(self.begun[batch.request].prompt) + batch.epoch
        text = self.text[batch.request][:n_text]
        assert len(text) == n_text
        for expansion in batch.expansions:
            most = len(expansion.candidates) if speculation.is_best_first else speculation.n_parallel
            assert 0 < expansion.n <= most
            path = text if expansion.parent == ROOT else self.paths[batch.request, expansion.parent]
            assert path[: len(text)] == text, "a draft token that is known to be rejected"
            tokens = [token for token, _ in expansion.candidates]
            begin = self.begun[batch.request]
            if begin.adjustments is None and (begin.drawing is None or not speculation.is_best_first):
                assert tokens == [token for token, _ in self.model.candidates(path, len(tokens))]
            else:  # in the order that their random number and penalties give them
                best = dict(self.model.candidates(path, N_CANDIDATES + N_MORE))
                assert len(set(tokens).intersection(best)) == len(tokens)
            for i, (token, _) in enumerate(expansion.candidates[: expansion.n]):
                self.paths[batch.request, expansion.first + i] = (*path, token)
        named = [(number, path) for (request, number), path in self.paths.items() if request == batch.request]
        paths = [path for number, path in named if number > 0 and is_below(path, text)]
        leaves = set(paths) - {path[:-1] for path in paths}
        assert len(paths) <= 256 if speculation.is_best_first else len(leaves) <= speculation.n_parallel
        self.batches.append(batch)

    def check_empty(self) -> None:
        assert not self.steering
        assert not self.batches
        if not self.begun:
            return  # what was restored stays where it is until the first request
        self.pipeline.check_empty(self.drafter._prefixes.kept)
        saved = [save.request for save in self.pipeline.saved]
        assert sorted(saved) == sorted(begin.request for begin in self.begun.values() if begin.saves != "nothing")


FakeGrammar = Callable[[int, Tokens, int], Sequence[tuple[int, float]]]
"""What is forced in a request, after all tokens so far, of which so many are its prompt."""


class TextDraft:
    """A drafter of the core that has no model: the scheduler asks it."""

    def __init__(self, id: int, grammar: FakeGrammar | None = None) -> None:
        """`grammar`: None makes it an n-gram drafter."""
        self.id = id
        self.drafter = Ngrams(id, most_tokens=40) if grammar is None else GrammarDrafter(id)
        self.joins = self.drafter.joins
        self._grammar = grammar
        self.steering: collections.deque[DrafterMessage] = collections.deque()
        self.batches: collections.deque[MicroBatch] = collections.deque()
        self.answered: Callable[[MicroBatch], None] | None = None
        """Called with each answer."""
        self._begun: dict[int, BeginDrafting] = {}
        self._text: dict[int, Tokens] = {}
        self._paths: dict[int, dict[int, Tokens]] = {}
        self._shared: dict[int, dict[int, Tokens]] = {}
        self._look_ahead: dict[int, int] = {}

    def fits(self, path: Tokens, token: int) -> bool:
        return True

    def forced(self, path: Tokens) -> Sequence[tuple[int, float]]:
        """Of the request that is answered."""
        assert self._grammar is not None
        return self._grammar(self._asked, self._text[self._asked] + path, len(self._begun[self._asked].prompt))

    def answer(self, message: DrafterMessage, _: DraftCheck | None = None) -> list[MicroBatch]:
        self._asked = message.request
        match message:
            case BeginDrafting(request=request, prompt=prompt, look_ahead=look_ahead):
                self._begun[request], self._text[request], self._paths[request] = message, prompt, {}
                self._shared[request], self._look_ahead[request] = {}, look_ahead
            case Shared(request, epoch, shared):
                assert self.joins
                assert epoch == len(self._text[request]) - len(self._begun[request].prompt)
                self._shared[request] |= {token.number: self._text[request] + token.path for token in shared}
            case Accepted(request, epoch, tokens, look_ahead):
                self._text[request] += tokens
                self._look_ahead[request] = look_ahead
                assert len(self._text[request]) == len(self._begun[request].prompt) + epoch
            case EndDrafting(request):
                del self._begun[request]
        batches = self.drafter.answer(message, self)
        self.drafter.validate()
        for batch in batches:
            self._check(batch)
            if self.answered is not None:
                self.answered(batch)
        return batches

    def _check(self, batch: MicroBatch) -> None:
        look_ahead = self._look_ahead[batch.request]
        begin, text, paths = self._begun[batch.request], self._text[batch.request], self._paths[batch.request]
        assert batch.complete
        assert batch.epoch == len(text) - len(begin.prompt)
        deepest = len(text) + min(look_ahead, begin.n_left - batch.epoch - 1)
        if not self.joins:
            assert sum(expansion.n for expansion in batch.expansions) <= max(begin.speculation.most_drafted, look_ahead)
        for expansion in batch.expansions:
            others = self._shared[batch.request]
            path = text if expansion.parent == ROOT else (paths | others)[expansion.parent]
            assert path[: len(text)] == text, "a draft token that is known to be rejected"
            assert 0 < expansion.n == len(expansion.candidates)
            assert expansion.n == 1 or begin.speculation.is_best_first
            for number, (token, prob) in enumerate(expansion.candidates, expansion.first):
                assert begin.speculation.p_accept <= prob < 1
                assert token not in begin.ends
                assert token not in begin.banned
                assert number not in paths
                assert (*path, token) not in paths.values(), "the same token twice"
                paths[number] = (*path, token)
                assert len(paths[number]) <= deepest

    def moves(self) -> list[Move]:
        return []

    def check_empty(self) -> None:
        assert not self._begun
        assert not self.drafter._requests


class Adversary:
    """A draft that sends any tree: wrong tokens, old epochs, unknown parents, the same token twice, end tokens."""

    def __init__(self, target: FakeModel, agreement: float, seed: int, id: int = 0) -> None:
        self.id = id
        self.target, self.agreement = target, agreement
        self.random = random.Random(seed)
        self.steering: collections.deque[DrafterMessage] = collections.deque()
        self.batches: collections.deque[MicroBatch] = collections.deque()
        self._begun: dict[int, BeginDrafting] = {}
        self._text: dict[int, Tokens] = {}
        self._paths: dict[int, dict[int, Tokens]] = {}
        """Request -> number of a draft token -> all tokens up to it."""
        self._to_send: dict[int, int] = {}

    def moves(self) -> list[Move]:
        moves: list[Move] = [("steering", self._hear)] if self.steering else []
        moves += [("draft", functools.partial(self._draft_token, request)) for request in self._to_send]
        return moves

    def _hear(self) -> None:
        match self.steering.popleft():
            case BeginDrafting(request=request, prompt=prompt) as begin:
                self._begun[request], self._text[request], self._paths[request] = begin, prompt, {}
                self._to_send[request] = self.random.randint(1, 5)
            case Accepted(request, _, tokens, _):
                self._text[request] += tokens
                self._to_send[request] = self.random.randint(1, 5)
            case EndDrafting(request):
                self._to_send.pop(request, None)

    def _draft_token(self, request: int) -> None:
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
        self.batches.append(
            MicroBatch(
                request=request,
                epoch=epoch,
                expansions=tuple(expansions),
                complete=complete,
                drafter=self.id,
                block=self.random.choice(tuple(BlockOf)),
            )
        )

    def _expand(self, request: int, text: Tokens) -> Expansion:
        paths = self._paths[request]
        live = [draft_token for draft_token, path in paths.items() if path[: len(text)] == text][-12:]
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
        is_known = parent == ROOT or parent in paths
        named = [number for number, own in paths.items() if is_known and own[:-1] == path]
        again = tuple((number, self.random.random()) for number in (*named[-2:], self.random.randint(-3, 0)))
        return Expansion(parent, first, n, tuple((token, self.random.random()) for token in tokens), again)

    def check_empty(self) -> None:
        assert not self.steering
        assert not self.batches


class Echo(Adversary):
    """One that names the same few tokens with the same probabilities as others of its kind, again and again, whether or
    not it named them before: mistakes that coincide, and numbers for one token that never end."""

    def _expand(self, request: int, text: Tokens) -> Expansion:
        paths, n_prompt = self._paths[request], len(self._begun[request].prompt)
        chain = [number for number, path in paths.items() if path[: len(text)] == text][-4:]
        parent = self.random.choice([ROOT, *chain])
        path = text if parent == ROOT else paths[parent]
        right = self.target.next(request, path, n_prompt)
        wrong = (right + 1) % self.target.n_vocab
        roll = chance("echo", self.target.seed, path) % 100
        tokens = (right, wrong) if roll < 100 * self.agreement else (wrong, right)
        first = len(paths) + 1
        paths |= {first + i: (*path, token) for i, token in enumerate(tokens)}
        return Expansion(parent, first, 2, ((tokens[0], 1.0), (tokens[1], 0.0)))


class Silent(Adversary):
    """One that says of each root that it has nothing, and sends no draft token ever."""

    def _draft_token(self, request: int) -> None:
        del self._to_send[request]
        epoch = len(self._text[request]) - len(self._begun[request].prompt)
        self.batches.append(MicroBatch(request=request, epoch=epoch, expansions=(), complete=True, drafter=self.id))


AnyDraft = RealDraft | TextDraft | Adversary
