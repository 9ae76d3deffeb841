"""A draft head's drafter, driven by itself: the target as the drafter sees it, and what must hold of the drafter's runs
and draft tokens."""

from __future__ import annotations

import collections
import functools
import math
import random
from collections.abc import Callable

from msgspec import structs

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, DrafterMessage, EndDrafting, MicroBatch
from ggpipe.core.drafters.base import DraftAction, DraftPipeline, ForgetStates, StatesArrived
from ggpipe.core.drafters.eagle import EagleHead
from ggpipe.core.drafters.mtp import MtpLayers
from ggpipe.core.messages import LogitsRequest, Row, RowLogits, Run, StateRef
from ggpipe.core.request import Limits
from support.drafter_driver import DrafterDriver
from support.fake_drafts import FakeDraftModel
from support.fake_model import FakeModel, Tokens
from support.fake_pipeline import FakePipeline
from support.requests import ADJUSTED, DRAWN

HORIZON = 8
MODES = (
    SpeculationConfig(),
    SpeculationConfig(policy="thresholds", n_draft=3),
    SpeculationConfig(mode="speculative", n_draft=3),
    SpeculationConfig(policy="thresholds", n_parallel=2, p_split=0.01),
)


class Target:
    """The target and the head of its pipeline, as the drafter sees them: runs, states that arrive, accepted tokens."""

    def __init__(self) -> None:
        self.text: dict[int, Tokens] = {}
        """Of each request, as far as it is accepted."""
        self.n_prompt: dict[int, int] = {}
        self.rows: dict[tuple[int, int], tuple[int, int]] = {}
        """(request, position) -> run and row."""
        self.states: collections.deque[StatesArrived] = collections.deque()
        self.messages: collections.deque[DrafterMessage] = collections.deque()
        self.next_run = 1

    def begin(
        self, request: int, prompt: Tokens, n_cached: int, speculation: SpeculationConfig, look_ahead: int
    ) -> None:
        self.text[request], self.n_prompt[request] = prompt, len(prompt)
        begin = BeginDrafting(
            request=request, prompt=prompt, n_left=40, look_ahead=look_ahead, ends=frozenset(), banned=(),
            speculation=speculation, drawing=DRAWN if request % 2 else None,
            adjustments=ADJUSTED if request % 3 else None,
        )  # fmt: skip
        self.messages.append(begin)
        for at in range(n_cached, len(prompt), 3):
            self.run(request, range(at, min(at + 3, len(prompt))))

    def run(self, request: int, positions: range) -> None:
        """A run of these positions of a text, with a rejected row before them."""
        rows = [(request, positions[0] + 50), *((request, position) for position in positions)]
        self.rows |= {row: (self.next_run, i) for i, row in enumerate(rows)}
        self.states.append(StatesArrived(self.next_run, tuple(rows)))
        self.next_run += 1

    def accept(self, request: int, tokens: Tokens, look_ahead: int) -> None:
        """The target adds tokens to the text. All but the last one were in flight; that one goes in now."""
        first = len(self.text[request])
        if len(tokens) > 1:
            self.run(request, range(first, first + len(tokens) - 1))
        sampled_from = tuple(self.rows[request, first + i - 1] for i in range(len(tokens)))
        self.text[request] += tokens
        epoch = len(self.text[request]) - self.n_prompt[request]
        n_drawn = epoch + epoch // 5  # now and then, a token does not fit a grammar
        self.messages.append(Accepted(request, epoch, tokens, look_ahead, rows=sampled_from, n_drawn=n_drawn))
        self.run(request, range(len(self.text[request]) - 1, len(self.text[request])))


