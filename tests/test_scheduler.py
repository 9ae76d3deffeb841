"""The scheduler against a fake pipeline whose messages take as long as hypothesis likes."""

from __future__ import annotations

import collections
import ctypes
import os
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import llama_cpp
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from zoo import ggml_base, make, quiet

from ggpipe.core.messages import KvKind, KvOp, Row, Run, Want, WantKind
from ggpipe.core.scheduler import (
    Action,
    Arrived,
    Cancel,
    Event,
    Finish,
    Finished,
    Limits,
    Request,
    RunEnded,
    Sample,
    Sampled,
    Scheduler,
    Stop,
    Submit,
    cut_prompt,
)

END = 0  # the token that ends a text


@dataclass(frozen=True)
class FakeModel:
    """Its next token is a hash of all tokens before; a small vocabulary ends texts soon."""

    n_vocab: int

    def next(self, tokens: Sequence[int]) -> int:
        return zlib.crc32(repr(tuple(tokens)).encode()) % self.n_vocab

    def text(self, prompt: Sequence[int], n_predict: int, n_ctx: int) -> tuple[list[int], Finish]:
        """Greedy text, one token after the other, and why it ends."""
        tokens = list(prompt)
        while len(tokens) - len(prompt) != n_predict:
            if len(tokens) > n_ctx:  # the last token has no cell to be computed in
                return tokens[len(prompt) :], Finish.CONTEXT_FULL
            tokens.append(self.next(tokens))
            if tokens[-1] == END:
                return tokens[len(prompt) :], Finish.END_OF_TEXT
        return tokens[len(prompt) :], Finish.LENGTH


class FakeCache:
    """A KV cache with libllama's rules: positions of a sequence are consecutive, cells are scarce."""

    def __init__(self, n_ctx: int) -> None:
        self.n_ctx = n_ctx
        self.sequences: dict[int, list[int]] = {}

    def apply(self, op: KvOp) -> None:
        assert op.kind is KvKind.RM, "plain decoding needs nothing but RM"
        assert op.p1 == -1, "a hole would be left"
        tokens = self.sequences.get(op.seq, [])
        self.sequences[op.seq] = tokens[: max(op.p0, 0)]

    def decode(self, row: Row) -> list[int]:
        """All tokens of the row's sequence, its own last."""
        (seq,) = row.seqs
        tokens = self.sequences.setdefault(seq, [])
        assert row.pos == len(tokens), "libllama: inconsistent sequence positions"
        tokens.append(row.token)
        assert sum(map(len, self.sequences.values())) <= self.n_ctx, "libllama: no free cells"
        return list(tokens)


@dataclass
class FakeStage:
    """Runs and cancel messages come over different ways: each keeps its order, none waits for the other."""

    cache: FakeCache
    runs: collections.deque[Run] = field(default_factory=collections.deque)
    cancels: collections.deque[tuple[int, ...]] = field(default_factory=collections.deque)
    cancelled: set[int] = field(default_factory=set)


@dataclass
class Seen:
    """What the head did for one request."""

    request: Request
    want: Want
    runs: list[Run] = field(default_factory=list)
    accepted: list[int] = field(default_factory=list)
    stopped: bool = False
    finish: Finish | None = None


