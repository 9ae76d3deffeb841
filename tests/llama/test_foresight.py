"""What a seed says of tokens that are not drawn yet, against what llama.cpp draws."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ggpipe.config.model import ModelConfig
from ggpipe.config.samplers import samplers_by_letter
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.draft_messages import Drawing
from ggpipe.core.drafters.foresight import N_CANDIDATES, Foresight, Mixture
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits
from ggpipe.core.random_numbers import RandomNumbers
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import lib
from ggpipe.llama.params import best_of, whole_row
from ggpipe.llama.sampler import Sampler
from ggpipe.llama.vocab import Vocab

Logits = NDArray[np.float32]
TALES = Path(__file__).parents[2] / "ggpipe" / "models" / "tales-target.gguf"
N_STEPS, N_LEARNED = 400, 200
SAMPLINGS = {
    "default": SamplingConfig(seed=1),
    "whole": SamplingConfig(seed=2, temp=1, top_k=0, top_p=1, min_p=0),
    "whole, cool": SamplingConfig(seed=3, temp=0.6, top_k=0, top_p=1, min_p=0),
    "by id": SamplingConfig(seed=4, temp=0.9, top_k=0, top_p=1, min_p=0.05),
    "top-p alone": SamplingConfig(seed=5, temp=1, top_k=0, top_p=0.8, min_p=0),
    "top-k alone": SamplingConfig(seed=6, temp=1.2, top_k=5, top_p=1, min_p=0),
    "hot": SamplingConfig(seed=7, temp=1.5, top_k=100, top_p=0.99, min_p=0.02),
    "temperature first": SamplingConfig(seed=8, samplers=samplers_by_letter("tkp"), temp=0.7),
    "no temperature": SamplingConfig(seed=9, samplers=samplers_by_letter("k"), top_k=12),
}


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    vocab = Vocab(ModelFile.open(TALES), ModelConfig(path=TALES))
    yield vocab
    vocab.close()


def sampled(row: Logits, sampler: Sampler) -> int:
    """The token that llama.cpp's chain draws from the target's row."""
    wanted = sampler.logits_request()
    token = sampler.sample((best_of if wanted.kind is LogitsKind.TOP else whole_row)(0, row, wanted))
    sampler.accept((token,))
    return token


def drafted(row: Logits, drawing: Drawing) -> RowLogits:
    """What a draft model answers."""
    return best_of(0, row, LogitsRequest(LogitsKind.TOP, N_CANDIDATES, temp=drawing.whole_temp))


def rows(vocab: Vocab, noise: float) -> Iterator[tuple[Logits, Logits]]:
    """Logits of a target, and of a draft model that differs from it by so much noise."""
    rng = np.random.default_rng(11)
    for _ in range(N_STEPS):
        target = rng.standard_normal(vocab.n_tokens).astype(np.float32)
        target[rng.integers(0, vocab.n_tokens, 12)] += rng.gamma(2.0, 3.0, 12).astype(np.float32)
        yield target, target + rng.standard_normal(vocab.n_tokens).astype(np.float32) * np.float32(noise)


@pytest.mark.parametrize("seed", [0, 1, 42, 4_000_000_000])
def test_the_numbers_are_those_of_libllama(seed: int) -> None:
    n = 1 << 14
    numbers, candidates = RandomNumbers(seed), (lib.llama_token_data * n)()
    sampler = lib.llama_sampler_init_dist(seed)
    for place in range(330):  # beyond the generator's 624 values
        for candidate in candidates if place == 0 else ():
            candidate.logit = 0.0
        array = lib.llama_token_data_array(candidates, n, -1, False)
        lib.llama_sampler_apply(sampler, ctypes.byref(array))
        assert (array.selected + 0.5) / n == pytest.approx(numbers[place], abs=1 / n)
    lib.llama_sampler_free(sampler)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_draft_model_that_is_always_right_names_every_token(name: str, vocab: Vocab) -> None:
    sampler = Sampler(SAMPLINGS[name], vocab, 256)
    drawing = sampler.drawing
    assert drawing is not None
    foresight = Foresight(drawing, Mixture())
    named = most_probable = 0
    for place, (target, _) in enumerate(rows(vocab, 0)):
        answer = drafted(target, drawing)
        assert answer.ids is not None
        token, candidates = sampled(target, sampler), foresight.candidates(answer, place)
        assert [prob for _, prob in candidates] == sorted((prob for _, prob in candidates), reverse=True)
        assert 0 < sum(prob for _, prob in candidates) < 1 + 1e-5
        if place >= N_LEARNED:
            named += candidates[0][0] == token
            most_probable += answer.ids[0] == token
        foresight.learn(answer, place, token)
    sampler.close()
    n = N_STEPS - N_LEARNED
    # Of all tokens, only those are drawn too that are not among the best ones; between two borders lies some doubt.
    assert named > 0.8 * n
    assert named > most_probable + 0.5 * (n - most_probable)


@pytest.mark.parametrize("name", SAMPLINGS)
def test_a_draft_model_that_errs_learns_that_the_number_says_nothing(name: str, vocab: Vocab) -> None:
    sampler, mixture = Sampler(SAMPLINGS[name], vocab, 256), Mixture()
    drawing = sampler.drawing
    assert drawing is not None
    foresight = Foresight(drawing, mixture)
    rng = np.random.default_rng(12)
    for place, (target, _) in enumerate(rows(vocab, 0)):
        draft, best = target.copy(), target.argsort()[-12:]
        draft[best] = draft[rng.permutation(best)]
        foresight.learn(drafted(draft, drawing), place, sampled(target, sampler))
    sampler.close()
    assert mixture.shares[0] == max(mixture.shares)


def test_places_of_further_draws(vocab: Vocab) -> None:
    """Numbers may be skipped, and asked for again."""
    numbers = RandomNumbers(5)
    some = [numbers[place] for place in (700, 3, 0)]
    assert some == [RandomNumbers(5)[place] for place in (700, 3, 0)]


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(temp=0),
        SamplingConfig(top_k=1, temp=0, repeat_penalty=1.2),
        SamplingConfig(mirostat=1),
        SamplingConfig(mirostat=2),
        SamplingConfig(samplers=samplers_by_letter("kma"), adaptive_target=0.3),
        SamplingConfig(typical_p=0.5),
    ],
)
def test_where_no_single_number_decides(sampling: SamplingConfig, vocab: Vocab) -> None:
    sampler = Sampler(sampling, vocab, 256)
    assert sampler.drawing is None
    sampler.close()
