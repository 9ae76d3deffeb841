"""The scheduler against fake pipelines and drafts whose messages take as long as hypothesis likes."""

from __future__ import annotations

import collections
import ctypes
import functools
import os
import random
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from fakes import END, Adversary, FakeDraftModel, FakeModel, FakePipeline, Move, RealDraft, Tokens, is_below
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from zoo import ggml_base, make, quiet

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
    Tick,
)
from ggpipe.core.messages import (
    ROOT,
    Accepted,
    Expansion,
    KvKind,
    KvOp,
    MicroBatch,
    Row,
    RowLogits,
    Run,
    Want,
    WantKind,
)
from ggpipe.core.scheduler import Scheduler
from ggpipe.core.serving import cut_prompt

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
        moves: list[Move] = []
        if self.scheduler.wake_at is not None:
            moves.append(("tick", self._tick))
        moves += self.pipeline.moves("target", self._hear_result)
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
        run, rows = self.pipeline.take_result()
        seconds = 0.01 * (1 + run * 7919 % 13)  # times that say anything of run lengths
        self.handle(RunEnded(run, rows, seconds, seconds * (1 + run % 4)))

    def _tick(self) -> None:
        assert self.scheduler.wake_at is not None
        self.now = max(self.now, self.scheduler.wake_at)
        self.handle(Tick())

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
                for run_id in runs:
                    (request,) = {row.request for row in self.pipeline.in_flight[run_id].rows}
                    seen = self.seen[request]
                    assert self._is_over(seen) or (seen.request.speculation.cancel and self._is_dead(run_id))
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
        by_lead = counters.by_lead
        assert all(lead > 0 and accepted <= submitted for lead, (submitted, accepted) in by_lead.items())
        assert sum(submitted for submitted, _ in by_lead.values()) == counters.submitted_tokens
        assert sum(accepted for _, accepted in by_lead.values()) == counters.accepted_tokens
        assert sum(counters.wrong_rows.values()) <= counters.submitted_tokens - counters.accepted_tokens
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
        lengths = [n for n in (sum(row.pos < len(request.prompt) for row in run.rows) for run in seen.runs) if n]
        expected = cut_as_libllama(len(request.prompt), self.limits.n_batch, self.limits.n_ubatch)
        assert lengths == (expected[: len(lengths)] if seen.stopped else expected)

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


SPECULATIONS = st.sampled_from([(1, 0), (1, 1), (2, 1), (4, 0), (4, 3), (6, 0)]).flatmap(
    lambda sizes: speculations(*sizes)
)