class Head:
    """A scheduler, a pipeline, and all that must hold between them. Nothing moves by itself."""

    def __init__(self, limits: Limits, n_stages: int, n_vocab: int) -> None:
        self.limits = limits
        self.model = FakeModel(n_vocab)
        self.scheduler = Scheduler(limits)
        self.stages = [FakeStage(FakeCache(limits.n_ctx)) for _ in range(n_stages)]
        self.results: collections.deque[tuple[Run, int | None]] = collections.deque()
        """Runs that are through, with the token that follows, unless the run was cancelled."""
        self.seen: dict[int, Seen] = {}
        self.in_flight: dict[int, Run] = {}
        self.ended: dict[int, int | None] = {}
        self.to_sample: collections.deque[Sample] = collections.deque()
        self.cancelled: set[int] = set()
        self.now = 0.0
        self._n_wants = 0

    # What the outside does

    def arrive(self, prompt: tuple[int, ...], n_predict: int) -> int:
        request = Request(len(self.seen) + 1, prompt, n_predict)
        want = self._new_want()
        self.seen[request.id] = Seen(request, want)
        self._handle(Arrived(request, want))
        return request.id

    def stop(self, request: int) -> None:
        if request in self.seen and self.seen[request].finish is None:
            self.seen[request].stopped = True
        self._handle(Stop(request))

    def step(self, stage: int) -> None:
        """A stage does its next run; of a cancelled one, the operations only."""
        station = self.stages[stage]
        run = station.runs.popleft()
        for op in run.ops:
            station.cache.apply(op)
        if run.id in station.cancelled:
            run = replace(run, cancelled=True)
        token: int | None = None
        if not run.cancelled:
            for row in run.rows:
                history = station.cache.decode(row)
                token = self.model.next(history) if row.want >= 0 else None
        if stage + 1 < len(self.stages):
            self.stages[stage + 1].runs.append(run)
        else:
            self.results.append((run, token))

    def deliver_cancel(self, stage: int) -> None:
        self.stages[stage].cancelled.update(self.stages[stage].cancels.popleft())

    def deliver_result(self) -> None:
        run, token = self.results.popleft()
        assert self.in_flight.pop(run.id).rows == run.rows
        self.ended[run.id] = token
        self._handle(RunEnded(run.id))

    def deliver_sample(self) -> None:
        sample = self.to_sample.popleft()
        seen = self.seen[sample.request]
        token = self.ended[sample.run]
        assert token is not None, "the run to sample from brought nothing back"
        want = self._new_want()
        if seen.finish is None and not seen.stopped:
            seen.accepted.append(token)
            seen.want = want
        self._handle(Sampled(sample.request, token, token == END, want))

    def drain(self) -> None:
        """Let everything end, the youngest thing last."""
        while self.to_sample or self.results or any(s.runs or s.cancels for s in self.stages):
            for i in reversed(range(len(self.stages))):
                while self.stages[i].cancels:
                    self.deliver_cancel(i)
                if self.stages[i].runs:
                    self.step(i)
            if self.results:
                self.deliver_result()
            while self.to_sample:
                self.deliver_sample()

    # What must hold

    def _new_want(self) -> Want:
        self._n_wants += 1
        return Want(WantKind.TOP, self._n_wants)

    def _handle(self, event: Event) -> None:
        self.now += 0.001
        for action in self.scheduler.handle(event, self.now):
            self._act(action)

    def _act(self, action: Action) -> None:
        match action:
            case Submit(run):
                self._submitted(run)
            case Sample(request, run_id, row):
                seen = self.seen[request]
                assert seen.finish is None
                assert not seen.stopped
                assert run_id in self.ended
                assert run_id == seen.runs[-1].id
                assert row == len(seen.runs[-1].rows) - 1
                self.to_sample.append(action)
            case Cancel(runs):
                assert runs
                assert set(runs) <= set(self.in_flight)
                assert not self.cancelled & set(runs)
                self.cancelled |= set(runs)
                for stage in self.stages:
                    stage.cancels.append(runs)
            case Finished(request, reason):
                seen = self.seen[request]
                assert seen.finish is None
                seen.finish = reason
                assert not any(row.request == request for run in self.in_flight.values() for row in run.rows)
                self.check_text(seen)

    def _submitted(self, run: Run) -> None:
        assert not run.cancelled
        assert run.rows
        assert run.id not in self.in_flight
        assert run.id not in self.ended
        (request,) = {row.request for row in run.rows}
        seen = self.seen[request]
        assert seen.finish is None
        assert not seen.stopped
        assert run.epoch == len(seen.accepted)
        n_past = sum(len(other.rows) for other in seen.runs)
        assert [row.pos for row in run.rows] == list(range(n_past, n_past + len(run.rows)))
        tokens = (*seen.request.prompt, *seen.accepted)
        assert [row.token for row in run.rows] == list(tokens[n_past : n_past + len(run.rows)])
        complete = n_past + len(run.rows) >= len(seen.request.prompt)
        assert [row.want for row in run.rows] == [-1] * (len(run.rows) - 1) + [0 if complete else -1]
        assert run.wants == ((seen.want,) if complete else ())
        seen.runs.append(run)
        self.in_flight[run.id] = run
        self.stages[0].runs.append(run)
        assert len(self.in_flight) <= self.limits.n_in_flight

    def check_text(self, seen: Seen) -> None:
        request, limits = seen.request, self.limits
        text, reason = self.model.text(request.prompt, request.n_predict, limits.n_ctx)
        lengths = [len(run.rows) for run in seen.runs]
        expected = cut_as_libllama(len(request.prompt), limits.n_batch, limits.n_ubatch)
        if seen.finish is Finish.STOPPED:
            assert seen.stopped
            assert seen.accepted == text[: len(seen.accepted)]
            expected += [1] * len(text)
            assert lengths == expected[: len(lengths)]
        else:
            assert (seen.accepted, seen.finish) == (text, reason)
            assert lengths == expected + [1] * (len(text) - 1)

    def check_end(self) -> None:
        """After `drain`."""
        assert not self.in_flight
        for seen in self.seen.values():
            assert seen.finish is not None, "a request never ended"
            assert all(run.id in self.ended for run in seen.runs)
            assert not seen.stopped or seen.finish is Finish.STOPPED


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


