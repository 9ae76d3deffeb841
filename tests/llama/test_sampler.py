"""Our sampler on what the last rank sends, against llama.cpp's chain on whole rows of logits."""

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ggpipe.config import ModelConfig, SamplingConfig
from ggpipe.core.messages import RowLogits, Want, WantKind
from ggpipe.errors import UsageError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import lib, native
from ggpipe.llama.sampler import Sampler
from ggpipe.llama.vocab import Vocab

Logits = NDArray[np.float32]
TALES = Path(__file__).parents[2] / "ggpipe" / "models" / "tales-target.gguf"
N_CTX, N_STEPS = 256, 200
TOP, FULL = WantKind.TOP, WantKind.FULL


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    vocab = Vocab(ModelFile.open(TALES), ModelConfig(path=TALES))
    yield vocab
    vocab.close()


class Reference:
    """llama.cpp's default chain, as its common_sampler builds it, minus the samplers that are off by default."""

    def __init__(self, config: SamplingConfig, vocab: Vocab) -> None:
        self.eog = [t for t in range(vocab.n_tokens) if lib.llama_vocab_is_eog(vocab.pointer, t)]
        self.biased = self.eog if config.ignore_eos else []
        last_n = N_CTX if config.repeat_last_n == -1 else config.repeat_last_n
        self.chain: Any = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
        penalties = (config.repeat_penalty, config.frequency_penalty, config.presence_penalty)
        for sampler in (
            lib.llama_sampler_init_penalties(vocab.n_tokens, last_n, *penalties),
            lib.llama_sampler_init_top_k(config.top_k),
            lib.llama_sampler_init_top_p(config.top_p, 0),
            lib.llama_sampler_init_min_p(config.min_p, 0),
            lib.llama_sampler_init_temp_ext(config.temp, 0.0, 1.0),
            lib.llama_sampler_init_dist(config.seed),
        ):
            lib.llama_sampler_chain_add(self.chain, sampler)

    def sample(self, row: Logits) -> int:
        data: Any = (lib.llama_token_data * len(row))()
        for i, logit in enumerate(row.tolist()):
            data[i].id, data[i].logit = i, logit
        for token in self.biased:  # logit bias comes first
            data[token].logit = float("-inf")
        array = lib.llama_token_data_array(data, len(row), -1, False)
        lib.llama_sampler_apply(self.chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def accept(self, token: int) -> None:
        lib.llama_sampler_accept(self.chain, token)

    def close(self) -> None:
        lib.llama_sampler_free(self.chain)


def extract(logits: Logits, want: Want) -> RowLogits:
    """What the last stage makes of a row that was asked for."""
    if want.kind is FULL:
        full = logits.copy()
        full[list(want.banned)] = -np.inf
        return RowLogits(0, None, full, 0.0)
    ids, best, log_sum_exp = native.top(logits.ctypes.data, len(logits), want.n, list(want.banned))
    return RowLogits(0, tuple(ids), tuple(best), log_sum_exp)


def rows(n_vocab: int, seed: int) -> Iterator[Logits]:
    """Rows whose best tokens come back often enough for penalties to matter, and ends of text among them."""
    random = np.random.default_rng(seed)
    base = random.standard_normal(n_vocab).astype(np.float32) * 2
    base[0] = base.max()
    while True:
        yield base + random.standard_normal(n_vocab).astype(np.float32) * 1.5


@dataclass(frozen=True)
class Case:
    config: SamplingConfig
    n: Callable[[int], int] | None
    """Most rows wanted at a step, of how many tokens the penalties look at; None: the whole row."""


CASES = {
    "greedy": Case(SamplingConfig(temp=0), lambda _: 1),
    "colder than greedy": Case(SamplingConfig(temp=-1), lambda _: 1),
    "default": Case(SamplingConfig(seed=42), lambda _: 40),
    "hot": Case(SamplingConfig(seed=7, temp=3.0, top_p=1.0, min_p=0.0), lambda _: 40),
    "top_k=0": Case(SamplingConfig(seed=1, top_k=0), None),
    "top_k=-1": Case(SamplingConfig(seed=1, top_k=-1, temp=1.5, min_p=0.01), None),
    "top_k=n_vocab": Case(SamplingConfig(seed=1, top_k=2048), None),
    "top_k=200": Case(SamplingConfig(seed=5, top_k=200, top_p=1.0, min_p=0.0), lambda _: 200),
    "top_k=1": Case(SamplingConfig(seed=5, top_k=1), lambda _: 1),
    "only top_p": Case(SamplingConfig(seed=3, top_k=0, min_p=0.0, top_p=0.6), None),
    "repeat": Case(SamplingConfig(seed=3, top_k=5, repeat_penalty=1.3, repeat_last_n=64), lambda seen: 5 + seen),
    "repeat, last 3": Case(SamplingConfig(seed=3, top_k=5, repeat_penalty=1.3, repeat_last_n=3), lambda seen: 5 + seen),
    "repeat, all": Case(SamplingConfig(seed=3, top_k=9, repeat_penalty=1.1, repeat_last_n=-1), lambda seen: 9 + seen),
    "repeat, none": Case(SamplingConfig(seed=3, top_k=5, repeat_penalty=1.3, repeat_last_n=0), lambda _: 5),
    "greedy, repeat": Case(SamplingConfig(temp=0, repeat_penalty=1.3), lambda seen: 1 + seen),
    "reward repeats": Case(SamplingConfig(seed=3, top_k=5, repeat_penalty=0.8), None),
    "greedy, reward repeats": Case(SamplingConfig(temp=0, repeat_penalty=0.9), None),
    "reward presence": Case(SamplingConfig(seed=3, top_k=5, presence_penalty=-0.5), None),
    "presence": Case(SamplingConfig(seed=9, presence_penalty=0.7), lambda seen: 40 + seen),
    "frequency": Case(SamplingConfig(seed=9, frequency_penalty=0.4), lambda seen: 40 + seen),
    "all penalties": Case(
        SamplingConfig(seed=9, top_k=20, repeat_penalty=1.1, presence_penalty=0.3, frequency_penalty=0.2),
        lambda seen: 20 + seen,
    ),
    "opposite penalties": Case(SamplingConfig(seed=9, repeat_penalty=1.3, frequency_penalty=-0.1), None),
    "ignore_eos": Case(SamplingConfig(seed=11, ignore_eos=True), lambda _: 40),
    "greedy, ignore_eos": Case(SamplingConfig(temp=0, ignore_eos=True), lambda _: 1),
    "top_k=0, ignore_eos": Case(SamplingConfig(seed=11, top_k=0, ignore_eos=True), None),
    "repeat, ignore_eos": Case(
        SamplingConfig(seed=11, top_k=5, repeat_penalty=1.3, ignore_eos=True), lambda seen: 5 + seen
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_llama_cpps(name: str, vocab: Vocab) -> None:
    case, config = CASES[name], CASES[name].config
    ours, theirs = Sampler(config, vocab, N_CTX), Reference(config, vocab)
    window = {-1: N_CTX, 0: 0}.get(config.repeat_last_n, config.repeat_last_n)
    prompt = [5, 17, 3, 17]
    ours.accept(prompt)
    for token in prompt:
        theirs.accept(token)
    tokens, drawn, n_ends = list(prompt), set(), 0
    for _, row in zip(range(N_STEPS), rows(vocab.n_tokens, seed=len(name)), strict=False):
        want = ours.want()
        seen = len(set(tokens[-window:])) if window else 0
        assert want.kind is (FULL if case.n is None else TOP)
        assert want.n == (1 if case.n is None else case.n(seen))
        assert want.banned == (vocab.end_tokens if config.ignore_eos else ())
        token = ours.sample(extract(row, want))
        assert token == theirs.sample(row)
        tokens.append(token)
        drawn.add(token)
        n_ends += row.argmax() == 0
        ours.accept((token,))
        theirs.accept(token)
    ours.close()
    theirs.close()
    assert len(drawn) > 5, "too few different tokens to tell anything"
    assert n_ends > 0, "no end of text to ignore"
    assert not (config.ignore_eos and 0 in drawn)


@pytest.mark.parametrize("name", CASES)
def test_a_resumed_sampler_draws_as_the_first_one_would(name: str, vocab: Vocab) -> None:
    config, prompt = CASES[name].config, [5, 17, 3, 17]
    first = Sampler(config, vocab, N_CTX)
    first.accept(prompt)
    tokens: list[int] = []
    for n, row in zip(range(N_STEPS), rows(vocab.n_tokens, seed=len(name)), strict=False):
        token = first.sample(extract(row, want := first.want()))
        if n % 20 == len(name) % 20:
            resumed = Sampler(config, vocab, N_CTX)
            resumed.accept(prompt)
            resumed.resume(tokens)
            assert resumed.want() == want
            assert resumed.sample(extract(row, want)) == token
            first.close()
            first = resumed  # the next one goes on from this one's draws
        first.accept((token,))
        tokens.append(token)
    first.close()


def test_the_same_seed_draws_the_same(vocab: Vocab) -> None:
    def text(seed: int) -> list[int]:
        sampler = Sampler(SamplingConfig(seed=seed), vocab, N_CTX)
        pairs = zip(range(20), rows(vocab.n_tokens, 1), strict=False)
        tokens = [sampler.sample(extract(row, sampler.want())) for _, row in pairs]
        sampler.close()
        return tokens

    assert text(3) == text(3) != text(4)


def test_a_fresh_seed_can_be_given_again(vocab: Vocab) -> None:
    sampler = Sampler(SamplingConfig(), vocab, N_CTX)
    pairs = list(zip(range(20), rows(vocab.n_tokens, 1), strict=False))
    again = Sampler(SamplingConfig(seed=sampler.seed), vocab, N_CTX)
    for _, row in pairs:
        assert sampler.sample(extract(row, sampler.want())) == again.sample(extract(row, again.want()))
    sampler.close()
    again.close()
    again.close()  # a second call does nothing


def test_the_seed_that_libllama_takes_for_random_is_refused() -> None:
    with pytest.raises(UsageError, match="4294967294"):
        SamplingConfig(seed=2**32 - 1)


# native.top


def numpy_top(row: Logits, k: int, banned: list[int]) -> tuple[list[int], list[float]]:
    kept = np.setdiff1d(np.arange(len(row)), banned)
    order = kept[np.argsort(-row[kept], kind="stable")][:k]
    return order.tolist(), row[order].tolist()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32), st.sampled_from([3, 1000]), st.data())
def test_top_is_numpys(n_vocab: int, seed: int, n_values: int, data: st.DataObject) -> None:
    """Few different values: ties everywhere."""
    row = (np.random.default_rng(seed).integers(0, n_values, n_vocab) / 7).astype(np.float32)
    k = data.draw(st.integers(0, n_vocab + 3))
    banned = data.draw(st.lists(st.integers(0, n_vocab - 1), max_size=5))
    ids, logits, log_sum_exp = native.top(row.ctypes.data, n_vocab, k, banned)
    assert (ids, logits) == numpy_top(row, k, banned)
    kept = np.delete(row.astype(np.float64), banned)
    if k <= 1:
        assert math.isnan(log_sum_exp)
    elif len(kept):
        assert log_sum_exp == pytest.approx(np.logaddexp.reduce(kept), rel=1e-6, abs=1e-6)


def test_of_equal_logits_the_lower_id_is_the_better_one() -> None:
    row = np.array([1, 3, 2, 3, 3, 2], np.float32)
    ids, logits, _ = native.top(row.ctypes.data, 6, 4, [])
    assert (ids, logits) == ([1, 3, 4, 2], [3, 3, 3, 2])
    assert native.top(row.ctypes.data, 6, 2, [])[0] == [1, 3]
    assert native.top(row.ctypes.data, 6, 2, [1, 4, 1])[0] == [3, 2]


def test_fewer_are_left_than_wanted() -> None:
    row = np.array([1, 2, 3], np.float32)
    assert native.top(row.ctypes.data, 3, 3, [2])[0] == [1, 0]
    assert native.top(row.ctypes.data, 3, 9, [])[0] == [2, 1, 0]
    assert native.top(row.ctypes.data, 3, 0, [])[0] == []


def test_minus_infinity_is_the_worst() -> None:
    row = np.array([-np.inf, 2, -np.inf, 1], np.float32)
    ids, logits, log_sum_exp = native.top(row.ctypes.data, 4, 4, [])
    assert (ids, logits) == ([1, 3, 0, 2], [2, 1, -np.inf, -np.inf])
    assert log_sum_exp == pytest.approx(np.logaddexp(2, 1))


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_the_log_sum_exp_of_large_logits(offset: float) -> None:
    row = np.random.default_rng(1).standard_normal(50_000).astype(np.float32) * 5 + np.float32(offset)
    _, best, log_sum_exp = native.top(row.ctypes.data, len(row), 2, [])
    assert best[0] == row.max()
    assert log_sum_exp == pytest.approx(np.logaddexp.reduce(row.astype(np.float64)), rel=1e-7)
