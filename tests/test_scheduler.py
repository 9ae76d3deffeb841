"""The scheduler against fake pipelines and drafts whose messages take as long as hypothesis likes."""

from __future__ import annotations

import collections
import functools
import os
import random
from dataclasses import dataclass, field

from fakes import END, Adversary, FakeDraftModel, FakeModel, FakePipeline, Move, RealDraft, Tokens, is_below
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from ggpipe.config import SpeculationConfig
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
from ggpipe.core.messages import Row, RowLogits, Run, Want, WantKind
from ggpipe.core.scheduler import Scheduler

N_EXAMPLES = int(os.environ.get("GGPIPE_EXAMPLES", "200"))


@dataclass
class Seen:
    """What the head did for one request."""

    request: Request
    text: list[int] = field(default_factory=list)
    n_sampled: int = 0
    n_guessed: int = 0
    """Tokens that were in the pipeline before they were drawn."""
    runs: list[Run] = field(default_factory=list)
    told: list[int] = field(default_factory=list)
    """Tokens that the draft was told."""
    stopped: bool = False
    ended: bool = False
    """The end token was drawn."""
    finish: Finish | None = None

    @property
    def tokens(self) -> Tokens:
        return (*self.request.prompt, *self.text)

    def lives(self, history: Tokens) -> bool:
        """It is part of the text, or may become so."""
        n = min(len(history), len(self.tokens))
        return history[:n] == self.tokens[:n]