LIMITS = st.builds(
    Limits,
    n_ctx=st.integers(2, 40),
    n_batch=st.integers(1, 12),
    n_ubatch=st.integers(1, 12),
    n_in_flight=st.integers(1, 5),
)


class Interleavings(RuleBasedStateMachine):
    """Requests, stops, stages, results, samples and cancel messages, in any order."""

    @initialize(limits=LIMITS, n_stages=st.integers(1, 3), n_vocab=st.sampled_from([2, 8, 64]))
    def open(self, limits: Limits, n_stages: int, n_vocab: int) -> None:
        self.head = Head(limits, n_stages, n_vocab)

    @rule(data=st.data(), n_predict=st.integers(-1, 8))
    def arrive(self, data: st.DataObject, n_predict: int) -> None:
        n = data.draw(st.integers(1, self.head.limits.n_ctx - 1), "tokens")
        first = data.draw(st.integers(0, 99), "first token")
        self.head.arrive(tuple(range(first, first + n)), n_predict)

    @rule(data=st.data())
    def stop(self, data: st.DataObject) -> None:
        self.head.stop(data.draw(st.integers(1, len(self.head.seen) + 1), "request"))

    def moves(self) -> list[tuple[Callable[..., None], tuple[int, ...]]]:
        """All that could happen next in the pipeline."""
        head = self.head
        moves: list[tuple[Callable[..., None], tuple[int, ...]]] = []
        moves += [(head.step, (i,)) for i, stage in enumerate(head.stages) if stage.runs]
        moves += [(head.deliver_cancel, (i,)) for i, stage in enumerate(head.stages) if stage.cancels]
        moves += [(head.deliver_result, ())] if head.results else []
        moves += [(head.deliver_sample, ())] if head.to_sample else []
        return moves

    @precondition(lambda self: self.moves())
    @rule(data=st.data(), times=st.integers(1, 8))
    def move(self, data: st.DataObject, times: int) -> None:
        for _ in range(times):
            if moves := self.moves():
                action, arguments = moves[data.draw(st.integers(0, len(moves) - 1), "move")]
                action(*arguments)

    @rule()
    def drain(self) -> None:
        self.head.drain()

    @invariant()
    def never_idle_with_work(self) -> None:
        if hasattr(self, "head") and not self.head.in_flight and not self.head.to_sample:
            assert all(seen.finish is not None for seen in self.head.seen.values()), "a request is stuck"

    def teardown(self) -> None:
        if hasattr(self, "head"):
            self.head.drain()
            self.head.check_end()


TestInterleavings = Interleavings.TestCase
TestInterleavings.settings = settings(
    max_examples=200, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)

PROMPTS = st.lists(st.integers(1, 99), min_size=1, max_size=39).map(tuple)


