"""Texts of each sampler are llama.cpp's: whole model, its own chain, one token after the other. In every mode, and when
ranks are lost in the middle."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import pytest
from support.commands import TARGET
from support.pipeline import local_ranks
from support.reference import Reference
from support.requests import asked

from ggpipe.channel.client import ClientRequest
from ggpipe.channel.events import TokenReady
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.samplers import samplers_by_letter
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.engine.session import Session

PROMPT, N_PREDICT, N_CTX = "The king said to the queen, and the queen said to the king:", 24, 512
SAMPLINGS = {
    "dry": SamplingConfig(seed=1, dry_multiplier=0.8, dry_allowed_length=1, ignore_eos=True),
    "top_n_sigma": SamplingConfig(seed=2, top_n_sigma=1.0, temp=1.5, ignore_eos=True),
    "typical": SamplingConfig(seed=3, typical_p=0.6, ignore_eos=True),
    "dynamic temperature": SamplingConfig(seed=4, dynatemp_range=0.5, dynatemp_exponent=1.3, ignore_eos=True),
    "biases": SamplingConfig(seed=5, logit_bias=((5, 2.0), (11, -3.0), (13, float("-inf"))), ignore_eos=True),
    "another order": SamplingConfig(
        seed=6, samplers=samplers_by_letter("ktpe"), repeat_penalty=1.3, presence_penalty=0.2, ignore_eos=True
    ),
    "greedy, penalties": SamplingConfig(temp=0, repeat_penalty=1.2, dry_multiplier=0.5, ignore_eos=True),
    "xtc": SamplingConfig(seed=7, xtc_probability=0.5, xtc_threshold=0.05, ignore_eos=True),
    "xtc and penalties": SamplingConfig(
        seed=8, top_k=4, xtc_probability=0.4, xtc_threshold=0.1, repeat_penalty=1.2, ignore_eos=True
    ),
    "mirostat 1": SamplingConfig(seed=9, mirostat=1, mirostat_tau=3.0, ignore_eos=True),
    "mirostat 2": SamplingConfig(seed=10, mirostat=2, mirostat_tau=3.0, ignore_eos=True),
    "adaptive_p": SamplingConfig(
        seed=11, samplers=samplers_by_letter("kma"), adaptive_target=0.3, ignore_eos=True
    ),
}  # fmt: skip
TREES = SpeculationConfig(n_draft=6, n_parallel=4, p_split=0.05)
MODES = (None, TREES, SpeculationConfig(mode="speculative", n_draft=4))


@contextmanager
def loaded(n_ranks: int, n_ubatch: int) -> Iterator[Session]:
    config = EngineConfig(
        model=ModelConfig(path=TARGET),
        context=ContextConfig(n_ctx=N_CTX, n_ubatch=n_ubatch, n_seq=16, exact=True),
        pipeline=PipelineConfig(threads=(1,)),
        drafts=(
            DraftConfig(
                model=ModelConfig(path=TARGET.with_name("tales-draft.gguf")),
                context=ContextConfig(n_ctx=N_CTX, n_seq=16),
            ),
        ),
        n_requests=4,
    )
    with local_ranks(config, n_ranks) as head:
        engine = Session.load(head)
        yield engine


def finish(engine: Session, requests: Sequence[ClientRequest]) -> list[list[int]]:
    """The tokens of these requests."""
    tokens: dict[int, list[int]] = {request.id: [] for request in requests}
    while any(request.is_active for request in requests):
        for event in engine.step():
            if isinstance(event, TokenReady):
                tokens[event.request].append(event.token.id)
    return [tokens[request.id] for request in requests]


@pytest.fixture(scope="module")
def texts() -> dict[str, list[int]]:
    with Reference(TARGET, N_CTX, exact=True) as reference:
        prompt = reference.tokenize(PROMPT)
        return {name: reference.generate(prompt, sampling, N_PREDICT) for name, sampling in SAMPLINGS.items()}


def test_texts_are_llama_cpps_in_every_mode(texts: dict[str, list[int]]) -> None:
    assert len({tuple(text) for text in texts.values()}) == len(texts)
    with loaded(2, 64) as engine:
        prompt = engine.vocab.tokenize(PROMPT)
        for name, sampling in SAMPLINGS.items():
            requests = [
                engine.submit(asked(prompt, sampling, N_PREDICT, mode or SpeculationConfig(mode="iterative")))
                for mode in MODES
            ]
            assert finish(engine, requests) == [texts[name]] * len(MODES), name


def test_samplers_go_on_on_other_ranks(texts: dict[str, list[int]]) -> None:
    """Those that remember logits draw once more from the rows of the text."""
    with loaded(1, 8) as engine:
        prompt = engine.vocab.tokenize(PROMPT)
        for name, text in texts.items():
            for cuts in ((1, 7), (12, N_PREDICT - 1)):  # the second time with what the prefix cache has
                requests = [
                    engine.submit(asked(prompt, SAMPLINGS[name], N_PREDICT, TREES, resumed=text[:cut])) for cut in cuts
                ]
                assert finish(engine, requests) == [text[cut:] for cut in cuts], name