class Head:
    """A scheduler, a pipeline, a draft, and all that must hold between them. Nothing moves by itself."""

    def __init__(self, limits: Limits, n_stages: int, model: FakeModel, draft: RealDraft | Adversary | None) -> None:
        self.limits, self.model, self.draft = limits, model, draft
        self.scheduler = Scheduler(limits)
        n_rows = min(limits.n_batch, limits.n_ubatch)
        self.pipeline = FakePipeline(n_stages, limits.n_ctx, limits.n_seq, n_rows, self._answer)
        self.seen: dict[int, Seen] = {}
        self.to_sample: collections.deque[Sample] = collections.deque()
        self.now = 0.0

    def _answer(self, i: int, row: Row, want: Want, history: Tokens) -> RowLogits:
        ids = self.model.ranking(history, want.n)
        return RowLogits(i, ids, want.n, 0.0)

    # What the outside does

    def arrive(self, request: Request) -> None:
        seen = self.seen[request.id] = Seen(request)
        self.handle(Arrived(request, self._want(seen)))

    def stop(self, request: int) -> None:
        seen = self.seen.get(request)
        if seen is not None and seen.finish is None and (not self._is_over(seen) or seen.request.n_predict == 0):
            seen.stopped = True
        self.handle(Stop(request))

    def moves(self) -> list[Move]:
        """All that could happen next."""
        moves = self.pipeline.moves("target", self._hear_result)
        if self.to_sample:
            moves.append(("sample", self._sample))
        if self.draft is not None:
            moves += self.draft.moves()
            if self.draft.batches:
                moves.append(("guesses", self._hear_guesses))
        return moves

    def drain(self) -> None:
        """Let everything end, the youngest thing first."""
        while moves := self.moves():
            moves[-1][1]()

    def _hear_result(self) -> None:
        self.handle(RunEnded(*self.pipeline.take_result()))

    def _hear_guesses(self) -> None:
        assert self.draft is not None
        batch = self.draft.batches.popleft()
        self.handle(Guessed(batch))
        active = self.scheduler._active.get(batch.request)
        if active is None or active.ending is not None or isinstance(self.draft, Adversary):
            return
        tokens = self.seen[batch.request].tokens
        for expansion in batch.expansions:
            for guess in range(expansion.first, expansion.first + expansion.n):
                if is_below(path := self.draft.paths[batch.request, guess], tokens):
                    node = active.tree.root
                    for token in path[len(tokens) :]:
                        node = node.children[token]

    def _sample(self) -> None:
        sample = self.to_sample.popleft()
        seen = self.seen[sample.request]
        assert sample.row.ids is not None
        assert sample.row.logits >= self._want(seen).n, "fewer logits than sampling takes"
        token = sample.row.ids[self.model.rank(sample.request, seen.n_sampled)]
        seen.n_sampled += 1
        seen.ended = seen.ended or (token == END and not seen.stopped)
        self.handle(Sampled(sample.request, token, token == END, self._want(seen)))

    def _want(self, seen: Seen) -> Want:
        return Want(WantKind.TOP, 3 + seen.n_sampled * seen.request.want_grows)

    # What must hold

    def handle(self, event: Event) -> None:
        self.now += 0.001
        for action in self.scheduler.handle(event, self.now):
            self._act(action)
        for seen in self.seen.values():
            self._check_request(seen)

    def _act(self, action: Action) -> None:
        match action:
            case Submit(run):
                self._submitted(run)
            case Sample(request):
                assert not self._is_over(self.seen[request]) or self.seen[request].request.n_predict == 0
                assert all(sample.request != request for sample in self.to_sample)
                self.to_sample.append(action)
            case Emit(request, token, guessed):
                seen = self.seen[request]
                assert not self._is_over(seen)
                seen.text.append(token)
                assert guessed == ((request, seen.tokens) in self.pipeline.run_of)
                seen.n_guessed += guessed
            case Cancel(runs):
                self.pipeline.cancel(runs)
                for run in runs:
                    (request,) = {row.request for row in self.pipeline.in_flight[run].rows}
                    assert self._is_over(self.seen[request]) or self._is_dead(run)
                    assert self._is_over(self.seen[request]) or self.seen[request].request.speculation.cancel
            case Steer(message):
                assert self.draft is not None
                self.draft.steering.append(message)
            case Finished(request, reason):
                self._finished(self.seen[request], reason)

    def _submitted(self, run: Run) -> None:
        self.pipeline.submit(run)
        if not run.rows:
            assert all(seen.finish is not None for seen in self.seen.values())
            return
        (request,) = {row.request for row in run.rows}
        seen = self.seen[request]
        seen.runs.append(run)
        assert not self._is_over(seen) or not seen.text
        assert run.epoch == len(seen.text)
        histories = [history for _, history in self.pipeline.rows_of[run.id]]
        assert all(seen.lives(history) for history in histories), "a token that is known to be wrong"
        guesses = [history for history in histories if len(history) > len(seen.tokens)]
        assert len(guesses) <= seen.request.speculation.n_draft
        for row, history in zip(run.rows, histories, strict=True):
            assert (row.want >= 0) == (len(history) >= len(seen.request.prompt))
        if seen.request.n_predict > 0:
            assert len(histories[-1]) < len(seen.request.prompt) + seen.request.n_predict
        fresh = bool(seen.text) and seen.tokens in histories
        assert fresh or len(self.pipeline.live) <= self.limits.n_in_flight, "too much in flight"

    def _is_over(self, seen: Seen) -> bool:
        full = len(seen.tokens) > self.limits.n_ctx
        return seen.stopped or seen.ended or full or len(seen.text) == seen.request.n_predict

    def _is_dead(self, run: int) -> bool:
        return not any(self.seen[request].lives(history) for request, history in self.pipeline.rows_of[run])

    def _check_request(self, seen: Seen) -> None:
        if seen.finish is not None or seen.request not in (a.request for a in self.scheduler._active.values()):
            return
        counters = self.scheduler.counters(seen.request.id)
        assert counters.accepted_tokens == seen.n_guessed
        assert counters.accepted_tokens <= counters.submitted_tokens <= counters.drafted_tokens
        assert counters.verified_runs <= counters.speculative_runs
        assert counters.cancelled_tokens <= counters.submitted_tokens
        if seen.request.speculation.cancel and not self._is_over(seen):
            kept: list[int] = []
            for run in reversed(self.pipeline.live):
                if run.rows[0].request == seen.request.id:
                    needed = any(self.pipeline.depends(other, [run.id]) for other in kept)
                    assert needed or not self._is_dead(run.id), "a hopeless run goes on"
                    kept.append(run.id)

    def _finished(self, seen: Seen, reason: Finish) -> None:
        assert seen.finish is None
        seen.finish = reason
        flying = [row for run in self.pipeline.in_flight.values() for row in run.rows]
        assert all(row.request != seen.request.id for row in flying)
        request = seen.request
        text, why = self.model.text(request.id, request.prompt, request.n_predict, self.limits.n_ctx)
        if reason is Finish.STOPPED:
            assert seen.stopped
            assert seen.text == text[: len(seen.text)]
        else:
            assert not seen.stopped or request.n_predict == 0
            assert (seen.text, reason) == (text, why)
            assert seen.n_sampled == len(text) + (why is Finish.END_OF_TEXT)

    def check_end(self) -> None:
        """Nothing can happen any more."""
        assert all(seen.finish is not None for seen in self.seen.values()), "a request is stuck"
        assert not self.to_sample
        self.pipeline.check_empty()
        assert len(self.scheduler._ids) == self.limits.n_seq
        assert self.scheduler._ids.kept == self.limits.n_requests
        if self.draft is not None:
            self.draft.check_empty()


# Whole requests, in any order of events


@dataclass(frozen=True)
class Scenario:
    limits: Limits
    draft_limits: Limits
    n_stages: int
    n_draft_stages: int
    model: FakeModel
    agreement: float
    adversary: bool
    requests: list[Request]
    stops: dict[int, int]
    """Request -> moves until it is stopped."""
    pace: dict[str, int]
    """How much more often than others some things happen."""
    seed: int

    def open(self) -> Head:
        draft: RealDraft | Adversary | None = Adversary(self.model, self.agreement, self.seed)
        if not self.adversary:
            draft_model = FakeDraftModel(self.model, self.agreement)
            draft = RealDraft(self.draft_limits, self.n_draft_stages, draft_model)
        return Head(self.limits, self.n_stages, self.model, draft)


