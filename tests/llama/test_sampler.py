"""Our sampler on what the last rank sends, against llama.cpp's chain on whole rows of logits."""

import ctypes
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from support.common_sampler import common_chain

from ggpipe.config.model import ModelConfig
from ggpipe.config.samplers import samplers_by_letter, samplers_by_name
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits
from ggpipe.core.random_numbers import RandomNumbers
from ggpipe.errors import UsageError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import lib
from ggpipe.llama.params import row_of
from ggpipe.llama.sampler import Sampler
from ggpipe.llama.vocab import Vocab

Logits = NDArray[np.float32]
TALES = Path(__file__).parents[2] / "ggpipe" / "models" / "tales-target.gguf"
N_CTX, N_STEPS = 256, 200
TOP, FULL, LIKELY, DRAWN = LogitsKind.TOP, LogitsKind.FULL, LogitsKind.LIKELY, LogitsKind.DRAWN


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    vocab = Vocab(ModelFile.open(TALES), ModelConfig(path=TALES))
    yield vocab
    vocab.close()


class Reference:
    """llama.cpp's chain on whole rows."""

    def __init__(self, config: SamplingConfig, vocab: Vocab) -> None:
        self.chain: Any = common_chain(config, vocab.pointer, N_CTX)

    def sample(self, row: Logits) -> int:
        data: Any = (lib.llama_token_data * len(row))()
        for i, logit in enumerate(row.tolist()):
            data[i].id, data[i].logit = i, logit
        array = lib.llama_token_data_array(data, len(row), -1, False)
        lib.llama_sampler_apply(self.chain, ctypes.byref(array))
        self._drawn_from, self._data = array, data
        return int(array.data[array.selected].id)

    def left(self) -> list[tuple[int, float]]:
        """Candidates of the last draw, and their probabilities."""
        array = self._drawn_from
        return [(int(array.data[i].id), float(array.data[i].p)) for i in range(array.size)]

    def accept(self, token: int) -> None:
        lib.llama_sampler_accept(self.chain, token)

    def close(self) -> None:
        lib.llama_sampler_free(self.chain)


def extract(logits: Logits, want: LogitsRequest, number: float = 0.0) -> RowLogits:
    """What the last stage makes of a row that was asked for. `number`: with which a token is drawn."""
    return row_of(0, logits, structs.replace(want, number=number))


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
    """How many of the best tokens are wanted at a step, of how many tokens the penalties look at; None: `kind`."""
    kind: LogitsKind = FULL


