"""How draft models adjust their logits, against what llama.cpp does to the target's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray

from ggpipe.config.model import ModelConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.drafters.adjusted_rows import N_MORE, AdjustedRows
from ggpipe.core.drafters.foresight import N_CANDIDATES, Foresight, Mixture
from ggpipe.core.messages import LogitsKind, LogitsRequest
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.params import best_of, whole_row
from ggpipe.llama.sampler import Sampler
from ggpipe.llama.vocab import Vocab

Logits = NDArray[np.float32]
TALES = Path(__file__).parents[2] / "ggpipe" / "models" / "tales-target.gguf"
N_STEPS, N_CTX = 300, 256
N_PROBABLE, N_OFTEN = 40, 4
GREEDY = {
    "presence": SamplingConfig(temp=0, presence_penalty=1.5),
    "frequency": SamplingConfig(temp=0, frequency_penalty=0.4, repeat_last_n=20),
    "repeat": SamplingConfig(temp=0, repeat_penalty=1.3),
    "whole context": SamplingConfig(temp=0, repeat_penalty=1.1, presence_penalty=1, repeat_last_n=-1),
    "one token": SamplingConfig(temp=0, presence_penalty=9, repeat_last_n=1),
    "dry": SamplingConfig(temp=0, dry_multiplier=2.0, dry_allowed_length=1),
    "dry, any length": SamplingConfig(
        temp=0, dry_multiplier=0.5, dry_base=1.0, dry_allowed_length=0, dry_penalty_last_n=9
    ),
    "dry, whole context": SamplingConfig(
        temp=0, dry_multiplier=2, dry_base=1.2, dry_allowed_length=1, dry_penalty_last_n=-1
    ),
    "dry, no breakers": SamplingConfig(temp=0, dry_multiplier=1.0, dry_allowed_length=1, dry_sequence_breakers=()),
    "all": SamplingConfig(
        temp=0, dry_multiplier=1.0, dry_allowed_length=1, presence_penalty=0.5, logit_bias=((5, 3.0), (7, -2.0))
    ),
}
DRAWN = {
    "sorted": SamplingConfig(seed=1, temp=0.8, presence_penalty=1.5, dry_multiplier=1.0),
    "by id": SamplingConfig(seed=2, temp=0.9, top_k=0, top_p=1, min_p=0.05, repeat_penalty=1.2),
    "whole": SamplingConfig(seed=3, temp=0.8, top_k=0, top_p=1, min_p=0, frequency_penalty=0.5),
}


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    vocab = Vocab(ModelFile.open(TALES), ModelConfig(path=TALES))
    yield vocab
    vocab.close()


def rows(vocab: Vocab) -> Iterator[Logits]:
    """Logits in which the same few tokens are probable again and again, two of which are breakers of DRY."""
    rng = np.random.default_rng(3)
    probable = np.append(vocab.tokenize('a:"')[-2:], rng.integers(0, vocab.n_tokens, N_PROBABLE))
    for step in range(N_STEPS):
        row = rng.standard_normal(vocab.n_tokens).astype(np.float32)
        if step % 3 == 0:
            row[rng.permutation(probable)[:12]] += rng.gamma(3.0, 2.0, 12).astype(np.float32)
        else:
            row[probable[:N_OFTEN]] += rng.normal(10.0, 0.5, N_OFTEN).astype(np.float32)
        yield row


def sampled(row: Logits, sampler: Sampler) -> int:
    wanted = sampler.logits_request()
    return sampler.sample((best_of if wanted.kind is LogitsKind.TOP else whole_row)(0, row, wanted))


@pytest.mark.parametrize("name", GREEDY)
@pytest.mark.parametrize("n_path", [0, 1, 5])
def test_the_best_token_is_that_of_libllama(name: str, n_path: int, vocab: Vocab) -> None:
    """`n_path`: how many tokens the draft model is ahead of the text that it knows."""
    sampler = Sampler(GREEDY[name], vocab, N_CTX)
    adjustments = sampler.adjustments
    assert adjustments is not None
    prompt = vocab.tokenize("Once upon a time there was a king, and the king had a daughter")
    sampler.accept(prompt)
    own, text, n_changed = AdjustedRows(adjustments, prompt), list(prompt), 0
    asked = LogitsRequest(LogitsKind.TOP, 8 + N_MORE, also=adjustments.raised)
    for row in rows(vocab):
        token = sampled(row, sampler)
        found = best_of(0, row, asked)
        adjusted = own.adjusted(
            found, text[len(text) - n_path :] if n_path < len(text) - len(prompt) else text[len(prompt) :]
        )
        assert adjusted.ids is not None
        assert adjusted.ids[0] == token
        n_changed += found.ids is not None and found.ids[0] != token
        sampler.accept((token,))
        text.append(token)
        if len(text) - len(prompt) > n_path:
            own.accept(text[-1 - n_path])
    sampler.close()
    assert n_changed > N_STEPS / 50


@pytest.mark.parametrize("name", DRAWN)
def test_a_draft_model_that_is_always_right_foresees_draws(name: str, vocab: Vocab) -> None:
    sampler = Sampler(DRAWN[name], vocab, N_CTX)
    drawing, adjustments = sampler.drawing, sampler.adjustments
    assert drawing is not None
    assert adjustments is not None
    own, foresight, named = AdjustedRows(adjustments, ()), Foresight(drawing, Mixture()), 0
    asked = LogitsRequest(LogitsKind.TOP, N_CANDIDATES + N_MORE, temp=drawing.whole_temp)
    for place, row in enumerate(rows(vocab)):
        token = sampled(row, sampler)
        found = own.adjusted(best_of(0, row, asked), (), drawing.whole_temp)
        candidates = foresight.candidates(found, place)
        assert 0 < sum(prob for _, prob in candidates) < 1 + 1e-5
        named += candidates[0][0] == token
        foresight.learn(found, place, token)
        sampler.accept((token,))
        own.accept(token)
    sampler.close()
    assert named > 0.8 * N_STEPS


def test_probabilities_are_those_of_the_adjusted_logits(vocab: Vocab) -> None:
    """Where all logits are known."""
    sampler = Sampler(DRAWN["whole"], vocab, N_CTX)
    assert sampler.adjustments is not None
    asked = LogitsRequest(LogitsKind.TOP, vocab.n_tokens, temp=0.8)
    text = tuple(range(5, 60)) * 2
    for row in rows(vocab):
        found = AdjustedRows(sampler.adjustments, text).adjusted(best_of(0, row, asked), (), 0.8)
        assert found.ids is not None
        logits = np.empty(vocab.n_tokens)
        logits[list(found.ids)] = found.logits
        probs = np.exp(logits / 0.8 - np.logaddexp.reduce(logits / 0.8))
        assert found.log_sum_exp == pytest.approx(np.logaddexp.reduce(logits / 0.8), abs=1e-5)
        np.testing.assert_allclose(found.below, (np.cumsum(probs) - probs)[list(found.ids)], atol=1e-5)
        break
    sampler.close()


@pytest.mark.parametrize(
    "sampling",
    [
        SamplingConfig(),
        SamplingConfig(presence_penalty=1, repeat_last_n=0),
        SamplingConfig(mirostat=1, repeat_penalty=2),
    ],
)
def test_where_nothing_is_adjusted(sampling: SamplingConfig, vocab: Vocab) -> None:
    sampler = Sampler(sampling, vocab, N_CTX)
    assert sampler.adjustments is None
    sampler.close()