SPECULATIONS = st.builds(
    SpeculationConfig,
    mode=st.sampled_from(["async", "async", "speculative", "iterative"]),
    n_draft=st.integers(1, 6),
    n_min=st.integers(0, 1),
    p_accept=st.sampled_from([0.0, 0.0, 0.3, 0.8]),
    p_split=st.sampled_from([0.01, 0.1, 0.5]),
    p_recovery=st.sampled_from([0.0, 0.2]),
    p_decay=st.sampled_from([0.0, 0.05, 0.3]),
    n_parallel=st.integers(1, 4),
    cancel=st.booleans(),
    continuous=st.booleans(),
)


PACES = st.fixed_dictionaries(
    {
        name: st.sampled_from([1, 5, 50])
        for name in ("target stage", "target cancel", "target result", "sample", "draft", "guesses", "steering")
    }
)


@st.composite
def requests(
    draw: st.DrawFn, number: int, speculations: st.SearchStrategy[SpeculationConfig], n_predict: tuple[int, ...]
) -> Request:
    n = draw(st.integers(1, 14))
    return Request(
        number,
        tuple(range(number * 100, number * 100 + n)),
        draw(st.sampled_from(n_predict)),
        draw(speculations),
        draw(st.sampled_from([frozenset({END}), frozenset()])),
        want_grows=draw(st.booleans()),
    )


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Anything."""
    n_requests = draw(st.integers(1, 2))

    def limits(n_ctx: int) -> Limits:
        return Limits(
            n_ctx=n_ctx,
            n_batch=draw(st.sampled_from([1, 2, 5, 12, 12])),
            n_ubatch=draw(st.sampled_from([1, 2, 5, 12, 12])),
            n_in_flight=draw(st.integers(1, 5)),
            n_seq=draw(st.sampled_from([n_requests, 3, 5, 9])),
            n_requests=n_requests,
        )

    return Scenario(
        limits(draw(st.sampled_from([20, 30, 60, 60]))),
        limits(draw(st.sampled_from([15, 30, 60, 60]))),
        n_stages=draw(st.integers(1, 3)),
        n_draft_stages=draw(st.integers(1, 2)),
        model=FakeModel(draw(st.sampled_from([3, 20, 100, 1000, 1000])), draw(st.integers(0, 99)), draw(st.booleans())),
        agreement=draw(st.sampled_from([0.0, 0.5, 0.8, 0.9, 1.0])),
        adversary=draw(st.booleans()),
        requests=[draw(requests(i + 1, SPECULATIONS, (-1, 0, 1, 5, 15, 25))) for i in range(draw(st.integers(1, 3)))],
        stops=draw(st.dictionaries(st.integers(1, 3), st.integers(0, 200), max_size=1)),
        pace=draw(PACES),
        seed=draw(st.integers(0, 2**32)),
    )


@st.composite
def thickets(draw: st.DrawFn) -> Scenario:
    """Many branches in many small runs, and ids that are scarce."""
    speculations = st.builds(
        SpeculationConfig, mode=st.just("async"), n_draft=st.integers(1, 3), n_parallel=st.integers(2, 4)
    )
    n = draw(st.integers(1, 2))
    return Scenario(
        Limits(90, 12, 12, draw(st.integers(3, 6)), draw(st.integers(n, 12)), n),
        Limits(90, 12, 12, 2, draw(st.integers(n, 12)), n),
        n_stages=draw(st.integers(1, 3)),
        n_draft_stages=1,
        model=FakeModel(1000, draw(st.integers(0, 99)), draws=True),
        agreement=draw(st.sampled_from([0.5, 0.9])),
        adversary=draw(st.booleans()),
        requests=[draw(requests(i + 1, speculations, (4, 10, 15))) for i in range(n + 1)],
        stops={},
        pace=draw(PACES),
        seed=draw(st.integers(0, 2**32)),
    )


def play(scenario: Scenario) -> Head:
    """Let everything happen in an order that the seed and the paces say."""
    head, rng = scenario.open(), random.Random(scenario.seed)
    to_come = collections.deque(scenario.requests)
    stops = dict(scenario.stops)
    for n_moves in range(30_000):
        for request in [request for request, at in stops.items() if at == n_moves]:
            del stops[request]
            head.stop(request)
        moves = head.moves()
        if to_come:
            moves.append(("arrival", functools.partial(arrive_next, head, to_come)))
        if not moves:
            return head
        weights = [max((w for p, w in scenario.pace.items() if name.startswith(p)), default=1) for name, _ in moves]
        rng.choices(moves, weights)[0][1]()
    raise AssertionError("it never ends")


def arrive_next(head: Head, to_come: collections.deque[Request]) -> None:
    head.arrive(to_come.popleft())


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios())
def test_any_interleaving_gives_the_targets_own_text(scenario: Scenario) -> None:
    play(scenario).check_end()


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(thickets())
def test_branches_in_any_interleaving_give_the_targets_own_text(scenario: Scenario) -> None:
    play(scenario).check_end()