class Driven(DrafterDriver):
    """The drafter over a fake pipeline."""

    def __init__(
        self, target: Target, model: FakeDraftModel, head: type[EagleHead] = EagleHead, knows_paths: bool = False
    ) -> None:
        """`knows_paths`: a block says of each position what comes after any candidate of the one before."""
        limits = Limits(n_ctx=200, n_batch=6, n_ubatch=6, n_in_flight=2, n_seq=24, n_requests=2, n_prefixes=2)
        self.target, self.model, self.knows_paths = target, model, knows_paths
        super().__init__(
            head(3, DraftPipeline(limits=limits, horizon=HORIZON)), FakePipeline(1, limits, 6, self._answer)
        )
        self.known: dict[int, Tokens] = {}
        """Of each request, its text as the drafter was told."""
        self.arrived: set[int] = set()
        """Runs whose states are there."""
        self.numbers: dict[tuple[int, int], Tokens] = {}
        self.sent: list[MicroBatch] = []

    def _answer(self, i: int, row: Row, want: LogitsRequest, history: Tokens) -> RowLogits:
        block = [self._say(i, history[-1:], want.n)]
        for _ in range(want.n_positions - 1):  # each after the most probable ones before
            assert block[-1].ids is not None
            said = self._say(i, block[-1].ids[:1], want.n)
            if self.knows_paths:
                after = [(token, self._say(i, (token,), want.n)) for token in range(self.model.target.n_vocab)]
                said = structs.replace(said, after=tuple(after))
            block.append(said)
        return structs.replace(block[0], later=tuple(block[1:]))

    def _say(self, i: int, last: Tokens, n: int) -> RowLogits:
        best = self.model.candidates(last, n)
        return RowLogits(i, tuple(token for token, _ in best), tuple(math.log(prob) for _, prob in best), 0.0)

    def moves(self) -> list[tuple[str, Callable[[], None]]]:
        moves = self.pipeline_moves("head")
        if self.target.messages:
            moves.append(("message", self.hear))
        before: set[int] = set()  # runs of different requests may overtake each other
        for states in self.target.states:
            requests = {request for request, _ in states.rows}
            if before.isdisjoint(requests):
                moves.append(("states", functools.partial(self.arrive, states)))
            before |= requests
        return moves

    def hear(self) -> None:
        message = self.target.messages.popleft()
        match message:
            case BeginDrafting(request=request, prompt=prompt):
                self.known[request] = prompt
            case Accepted(request, tokens=tokens):
                self.known[request] += tokens
            case EndDrafting(request):
                del self.known[request]
        self.handle(message)

    def arrive(self, event: StatesArrived) -> None:
        self.target.states.remove(event)
        self.arrived.add(event.run)
        self.handle(event)

    def _act(self, action: DraftAction) -> None:
        super()._act(action)
        if isinstance(action, ForgetStates):
            forgotten = {run for run in self.arrived if run < action.before}
            assert forgotten
            self.arrived -= forgotten
            read = [row.state for run in self.pipeline.in_flight.values() for row in run.rows]
            assert all(state.run not in forgotten for state in read if state and state.is_target), "still to be read"

    def _submitted(self, run: Run) -> None:
        self.pipeline.run_of.clear()  # what was drafted is computed again when it is accepted
        self.pipeline.submit(run)
        for row, (request, history) in zip(run.rows, self.pipeline.rows_of[run.id], strict=True):
            text = self.known[request]
            shift = int(self.target.n_prompt[request] > 1 and not isinstance(self.drafter, MtpLayers))
            if row.pos < len(text) - shift:
                assert history == text[shift : shift + row.pos + 1]
                self._reads_the_targets(row, request, row.pos + shift - 1)
            else:
                assert history[: len(text) - shift] == text[shift:], "a token that is known to be rejected"
                assert row.state is not None
                assert not row.state.is_target
                assert self.pipeline.rows_of[row.state.run][row.state.row] == (request, history[:-1])
            assert row.pos - (len(text) - 1 - shift) <= HORIZON, "beyond its horizon"

    def _reads_the_targets(self, row: Row, request: int, position: int) -> None:
        place = self.target.rows.get((request, position))
        if place is None:  # cached, or in front of the text
            assert row.state is None
            return
        assert row.state == StateRef(*place, is_target=True)
        assert place[0] in self.arrived, "its states are not there"

    def _sent(self, batch: MicroBatch) -> None:
        assert batch.drafter == 3
        assert batch.expansions or batch.complete
        self.sent.append(batch)
        prompt = self.target.n_prompt[batch.request]
        text = self.known[batch.request]
        assert batch.epoch == len(text) - prompt
        for expansion in batch.expansions:
            path = text if expansion.parent == ROOT else self.numbers[batch.request, expansion.parent]
            assert path[: len(text)] == text
            for i, (token, _) in enumerate(expansion.candidates[: expansion.n]):
                assert (*path, token) not in [p for (r, _), p in self.numbers.items() if r == batch.request], "twice"
                self.numbers[batch.request, expansion.first + i] = (*path, token)
            for number, prob in expansion.again:
                assert self.numbers[batch.request, number][:-1] == path
                assert 0 <= prob <= 1


def begun(*prompt: int, look_ahead: int = 20, head: type[EagleHead] = EagleHead, knows_paths: bool = False) -> Driven:
    """A drafter that is told of a request with this prompt."""
    driven = Driven(Target(), FakeDraftModel(FakeModel(9, 1), 1.0), head)
    driven.target.begin(1, prompt, 0, SpeculationConfig(policy="thresholds"), look_ahead)
    return driven


def play_out(driven: Driven) -> None:
    """All that can happen, in one order."""
    while moves := driven.moves():
        moves[0][1]()


def check_any_order(
    head: type[EagleHead], speculation: SpeculationConfig, seed: int, agreement: float, knows_paths: bool = False
) -> None:
    """Two requests, of which messages, states and results come in some order. `knows_paths`: as for `Driven`."""
    chances = random.Random(seed)
    target = Target()
    driven = Driven(target, FakeDraftModel(FakeModel(9, seed), agreement), head, knows_paths)

    def play(n: int) -> None:
        for _ in range(n):
            if not (moves := driven.moves()):
                return
            chances.choice(moves)[1]()

    prompts = {request: tuple(chances.choices(range(1, 9), k=chances.randint(1, 9))) for request in (1, 2)}
    for request, prompt in prompts.items():
        n_cached = chances.randrange(len(prompt))
        target.begin(request, prompt, n_cached, speculation, chances.choice([0, 3, 20]))
        while target.messages:  # it knows of a request before the target computes anything for it
            driven.hear()
        play(chances.randrange(20))
    for _ in range(10):
        request = chances.choice([1, 2])
        text = target.text[request]
        tokens: list[int] = []
        for _ in range(chances.randint(1, 3)):
            tokens.append(chances.choice(driven.model.candidates((*text, *tokens)[-1:], 1 + chances.randrange(2)))[0])
        target.accept(request, tuple(tokens), chances.choice([3, 20]))
        play(chances.randrange(30))
    play(10_000)
    assert not driven.moves(), "it comes to an end"
    for request in (1, 2):
        epoch = len(target.text[request]) - target.n_prompt[request]
        ends = [batch.complete for batch in driven.sent if (batch.request, batch.epoch) == (request, epoch)]
        assert any(ends), "the root of the pipeline may wait for that"
        target.messages.append(EndDrafting(request))
        play(10_000)
    assert not driven.arrived, "all states are forgotten"
    driven.pipeline.check_empty(driven.drafter._prefixes.kept)
