"""Several draft models draft for one tree, wherever they are: the text stays libllama's."""

from __future__ import annotations

from pathlib import Path

import pytest
from support.commands import TARGET
from support.pipeline import local_session
from support.tale import DRAWN, GREEDY, N_CTX, generate, plain, prompt
from support.zoo import make

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.stats.activity import wasted_s

pytestmark = pytest.mark.usefixtures("eager_drafts")

DRAFT = TARGET.with_name("tales-draft.gguf")
MODES = {
    "async": SpeculationConfig(n_draft=4),
    "trees": SpeculationConfig(n_draft=4, n_parallel=2, p_split=0.05),
    "speculative": SpeculationConfig(mode="speculative", n_draft=4),
    "with n-grams": SpeculationConfig(n_draft=4, drafters=("draft", "ngram")),
}


def config_of(target: Path, *drafts: tuple[Path, tuple[float, ...]], shares: tuple[float, ...]) -> EngineConfig:
    """`drafts`: of each draft model its file and its shares."""
    context = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=6, exact=True)
    models = [
        DraftConfig(
            model=ModelConfig(path=path),
            context=ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=2),
            layer_split=LayerSplit(own) if own else None,
        )
        for path, own in drafts
    ]
    return EngineConfig(
        ModelConfig(path=target), context, PipelineConfig(LayerSplit(shares), threads=(1,)), tuple(models)
    )


@pytest.mark.parametrize(
    ("places", "n_ranks"),
    [(((1.0,), (1.0,)), 4), (((1.0,), ()), 3), (((), ()), 2), (((0.5, 0.5), (1.0,)), 5), (((1.0,), (), ()), 3)],
    ids=["ranks of their own", "one in the head", "both in the head", "one over two ranks", "three"],
)
def test_the_text_stays_libllamas(places: tuple[tuple[float, ...], ...], n_ranks: int) -> None:
    """The second model is the target itself, and nearly always right; the others are the draft."""
    models = [TARGET if i == 1 else DRAFT for i in range(len(places))]
    config = config_of(TARGET, *zip(models, places, strict=True), shares=(0.5, 0.5))
    judged = dict.fromkeys(range(len(places)), 0)
    with local_session(config, n_ranks) as session:
        n_own_ranks = sum(max(len(own), 1) for own in places)
        assert [rank.model for rank in session.ranks[:3]] == [0, 0, 1]
        assert len(session.ranks) == 2 + n_own_ranks
        for name, speculation in MODES.items():
            for sampling in (GREEDY, DRAWN):
                tokens, stats = generate(session, sampling, speculation)
                assert tokens == plain(sampling, prompt()), name
                for drafter, (n, _) in stats.counters.by_drafter.items():
                    judged[drafter] = judged.get(drafter, 0) + n
                assert {run.model for run in stats.draft_runs} <= set(range(1, len(places) + 1))
                assert all(rank.runs for rank in stats.ranks if not rank.draft)
                assert all(seconds >= 0 for seconds in wasted_s(stats).values())
    assert min(judged.values()) > 0, "all of them draft"
    assert len(judged) == len(places) + 1, "n-grams, too"


def test_one_that_cannot_roll_back_is_left_out(tmp_path: Path) -> None:
    """The next one keeps its own id, and drafts."""
    target = make("llama", tmp_path / "llama.gguf")
    drafts = [(make("mamba", tmp_path / "mamba.gguf", tokenizer="spm"), (1.0,)), (target, (1.0,))]
    tokens = tuple(range(5, 40))
    with local_session(config_of(target, *drafts, shares=(1.0,)), 3) as session:
        (warning,) = session.warnings
        assert str(warning) == "`draft.model` mamba.gguf cannot roll back its KV state: running without it"
        assert session.engine.can_speculate
        output, _ = generate(session, GREEDY, SpeculationConfig(mode="iterative"), tokens)
        assert generate(session, GREEDY, SpeculationConfig(n_draft=4), tokens)[0] == output
        # `async` might be done before a draft rank on a busy machine has drafted anything; this mode waits for it.
        speculation = SpeculationConfig(mode="speculative", n_draft=4, drafters=("draft",))
        waited, stats = generate(session, GREEDY, speculation, tokens)
        assert waited == output
    assert stats.counters.by_drafter.keys() == {1}
    assert {run.model for run in stats.draft_runs} == {2}
    assert [rank.runs > 0 for rank in stats.ranks] == [True, False, True]
