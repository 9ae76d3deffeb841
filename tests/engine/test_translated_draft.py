"""A draft model whose tokens have other numbers than the target's, or whose vocabulary is another one."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import TARGET
from support.pipeline import local_session
from support.requests import asked
from support.zoo import make

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.engine.session import Session
from ggpipe.stats.records import RequestStats
from scripts.models.renumber import renumbered

DRAFT = TARGET.with_name("tales-draft.gguf")
PROMPT = "Once upon a time there was a poor miller who had a beautiful daughter. One day"
GREEDY, DRAWN = SamplingConfig(temp=0.0, ignore_eos=True), SamplingConfig(temp=0.8, seed=5, ignore_eos=True)
MODES = {
    "waits": SpeculationConfig(mode="speculative", n_draft=4, drafters=("draft",)),
    "async": SpeculationConfig(mode="async", drafters=("draft",)),
    "several": SpeculationConfig(mode="async"),
    "thresholds": SpeculationConfig(mode="async", policy="thresholds", n_min=2),
}


@pytest.fixture(scope="module")
def draft(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return renumbered(DRAFT, tmp_path_factory.mktemp("renumbered") / "draft.gguf")


def config_of(draft: Path, n_target: int, n_draft: int) -> EngineConfig:
    context = ContextConfig(n_ctx=512, exact=True)
    one = DraftConfig(
        model=ModelConfig(path=draft),
        context=ContextConfig(n_ctx=512),
        layer_split=LayerSplit((1.0 / n_draft,) * n_draft) if n_draft else None,
    )
    return EngineConfig(
        model=ModelConfig(path=TARGET),
        context=context,
        pipeline=PipelineConfig(threads=(1,), layer_split=LayerSplit((1.0 / n_target,) * n_target)),
        drafts=(one,),
    )


def written(
    session: Session, sampling: SamplingConfig, speculation: SpeculationConfig
) -> tuple[list[int], RequestStats]:
    stats = RequestStats()
    request = asked(session.vocab.tokenize(PROMPT), sampling, 100, speculation)
    return [token.id for token in session.stream(request, stats)], stats


@pytest.mark.parametrize(("n_target", "n_draft"), [(1, 0), (1, 1), (2, 2)])
def test_the_text_is_the_targets(draft: Path, n_target: int, n_draft: int) -> None:
    with local_session(config_of(draft, n_target, n_draft), n_target + n_draft) as session:
        (warning,) = session.warnings
        assert str(warning).startswith("`draft.model` has another vocabulary than `model` (token ")
        for sampling in (GREEDY, DRAWN):
            plain, _ = written(session, sampling, SpeculationConfig(mode="iterative"))
            for name, speculation in MODES.items():
                tokens, stats = written(session, sampling, speculation)
                assert tokens == plain, name
                if name == "waits":
                    assert stats.counters.accepted_tokens > 20


def test_it_drafts_as_well_as_with_the_targets_tokens(draft: Path) -> None:
    accepted = []
    for path in (DRAFT, draft):
        with local_session(config_of(path, 1, 1), 2) as session:
            _, stats = written(session, GREEDY, MODES["waits"])
            accepted.append((stats.counters.accepted_tokens, stats.counters.submitted_tokens))
    (own, n_own), (other, n_other) = accepted
    assert abs(own - other) <= 2
    assert abs(n_own - n_other) <= 8


def test_another_tokenizer(tmp_path: Path) -> None:
    """With random weights: few draft tokens are right."""
    path = make("llama", tmp_path / "words.gguf", tokenizer="spm")
    with local_session(config_of(path, 1, 1), 2) as session:
        assert "different kinds" in str(session.warnings[0])
        plain, _ = written(session, DRAWN, SpeculationConfig(mode="iterative"))
        for name, speculation in MODES.items():
            tokens, stats = written(session, DRAWN, speculation)
            assert tokens == plain, name
            assert stats.counters.drafted_tokens > 0, name