def order(letters: str, **fields: Any) -> SamplingConfig:
    """Samplers of these letters."""
    return SamplingConfig(samplers=samplers_by_letter(letters), **fields)


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
    "top_n_sigma": Case(SamplingConfig(seed=2, top_n_sigma=1.0, temp=2.0, min_p=0.0), None),
    "top_n_sigma behind top_k": Case(order("kspt", seed=2, top_n_sigma=1.0, temp=2.0, top_p=0.99), lambda _: 40),
    "greedy, top_n_sigma": Case(SamplingConfig(temp=0, top_n_sigma=1.0), lambda _: 1),
    "typical": Case(SamplingConfig(seed=2, typical_p=0.7), lambda _: 40),
    "typical of all": Case(SamplingConfig(seed=2, typical_p=0.7, top_k=0), None),
    "typical first": Case(order("ykt", seed=2, typical_p=0.7, top_k=9), None),
    "greedy, typical": Case(SamplingConfig(temp=0, typical_p=0.5), lambda _: 40),
    "dynamic temperature": Case(SamplingConfig(seed=2, dynatemp_range=0.6, dynatemp_exponent=1.4), lambda _: 40),
    "dynamic temperature from 0": Case(SamplingConfig(seed=2, temp=0, dynatemp_range=1.5), lambda _: 40),
    "dynamic temperature first": Case(order("tk", seed=2, dynatemp_range=0.6), None),
    "temperature first": Case(order("tkp", seed=2, temp=1.5), lambda _: 40),
    "no temperature": Case(order("kpm", seed=2, temp=0), lambda _: 40),
    "min_p first": Case(order("mket", seed=2, min_p=0.02, repeat_penalty=1.5), lambda seen: 40 + seen),
    "penalties last": Case(order("kpte", seed=2, repeat_penalty=1.5), lambda seen: 40 + seen),
    "penalties behind top_p, greedy": Case(order("kpet", temp=0, repeat_penalty=1.5), lambda seen: 40 + seen),
    "no samplers": Case(order("", seed=2), None, DRAWN),
    "only temperature": Case(SamplingConfig(seed=4, temp=1.3, top_k=0, top_p=1, min_p=0), None, DRAWN),
    "only temperature, ignore_eos": Case(
        SamplingConfig(seed=4, temp=0.7, top_k=0, top_p=1, min_p=0, ignore_eos=True), None, DRAWN
    ),
    "only temperature, banned": Case(order("t", seed=5, logit_bias=((7, -math.inf), (9, -math.inf))), None, DRAWN),
    "only temperature, bias": Case(order("t", seed=5, logit_bias=((7, -3.0),)), None),
    "only temperature, penalties": Case(order("et", seed=5, repeat_penalty=1.5), None),
    "only dynamic temperature": Case(order("t", seed=2, dynatemp_range=0.6), None),
    "only min_p": Case(SamplingConfig(seed=6, temp=1.5, top_k=0, top_p=1), None, LIKELY),
    "only min_p, ignore_eos": Case(order("mt", seed=6, temp=2.0, min_p=0.2, ignore_eos=True), None, LIKELY),
    "only min_p, penalties behind": Case(order("met", seed=6, repeat_penalty=1.5, min_p=0.01), None, LIKELY),
    "only min_p, top_p behind": Case(order("mtp", seed=6, temp=2.0, top_p=0.8), None, LIKELY),
    "only min_p, xtc behind": Case(order("mxt", seed=6, xtc_probability=0.5, xtc_threshold=0.05), None, LIKELY),
    "only min_p, min_keep": Case(order("mt", seed=6, temp=2.0, min_p=0.5, min_keep=9), None),
    "min_p behind temperature": Case(order("tm", seed=6, temp=2.0, min_p=0.1), None),
    "dry": Case(SamplingConfig(seed=2, top_k=4, dry_multiplier=2.0, dry_allowed_length=1), lambda seen: 4 + seen),
    "dry, no breakers": Case(
        SamplingConfig(seed=2, top_k=4, dry_multiplier=0.8, dry_allowed_length=1, dry_sequence_breakers=()),
        lambda seen: 4 + seen,
    ),
    "dry, all": Case(
        SamplingConfig(seed=2, top_k=4, dry_multiplier=0.8, dry_allowed_length=0, dry_penalty_last_n=-1),
        lambda seen: 4 + seen,
    ),
    "dry and penalties": Case(
        SamplingConfig(seed=2, top_k=4, dry_multiplier=0.8, dry_allowed_length=1, repeat_penalty=1.2, repeat_last_n=9),
        lambda seen: 4 + seen,
    ),
    "greedy, dry": Case(SamplingConfig(temp=0, dry_multiplier=2.0, dry_allowed_length=1), lambda seen: 1 + seen),
    "reward repetitions": Case(SamplingConfig(seed=2, dry_multiplier=-0.5, dry_allowed_length=1), None),
    "xtc": Case(SamplingConfig(seed=2, xtc_probability=0.5, xtc_threshold=0.05), lambda _: 40),
    "xtc, greedy": Case(SamplingConfig(seed=2, temp=0, xtc_probability=0.5, xtc_threshold=0.05), lambda _: 40),
    "xtc of few": Case(
        SamplingConfig(seed=2, top_k=3, top_p=0.5, xtc_probability=0.5, xtc_threshold=0.05), lambda _: 3
    ),
    "xtc first": Case(order("xkt", seed=2, xtc_probability=0.5, xtc_threshold=0.05), None),
    "xtc off": Case(SamplingConfig(seed=2, xtc_probability=0.5, xtc_threshold=0.6), lambda _: 40),
    "mirostat 1": Case(SamplingConfig(seed=2, mirostat=1, mirostat_tau=3.0), None),
    "mirostat 2": Case(SamplingConfig(seed=2, mirostat=2, mirostat_tau=3.0, mirostat_eta=0.3), None),
    "mirostat 2, greedy": Case(SamplingConfig(seed=2, mirostat=2, temp=0), lambda _: 1),
    "adaptive_p": Case(order("kmat", seed=2, adaptive_target=0.3), lambda _: 40),
    "adaptive_p off": Case(order("kmat", seed=2), lambda _: 40),
    "infill": Case(order("kpi", seed=2), lambda _: 40),
    "min_keep": Case(SamplingConfig(seed=2, top_p=0.01, min_p=0.9, min_keep=4, temp=3.0), lambda _: 40),
    "bias down": Case(SamplingConfig(seed=2, top_k=5, logit_bias=((7, -3.0), (7, -1.0), (9, -2.0))), lambda _: 5 + 2),
    "bias down, greedy": Case(SamplingConfig(temp=0, logit_bias=((7, -3.0), (9, -2.0))), lambda _: 1 + 2),
    "bias up": Case(SamplingConfig(seed=2, top_k=5, logit_bias=((7, 9.0), (9, -2.0), (90, 8.5))), lambda _: 5 + 1),
    "bias up, greedy": Case(SamplingConfig(temp=0, logit_bias=((7, 5.0), (9, 4.0))), lambda _: 1),
    "bias to never": Case(SamplingConfig(seed=2, logit_bias=((7, -math.inf), (9, -math.inf))), lambda _: 40),
}
STATEFUL = [name for name, case in CASES.items() if case.config.remembers_rows]
"""Whose samplers depend on logits of the text so far."""