def speculations(n_draft: int, n_min: int) -> st.SearchStrategy[SpeculationConfig]:
    return st.builds(
        SpeculationConfig,
        mode=st.sampled_from(["async", "async", "speculative", "iterative"]),
        n_draft=st.just(n_draft),
        n_min=st.just(n_min),
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


@settings(max_examples=N_EXAMPLES, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(scenarios(), st.integers(1, 30))
def test_a_chain_that_is_always_right_moves_no_cells(scenario: Scenario, n_predict: int) -> None:
    (first, *_), limits = scenario.requests, replace(scenario.limits, n_ctx=60)
    request = replace(first, n_predict=n_predict, speculation=replace(first.speculation, n_parallel=1))
    head = play(
        replace(
            scenario,
            limits=limits,
            model=replace(scenario.model, draws=False),
            agreement=1.0,
            adversary=False,
            requests=[request],
            stops={},
        )
    )
    assert all(run.ops == () for run in head.seen[1].runs)


# Prompts


def cut_as_libllama(n_tokens: int, n_batch: int, n_ubatch: int) -> list[int]:
    """llama.cpp's tools feed `n_batch` tokens to llama_decode, which computes `n_ubatch` at a time."""
    lengths = []
    while n_tokens > 0:
        batch = min(n_tokens, n_batch)
        n_tokens -= batch
        while batch > 0:
            lengths.append(min(batch, n_ubatch))
            batch -= lengths[-1]
    return lengths


@settings(max_examples=300)
@given(st.integers(0, 300), st.integers(1, 100), st.integers(1, 100))
@example(0, 1, 1)
@example(2049, 2048, 512)
def test_chunk_borders_are_libllamas(n_tokens: int, n_batch: int, n_ubatch: int) -> None:
    prompt = tuple(range(n_tokens))
    chunks = cut_prompt(prompt, n_batch, n_ubatch)
    assert [len(chunk) for chunk in chunks] == cut_as_libllama(n_tokens, n_batch, n_ubatch)
    assert sum(chunks, ()) == prompt


@pytest.mark.parametrize(("n_tokens", "n_batch", "n_ubatch"), [(70, 32, 12), (70, 64, 64), (33, 512, 16), (20, 8, 16)])
def test_libllama_cuts_there_itself(n_tokens: int, n_batch: int, n_ubatch: int, tmp_path: Path) -> None:
    """Seen from inside: how many rows enter the first layer, each time."""
    quiet()
    path = make("llama-tied", tmp_path / "model.gguf")
    model = llama_cpp.llama_model_load_from_file(os.fsencode(path), llama_cpp.llama_model_default_params())
    assert model is not None
    seen: list[int] = []

    @llama_cpp.ggml_backend_sched_eval_callback  # type: ignore[untyped-decorator]
    def watch(tensor: int, ask: bool, _data: object) -> bool:
        if ask and ggml_base().ggml_get_name(tensor) == b"attn_norm-0":
            seen.append(ggml_base().ggml_nrows(tensor))
        return not ask

    params = llama_cpp.llama_context_default_params()
    params.n_ctx, params.n_batch, params.n_ubatch = 256, n_batch, n_ubatch
    params.n_threads = params.n_threads_batch = 1
    params.kv_unified = True
    params.cb_eval = watch
    context = llama_cpp.llama_init_from_model(model, params)
    assert context is not None
    seen.clear()  # the context was warmed up
    for start in range(0, n_tokens, n_batch):
        tokens = range(5 + start, 5 + min(start + n_batch, n_tokens))
        array = (ctypes.c_int32 * len(tokens))(*tokens)
        assert llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(array, len(tokens))) == 0
    llama_cpp.llama_free(context)
    llama_cpp.llama_model_free(model)
    assert seen == [len(chunk) for chunk in cut_prompt(tuple(range(n_tokens)), n_batch, n_ubatch)]


@settings(max_examples=100, deadline=None)
@given(st.integers(1, 39), st.integers(1, 12), st.integers(1, 12))
def test_chunks_do_not_depend_on_what_is_in_flight(n: int, n_batch: int, n_ubatch: int) -> None:
    def rows(n_in_flight: int) -> list[tuple[Row, ...]]:
        head = opened(n_batch=n_batch, n_ubatch=n_ubatch, n_in_flight=n_in_flight)
        head.arrive(Request(1, tuple(range(1, n + 1)), 3))
        head.drain()
        head.check_end()
        return [run.rows for run in head.seen[1].runs]

    assert rows(1) == rows(2) == rows(5)


# Single steps


def opened(**limits: int) -> Head:
    """A head with one stage whose draft says what the test wants it to say."""
    known = {"n_ctx": 64, "n_batch": 8, "n_ubatch": 4, "n_in_flight": 2, "n_seq": 4} | limits
    return Head(Limits(**known), 1, FakeModel(1000), Adversary(FakeModel(1000), 1.0, 0))


def guessing(number: int = 1, **settings: Any) -> Request:
    return Request(number, (number * 100, 2, 3), 8, SpeculationConfig(**settings), frozenset({END}))


def right(head: Head, n: int, request: int = 1) -> list[int]:
    """The next `n` tokens of the text."""
    seen = head.seen[request]
    return head.model.text(request, seen.tokens, n, 999)[0]


def guess(head: Head, parent: int, first: int, *tokens: int, prob: float = 0.9, complete: bool = False) -> None:
    """Guesses beside each other, named at the head's own epoch."""
    candidates = tuple((token, prob / (i + 1)) for i, token in enumerate(tokens))
    expansions = (Expansion(parent, first, len(tokens), candidates),) if tokens else ()
    head.handle(Guessed(MicroBatch(1, len(head.seen[1].text), expansions, complete)))


def come_back(head: Head) -> None:
    """The oldest run comes back, and tokens are drawn from it as far as it goes."""
    run = next(iter(head.pipeline.in_flight))
    while run in head.pipeline.in_flight:
        _, move = head.pipeline.moves("", head._hear_result)[-1]
        move()
    while head.to_sample:
        head._sample()


def tokens_in_flight(head: Head) -> list[list[int]]:
    return [[row.token for row in run.rows] for run in head.pipeline.live]


def test_chunks_follow_each_other_without_waiting() -> None:
    head = opened(n_in_flight=3)
    head.arrive(Request(1, tuple(range(1, 18)), 1))
    assert [len(run.rows) for run in head.pipeline.live] == [4, 4, 4]
    come_back(head)
    assert len(head.pipeline.live) == 3


def test_a_guess_that_is_right_is_not_evaluated_again() -> None:
    head = opened()
    head.arrive(guessing())
    a, b = right(head, 2)
    guess(head, ROOT, 1, a)
    come_back(head)  # the prompt
    assert head.seen[1].text == [a]
    assert tokens_in_flight(head) == [[a]]
    guess(head, 1, 2, b)
    assert tokens_in_flight(head) == [[a], [b]]
    come_back(head)
    assert head.seen[1].text == [a, b]
    assert tokens_in_flight(head) == [[b]]


def test_a_guess_that_waited_goes_in_when_it_turns_out_right() -> None:
    head = opened(n_in_flight=1)
    head.arrive(guessing())
    a, b = right(head, 2)
    guess(head, ROOT, 1, a)
    guess(head, 1, 2, b)
    assert len(head.pipeline.live) == 1, "the prompt fills the pipeline"
    come_back(head)
    assert tokens_in_flight(head) == [[a]]
    assert head.scheduler.counters(1).submitted_tokens == 0
    assert head.seen[1].n_guessed == 0


def test_one_run_may_confirm_many_tokens() -> None:
    head = opened(n_in_flight=2)
    head.arrive(guessing())
    a, b, c = right(head, 3)
    candidates = tuple(Expansion(i, i + 1, 1, ((token, 0.9),)) for i, token in enumerate((a, b)))
    head.handle(Guessed(MicroBatch(1, 0, candidates, False)))
    come_back(head)
    assert tokens_in_flight(head) == [[a, b]]
    come_back(head)
    assert head.seen[1].text == [a, b, c]
    assert tokens_in_flight(head) == [[c]]
    told = [message.tokens for message in head.draft.steering if isinstance(message, Accepted)] if head.draft else []
    assert told == [(a,), (b, c)], "tokens that come together are told together"


def test_the_root_does_not_wait_for_wrong_guesses() -> None:
    head = opened(n_in_flight=2)
    head.arrive(guessing(cancel=False))
    guess(head, ROOT, 1, 998)
    guess(head, 1, 2, 997)
    come_back(head)
    (a,) = head.seen[1].text
    assert tokens_in_flight(head) == [[998], [a]]
    assert not head.pipeline.cancelled


def settled(**limits: int) -> Head:
    """A request whose runs take a second in each of two stages, however long, and its draft ten milliseconds a guess;
    nothing is in flight but its root."""
    head = opened(**limits)
    head.arrive(guessing(n_draft=4))
    come_back(head)
    width = head.scheduler._active[1].width
    for n in range(1, 6):
        width.ended(n, 1.0, 2.0)
    width.guessed(True, 0.01)
    width.guessed(False, 0.01)
    head.now += 10
    return head


def test_a_fresh_root_waits_for_guesses_where_that_pays() -> None:
    head = settled()
    (fresh,) = right(head, 1)
    come_back(head)
    assert tokens_in_flight(head) == []
    assert head.scheduler.wake_at is not None
    assert head.now < head.scheduler.wake_at < head.now + 0.1
    sent: list[int] = []
    while not tokens_in_flight(head):
        sent.append(500 + len(sent))
        guess(head, len(sent) - 1, len(sent), sent[-1])
    assert len(sent) > 1
    assert tokens_in_flight(head) == [[fresh, *sent]]
    assert head.scheduler.wake_at is None


def test_a_fresh_root_does_not_wait_for_a_draft_that_is_late() -> None:
    head = settled()
    (fresh,) = right(head, 1)
    come_back(head)
    guess(head, ROOT, 1, 500)
    head._tick()
    assert tokens_in_flight(head) == [[fresh, 500]]


def test_a_fresh_root_does_not_wait_for_a_draft_that_has_nothing() -> None:
    head = settled()
    (fresh,) = right(head, 1)
    come_back(head)
    guess(head, ROOT, 1, complete=True)
    assert tokens_in_flight(head) == [[fresh]]


def test_guesses_wait_until_a_stage_is_about_to_be_free() -> None:
    head = settled(n_in_flight=4)
    (fresh,) = right(head, 1)
    come_back(head)
    head._tick()
    assert tokens_in_flight(head) == [[fresh]]
    guess(head, ROOT, 1, 500)
    guess(head, 1, 2, 501)
    assert tokens_in_flight(head) == [[fresh]]
    assert head.scheduler.wake_at is not None
    assert head.now + 0.5 < head.scheduler.wake_at < head.now + 1
    head._tick()
    assert tokens_in_flight(head) == [[fresh], [500, 501]]


def test_wrong_guesses_are_cancelled_in_one_message() -> None:
    head = opened(n_in_flight=4)
    head.arrive(guessing())
    for i in range(3):
        guess(head, i, i + 1, 990 + i)
    come_back(head)
    assert list(head.pipeline.stages[0].cancels) == [(2, 3, 4)]
    counters = head.scheduler.counters(1)
    assert (counters.cancelled_runs, counters.cancelled_tokens) == (3, 3)


def test_guesses_are_counted_by_how_far_ahead_they_were() -> None:
    head = opened(n_in_flight=4)
    head.arrive(guessing())
    a, b = right(head, 2)
    guess(head, ROOT, 1, a)
    guess(head, 1, 2, b)
    guess(head, 2, 3, 998)
    counters = head.scheduler.counters(1)
    assert counters.by_lead == {1: [1, 0], 2: [1, 0], 3: [1, 0]}
    come_back(head)  # the prompt: a is right
    assert counters.by_lead == {1: [1, 1], 2: [1, 0], 3: [1, 0]}
    guess(head, 3, 4, 997)
    assert counters.by_lead[3] == [2, 0], "one ahead fewer, now that a is text"
    come_back(head)
    come_back(head)
    assert counters.by_lead == {1: [1, 1], 2: [1, 1], 3: [2, 0]}
    assert counters.wrong_rows == {4: 1, 5: 1}


def test_a_dead_run_is_computed_for_a_live_one_that_hangs_on_it() -> None:
    """Its third run has a row on a branch that died, and could not be computed without the second."""
    head = opened(n_in_flight=4, n_seq=4)
    head.arrive(guessing())
    (a,) = right(head, 1)
    guess(head, ROOT, 1, 998)
    expansions = Expansion(ROOT, 2, 1, ((a, 0.5),)), Expansion(1, 3, 1, ((997, 0.5),))
    head.handle(Guessed(MicroBatch(1, 0, expansions, False)))
    assert tokens_in_flight(head)[1:] == [[998], [a, 997]]
    come_back(head)
    assert not head.pipeline.cancelled
    come_back(head)
    come_back(head)
    assert head.seen[1].n_guessed == 1


def test_without_continuous_guesses_wait_for_each_other() -> None:
    head = opened(n_in_flight=4)
    head.arrive(guessing(continuous=False))
    guess(head, ROOT, 1, 998)
    guess(head, 1, 2, 997)
    assert tokens_in_flight(head)[1:] == [[998]]


def test_synchronous_speculation_waits_for_the_draft() -> None:
    head = opened(n_in_flight=4)
    head.arrive(guessing(mode="speculative"))
    come_back(head)
    assert not head.pipeline.live, "drafting"
    a, b, c = (*head.seen[1].text, *right(head, 2))
    guess(head, ROOT, 1, b)
    assert not head.pipeline.live
    guess(head, 1, 2, c, complete=True)
    assert tokens_in_flight(head) == [[a, b, c]]


def test_nothing_is_submitted_that_the_text_has_no_room_for() -> None:
    head = opened(n_in_flight=4)
    head.arrive(replace(guessing(), n_predict=2))
    guess(head, ROOT, 1, 11)
    guess(head, 1, 2, 12)
    assert tokens_in_flight(head)[1:] == [[11]], "the last token is drawn from the row before it"


def test_deeper_rows_want_more_logits() -> None:
    head = opened()
    head.arrive(replace(guessing(), want_grows=True))
    head.handle(Guessed(MicroBatch(1, 0, tuple(Expansion(i, i + 1, 1, ((20 + i, 0.9),)) for i in range(3)), False)))
    run = head.pipeline.live[-1]
    assert [run.wants[row.want].n for row in run.rows] == [4, 5, 6]


def test_operations_that_no_run_could_carry_go_alone() -> None:
    head = opened()
    first, second = (Request(i, (i, 2, 3), 1) for i in (1, 2))
    head.arrive(first)
    head.arrive(second)
    come_back(head)
    clear = (KvOp(KvKind.RM, 0),)
    assert head.seen[2].runs[0].ops == clear, "the next request's run takes them along"
    come_back(head)
    (marker,) = head.pipeline.in_flight.values()
    assert (marker.rows, marker.ops) == ((), clear)
    head.draft = None
    head.drain()
    head.check_end()


def test_a_stop_cancels_all_that_is_in_flight_and_waits_for_it() -> None:
    head = opened(n_in_flight=3)
    head.arrive(Request(1, tuple(range(1, 30)), 5))
    head.stop(1)
    assert len(head.pipeline.cancelled) == 3
    assert head.seen[1].finish is None
    head.drain()
    assert head.seen[1].finish is Finish.STOPPED
    assert not head.seen[1].text


def test_a_waiting_request_is_stopped_at_once() -> None:
    head = opened()
    for i in (1, 2, 3):
        head.arrive(Request(i, (i, 2, 3), 2))
    head.stop(2)
    assert head.seen[2].finish is Finish.STOPPED
    assert not head.pipeline.cancelled
    head.drain()
    assert [head.seen[i].finish for i in (1, 3)] == [Finish.LENGTH] * 2
    assert not head.seen[2].runs


def test_a_token_drawn_for_a_stopped_request_is_dropped() -> None:
    head = opened()
    head.arrive(Request(1, (1, 2, 3), 5))
    while not head.to_sample:
        head.moves()[-1][1]()
    head.stop(1)
    assert head.seen[1].finish is Finish.STOPPED
    head._sample()
    assert not head.pipeline.live
    assert not head.seen[1].text


def test_nothing_to_predict_still_reads_the_prompt() -> None:
    head = opened()
    head.arrive(Request(1, tuple(range(1, 11)), 0))
    head.drain()
    assert head.seen[1].finish is Finish.LENGTH
    assert [len(run.rows) for run in head.seen[1].runs] == [4, 4, 2]


def test_two_requests_share_the_pipeline() -> None:
    head = opened(n_requests=2, n_in_flight=2)
    head.arrive(Request(1, (1, 2), 6))
    head.arrive(Request(2, (3, 4), 6))
    assert [run.rows[0].request for run in head.pipeline.live] == [1, 2]
    head.arrive(Request(3, (5, 6), 6))
    assert not head.seen[3].runs
    head.drain()
    assert all(seen.finish is Finish.LENGTH for seen in head.seen.values())


@pytest.mark.parametrize("n", [0, 64, 65])
def test_a_prompt_that_does_not_fit_is_a_bug_of_the_caller(n: int) -> None:
    with pytest.raises(ValueError, match=f"a prompt of {n} tokens in 64 cells"):
        opened().arrive(Request(1, tuple(range(n)), 1))


def test_a_run_ends_once() -> None:
    head = opened()
    head.arrive(Request(1, (1, 2, 3), 1))
    with pytest.raises(ValueError, match="run 99 is not in flight"):
        head.scheduler.handle(RunEnded(99), 0.0)
    head.drain()
    with pytest.raises(ValueError, match="run 1 is not in flight"):
        head.scheduler.handle(RunEnded(1), 0.0)