@settings(max_examples=200, deadline=None)
@given(LIMITS, st.lists(st.tuples(PROMPTS, st.integers(-1, 12)), min_size=1, max_size=4), st.integers(1, 4))
def test_undisturbed_requests_end_by_themselves(
    limits: Limits, requests: list[tuple[tuple[int, ...], int]], n_stages: int
) -> None:
    limits = replace(limits, n_ctx=40)
    head = Head(limits, n_stages, n_vocab=16)
    for prompt, n_predict in requests:
        head.arrive(prompt, n_predict)
    head.drain()
    head.check_end()
    assert all(seen.finish is not Finish.STOPPED for seen in head.seen.values())


@settings(max_examples=100, deadline=None)
@given(PROMPTS, st.integers(1, 12), st.integers(1, 12))
def test_chunks_do_not_depend_on_what_is_in_flight(prompt: tuple[int, ...], n_batch: int, n_ubatch: int) -> None:
    def rows(n_in_flight: int) -> list[tuple[Row, ...]]:
        head = Head(Limits(64, n_batch, n_ubatch, n_in_flight), n_stages=2, n_vocab=16)
        request = head.arrive(prompt, 3)
        head.drain()
        return [run.rows for run in head.seen[request].runs]

    assert rows(1) == rows(2) == rows(5)


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


# Single steps


def opened(n_in_flight: int = 2, **limits: int) -> Head:
    return Head(Limits(**{"n_ctx": 64, "n_batch": 8, "n_ubatch": 4, **limits}, n_in_flight=n_in_flight), 1, 1000)


def test_chunks_follow_each_other_without_waiting() -> None:
    head = opened(n_in_flight=3)
    head.arrive(tuple(range(1, 18)), 1)
    assert [len(run.rows) for run in head.in_flight.values()] == [4, 4, 4]
    head.step(0)
    head.deliver_result()
    assert len(head.in_flight) == 3


def test_the_next_request_clears_the_sequence_in_its_first_run() -> None:
    head = opened()
    first, second = head.arrive((1, 2, 3), 1), head.arrive((4, 5), 1)
    head.drain()
    assert head.seen[first].runs[0].ops == ()
    assert head.seen[second].runs[0].ops == (KvOp(KvKind.RM, 0),)


def test_a_stop_cancels_all_that_is_in_flight_and_waits_for_it() -> None:
    head = opened(n_in_flight=3)
    request = head.arrive(tuple(range(1, 30)), 5)
    head.stop(request)
    assert head.cancelled == set(head.in_flight)
    assert head.seen[request].finish is None
    head.drain()
    assert head.seen[request].finish is Finish.STOPPED
    assert not head.seen[request].accepted


def test_a_waiting_request_is_stopped_at_once() -> None:
    head = opened()
    first, second, third = (head.arrive((i, 2, 3), 2) for i in (1, 4, 7))
    head.stop(second)
    assert head.seen[second].finish is Finish.STOPPED
    assert not head.cancelled
    head.drain()
    assert [head.seen[i].finish for i in (first, third)] == [Finish.LENGTH] * 2
    assert not head.seen[second].runs


def test_a_token_drawn_for_a_stopped_request_is_dropped() -> None:
    head = opened()
    request = head.arrive((1, 2, 3), 5)
    head.step(0)
    head.deliver_result()
    head.stop(request)  # between `Sample` and `Sampled`
    assert head.seen[request].finish is Finish.STOPPED
    head.deliver_sample()
    assert not head.in_flight


def test_nothing_to_predict_still_reads_the_prompt() -> None:
    head = opened()
    request = head.arrive(tuple(range(1, 11)), 0)
    head.drain()
    assert head.seen[request].finish is Finish.LENGTH
    assert [len(run.rows) for run in head.seen[request].runs] == [4, 4, 2]


@pytest.mark.parametrize("n", [0, 64, 65])
def test_a_prompt_that_does_not_fit_is_a_bug_of_the_caller(n: int) -> None:
    with pytest.raises(ValueError, match=f"a prompt of {n} tokens in 64 cells"):
        opened().arrive(tuple(range(n)), 1)


def test_a_run_ends_once() -> None:
    head = opened()
    head.arrive((1, 2, 3), 1)
    with pytest.raises(ValueError, match="run 99 is not in flight"):
        head.scheduler.handle(RunEnded(99), 0.0)
    head.drain()
    with pytest.raises(ValueError, match="run 1 is not in flight"):
        head.scheduler.handle(RunEnded(1), 0.0)