@pytest.mark.parametrize("name", CASES)
def test_tokens_are_llama_cpps(name: str, vocab: Vocab) -> None:
    case, config = CASES[name], CASES[name].config
    ours, theirs = Sampler(config, vocab, N_CTX), Reference(config, vocab)
    windows = {"penalties": config.repeat_last_n, "dry": config.dry_penalty_last_n}
    on = [windows[name] for name in config.active_samplers if name in windows]
    window = N_CTX if -1 in on else max(on, default=0)
    prompt = [5, 17, 3, 17]
    ours.accept(prompt)
    for token in prompt:
        theirs.accept(token)
    tokens, drawn, n_ends = list(prompt), set(), 0
    numbers = RandomNumbers(max(config.seed, 0))
    for place, row in zip(range(N_STEPS), rows(vocab.n_tokens, seed=len(name)), strict=False):
        want = ours.logits_request()
        seen = len(set(tokens[-window:])) if window else 0
        assert want.kind is (case.kind if case.n is None else TOP)
        assert want.n == (1 if case.n is None else case.n(seen))
        never = [token for token, bias in config.logit_bias if bias == -math.inf]
        assert set(want.also) == {token for token, bias in config.logit_bias if bias > 0}
        assert set(want.banned) == {*never, *(vocab.end_tokens if config.ignore_eos else ())}
        token = ours.sample(extract(row, want, numbers[place]))
        assert token == theirs.sample(row)
        tokens.append(token)
        drawn.add(token)
        n_ends += row.argmax() == 0
        ours.accept((token,))
        theirs.accept(token)
    ours.close()
    theirs.close()
    assert len(drawn) > 3, "too few different tokens to tell anything"
    assert n_ends > 0, "no end of text to ignore"
    assert not (config.ignore_eos and 0 in drawn)


@pytest.mark.parametrize("name", [name for name in CASES if name not in STATEFUL])
def test_a_resumed_sampler_draws_as_the_first_one_would(name: str, vocab: Vocab) -> None:
    config, prompt = CASES[name].config, [5, 17, 3, 17]
    first = Sampler(config, vocab, N_CTX)
    first.accept(prompt)
    tokens, numbers = list[int](), RandomNumbers(max(config.seed, 0))
    for n, row in zip(range(N_STEPS), rows(vocab.n_tokens, seed=len(name)), strict=False):
        token = first.sample(extract(row, want := first.logits_request(), numbers[n]))
        if n % 20 == len(name) % 20:
            resumed = Sampler(config, vocab, N_CTX)
            resumed.accept(prompt)
            resumed.resume(tokens)
            assert resumed.logits_request() == want
            assert resumed.sample(extract(row, want, numbers[n])) == token
            first.close()
            first = resumed  # the next one goes on from this one's draws
        first.accept((token,))
        tokens.append(token)
    first.close()


@pytest.mark.parametrize("name", STATEFUL)
def test_a_resumed_sampler_that_remembers_rows_gets_them(name: str, vocab: Vocab) -> None:
    config, prompt = CASES[name].config, [5, 17, 3, 17]
    first = Sampler(config, vocab, N_CTX)
    first.accept(prompt)
    seen: list[tuple[int, Logits]] = []
    for n, row in zip(range(60), rows(vocab.n_tokens, seed=len(name)), strict=False):
        token = first.sample(extract(row, first.logits_request()))
        if n % 20 == len(name) % 20:
            resumed = Sampler(config, vocab, N_CTX)
            resumed.accept(prompt)
            want = resumed.replay_logits_request(n)
            for known, own in seen:
                resumed.replay(extract(own, want), known)
            assert resumed.sample(extract(row, want)) == token
            first.close()
            first = resumed
        first.accept((token,))
        seen.append((token, row))
    first.close()


def test_the_same_seed_draws_the_same(vocab: Vocab) -> None:
    def text(seed: int) -> list[int]:
        sampler = Sampler(SamplingConfig(seed=seed), vocab, N_CTX)
        pairs = zip(range(20), rows(vocab.n_tokens, 1), strict=False)
        tokens = [sampler.sample(extract(row, sampler.logits_request())) for _, row in pairs]
        sampler.close()
        return tokens

    assert text(3) == text(3) != text(4)


def test_a_fresh_seed_can_be_given_again(vocab: Vocab) -> None:
    sampler = Sampler(SamplingConfig(), vocab, N_CTX)
    pairs = list(zip(range(20), rows(vocab.n_tokens, 1), strict=False))
    again = Sampler(SamplingConfig(seed=sampler.seed), vocab, N_CTX)
    for _, row in pairs:
        assert sampler.sample(extract(row, sampler.logits_request())) == again.sample(
            extract(row, again.logits_request())
        )
    sampler.close()
    again.close()
    again.close()  # a second call does nothing


PROBS = {
    "default": SamplingConfig(seed=2, n_probs=5),
    "greedy": SamplingConfig(temp=0, n_probs=3),
    "more than top_k": SamplingConfig(seed=2, top_k=4, n_probs=50),
    "banned": SamplingConfig(temp=0, n_probs=1, ignore_eos=True, logit_bias=((7, -math.inf), (9, -1.0))),
    "whole rows": SamplingConfig(seed=2, top_k=0, n_probs=5, ignore_eos=True),
    "bias up": SamplingConfig(seed=2, n_probs=5, logit_bias=((7, 3.0),)),
    "penalties": SamplingConfig(seed=2, top_k=5, n_probs=5, repeat_penalty=1.5),
}


@pytest.mark.parametrize("name", PROBS)
def test_log_probabilities_of_the_model(name: str, vocab: Vocab) -> None:
    config = PROBS[name]
    ours, theirs = Sampler(config, vocab, N_CTX), Reference(config, vocab)
    for _, row in zip(range(50), rows(vocab.n_tokens, seed=1), strict=False):
        want = ours.logits_request()
        assert want.kind is (FULL if name == "whole rows" else TOP)
        token = ours.sample(extract(row, want))
        assert token == theirs.sample(row)
        logprobs = row.astype(np.float64) - np.logaddexp.reduce(row.astype(np.float64))
        best = np.argsort(-row, kind="stable")[: config.n_probs].tolist()
        assert [id for id, _ in ours.probs] == [token, *best]
        assert [p for _, p in ours.probs] == pytest.approx([logprobs[id] for id in (token, *best)], rel=1e-5)
        ours.accept((token,))
        theirs.accept(token)
    ours.close()
    theirs.close()


@pytest.mark.parametrize("name", ["default", "greedy", "xtc", "mirostat 2", "typical", "adaptive_p", "greedy, dry"])
def test_log_probabilities_of_the_draw(name: str, vocab: Vocab) -> None:
    config = replace(CASES[name].config, n_probs=4, post_sampling_probs=True)
    ours, theirs = Sampler(config, vocab, N_CTX), Reference(config, vocab)
    for _, row in zip(range(50), rows(vocab.n_tokens, seed=1), strict=False):
        token = ours.sample(extract(row, ours.logits_request()))
        assert token == theirs.sample(row)
        left = sorted(((p, id) for id, p in theirs.left() if p > 0), reverse=True)
        own = next(p for p, id in left if id == token)
        expected = [(token, math.log(own)), *((id, math.log(p)) for p, id in left[:4])]
        assert [p for _, p in ours.probs] == pytest.approx([p for _, p in expected], abs=1e-5)
        assert [id for id, _ in ours.probs] == [id for id, _ in expected]
        ours.accept((token,))
        theirs.accept(token)
    ours.close()
    theirs.close()


def test_names_of_samplers() -> None:
    assert samplers_by_name(["Top-K", "topp", "temp", "typ", "nucleus", "xtc"]) == (
        "top_k", "top_p", "temperature", "typ_p", "top_p", "xtc",
    )  # fmt: skip
    assert samplers_by_letter("edskypmxt") == SamplingConfig().samplers
    with pytest.raises(UsageError, match=r"^`samplers` has no topk2: choose from penalties, dry, top_n_sigma, "):
        samplers_by_name(["topk2"])
    with pytest.raises(UsageError, match=r"^`sampling_seq` has no z: choose from e .penalties., d .dry., "):
        samplers_by_letter("kz")


def test_a_bias_of_no_token(vocab: Vocab) -> None:
    with pytest.raises(UsageError, match=r"^`logit_bias` names token 2048: the model has tokens up to 2047"):
        Sampler(SamplingConfig(logit_bias=((vocab.n_tokens, 1.0),)), vocab, N_CTX)


def test_the_seed_that_libllama_takes_for_random_is_refused() -> None:
    with pytest.raises(UsageError, match="4294967294"):
        SamplingConfig(seed=2**32 - 1)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temp", [0.0, 0.5])
def test_biases_beyond_32_bits_decide_alone(temp: float, vocab: Vocab) -> None:
    row = next(rows(vocab.n_tokens, 1))
    best = int(row.argmax())
    drawn = []
    for biases in (((7, 1e300), (7, 1.7e308)), ((best, -1e300),)):
        sampler = Sampler(SamplingConfig(seed=1, temp=temp, logit_bias=biases), vocab, N_CTX)
        drawn.append(sampler.sample(extract(row, sampler.logits_request())))
        sampler.close()
    assert drawn[0] == 7
    assert drawn[1] != best
