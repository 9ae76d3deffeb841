"""MTP layers: the text stays libllama's wherever they are, and their draft tokens are llama.cpp's own."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from support import deepseek4
from support.architectures import SMALL, write
from support.draft_heads import all_at_once, chains_sent, modes_of
from support.mtp import PlainMtp, agreeing
from support.pipeline import local_session
from support.reference import Reference
from support.requests import asked

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.engine.session import Session
from ggpipe.errors import LaunchError, ModelError, SettingError
from ggpipe.llama.bundled import BUNDLED_HEAD
from ggpipe.stats.records import RequestStats

pytestmark = pytest.mark.usefixtures("eager_drafts")

N_CTX, N_TOKENS = 256, 40
PROMPT = tuple((5 + 37 * i + i * i) % 110 + 3 for i in range(40))
GREEDY, DRAWN = SamplingConfig(temp=0), SamplingConfig(temp=0.8, seed=5)
MODES = modes_of("mtp")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return agreeing("glm4moe", folder / "agreeing.gguf", n_layer=3)


def config_of(
    path: Path, *shares: float, own: bool = True, exact: bool = True, n_requests: int = 1, more: tuple[Path, ...] = ()
) -> EngineConfig:
    """`own`: MTP layers have a rank of their own, else they are in the first rank's process. `more`: draft models."""
    context = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=3 * n_requests, n_branches=16)
    target = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=3 * n_requests, n_branches=16, n_states=8, exact=exact)
    split = LayerSplit((1.0,)) if own else None
    models = ModelConfig(path=path)
    drafts = [DraftConfig(model=ModelConfig(path=draft), context=context, layer_split=split) for draft in more]
    drafts.append(DraftConfig(model=models, is_mtp=True, context=context, layer_split=split))
    pipeline = PipelineConfig(LayerSplit(shares), threads=(1,))
    return EngineConfig(models, target, pipeline, tuple(drafts), n_requests=n_requests)


@cache
def plain(path: Path, sampling: SamplingConfig, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """What libllama itself generates, with reference kernels."""
    with Reference(path, N_CTX, exact=True) as reference:
        return reference.generate(prompt, sampling, N_TOKENS)


def generate(
    session: Session, sampling: SamplingConfig, speculation: SpeculationConfig, prompt: tuple[int, ...] = PROMPT
) -> tuple[list[int], RequestStats]:
    stats = RequestStats()
    request = asked(prompt, sampling, N_TOKENS, speculation)
    return [token.id for token in session.stream(request, stats) if token.id >= 0], stats


PLACES: dict[str, tuple[tuple[float, ...], bool]] = {
    "two ranks": ((0.6, 0.4), True),
    "three ranks": ((1 / 3, 1 / 3, 1 / 3), True),
    "in the head's process": ((0.6, 0.4), False),
    "one rank": ((1.0,), False),
}


@pytest.mark.parametrize("place", PLACES)
def test_the_text_stays_libllamas(place: str, model: Path, full: bool) -> None:
    """Without `full`, each place has one mode in which tokens are drawn as well."""
    shares, own = PLACES[place]
    judged = right = 0
    with local_session(config_of(model, *shares, own=own), len(shares) + own) as session:
        assert [rank.drafter for rank in session.ranks] == [""] * len(shares) + ["mtp"]
        assert sum(b - a for rank in session.ranks[:-1] for a, b in [rank.layers]) == 3, "MTP layers are on no stage"
        for i, (name, speculation) in enumerate(MODES.items()):
            for sampling in (GREEDY, DRAWN) if full or list(PLACES)[i] == place else (GREEDY,):
                tokens, stats = generate(session, sampling, speculation)
                assert tokens == plain(model, sampling), name
                n, n_right = stats.counters.by_drafter.get(0, (0, 0))
                judged, right = judged + n, right + n_right
        short = PROMPT[:1]
        assert generate(session, GREEDY, MODES["speculative"], short)[0] == plain(model, GREEDY, short)
    assert judged > 30
    assert right > 0.3 * judged, "others would hardly ever be right"


@pytest.mark.parametrize("name", ["deepseek2", "glm4moe"])
def test_default_numerics(name: str, folder: Path) -> None:
    """The same text as without MTP layers, though libllama computes all rows after the last layer for them."""
    path = agreeing(name, folder / f"{name}.gguf")
    config = config_of(path, 0.5, 0.5, exact=False)
    with local_session(EngineConfig(config.model, config.context, config.pipeline), 2) as session:
        expected, _ = generate(session, GREEDY, SpeculationConfig(mode="iterative"))
    with local_session(config, 3) as session:
        assert generate(session, GREEDY, MODES["async"])[0] == expected
        tokens, stats = generate(session, GREEDY, MODES["speculative"])
    assert tokens == expected
    assert stats.counters.accepted_tokens > N_TOKENS / 8


@pytest.mark.parametrize("name", ["qwen35", "bailingmoe3"])
def test_hybrid_models(name: str, folder: Path) -> None:
    """Draft tokens are taken back by states, and accepted ones are computed again."""
    path = agreeing(name, folder / f"{name}.gguf")
    with local_session(config_of(path, 0.5, 0.5), 3) as session:
        found = {}
        for name, speculation in MODES.items():
            tokens, stats = generate(session, GREEDY, speculation)
            assert tokens == plain(path, GREEDY)
            found[name] = stats.counters.by_drafter.get(0, (0, 0))
    assert found["speculative"][1] > N_TOKENS / 4, found


def test_several_requests_at_a_time(model: Path) -> None:
    prompts = [PROMPT, PROMPT[:20], (*PROMPT[:30], *PROMPT[10:30])]
    with local_session(config_of(model, 0.6, 0.4, n_requests=3), 3) as session:
        for mode in ("async", "speculative"):  # the second time, prefixes are cached
            found, _ = all_at_once(session, [asked(tokens, GREEDY, N_TOKENS, MODES[mode]) for tokens in prompts])
            assert found == [plain(model, GREEDY, tokens) for tokens in prompts]
        tokens, stats = generate(session, GREEDY, MODES["speculative"])  # where others compute, few draft tokens pay
    assert tokens == plain(model, GREEDY)
    assert stats.counters.drafted_tokens > 0


@pytest.mark.parametrize("name", ["glm4moe", "deepseek4"])
def test_drafts_are_llama_cpps(name: str, monkeypatch: pytest.MonkeyPatch, folder: Path) -> None:
    """Drafted in turn with the target, along the same text."""
    sent = chains_sent(monkeypatch)
    path = folder / f"{name}-random.gguf"
    if name == "deepseek4":
        deepseek4.write_with_mtp(path, write(name, folder / "without.gguf", sizes=SMALL))
    else:
        write(name, path, n_mtp=1, sizes=SMALL)
    with local_session(config_of(path, 0.5, 0.5), 3) as session:
        tokens, _ = generate(session, GREEDY, MODES["speculative"])
        in_turn = dict(sent)
        assert generate(session, GREEDY, MODES["async"])[0] == tokens == plain(path, GREEDY)
    in_turn.pop(0, None)  # before the first token is sampled, llama.cpp drafts nothing
    expected = PlainMtp(path, exact=True).drafts(PROMPT, tokens, sorted(in_turn), 3)
    same = sum(drafted == expected[epoch][: len(drafted)] for epoch, drafted in in_turn.items())
    assert len(in_turn) >= N_TOKENS / 2
    assert same >= 0.95 * len(in_turn), "a near-tie may be decided differently"


def test_next_to_a_draft_model(model: Path, folder: Path) -> None:
    """Both draft for one tree, and n-grams as well."""
    draft = write("llama", folder / "small.gguf", sizes=SMALL)
    with local_session(config_of(model, 0.6, 0.4, more=(draft,)), 4) as session:
        tokens, stats = generate(session, GREEDY, SpeculationConfig(drafters=("draft", "mtp", "ngram")))
        assert tokens == plain(model, GREEDY)
        assert stats.counters.by_drafter.keys() >= {0, 1}
        assert generate(session, GREEDY, MODES["speculative"])[1].counters.by_drafter.keys() == {1}
        with pytest.raises(SettingError, match="eagle3 needs an EAGLE-3 head"):
            generate(session, GREEDY, SpeculationConfig(drafters=("eagle3",)))


def test_what_does_not_fit_is_said_in_one_line(model: Path, folder: Path) -> None:
    def refused(path: Path, message: str, error: type[Exception] = ModelError, own: bool = False) -> None:
        config = config_of(path, 1.0, own=own)
        with pytest.raises(error, match=message), local_session(config, 1 + own):
            pass

    refused(write("llama", folder / "draft.gguf"), "`spec_type` mtp does not fit `model`: it has no MTP layers; use")
    config = config_of(model, 1.0)
    two = DraftConfig(model=config.model, is_mtp=True, layer_split=LayerSplit((0.5, 0.5)))
    with (
        pytest.raises(LaunchError, match="rank 2 would get no layer: the model has 1 layers"),
        local_session(EngineConfig(config.model, config.context, config.pipeline, (two,)), 3),
    ):
        pass
    config = config_of(model, 1.0, more=(BUNDLED_HEAD,))
    message = r"`spec_type` mtp cannot be combined with an EAGLE-3 head \(tales-eagle3.gguf\): use one of them"
    with pytest.raises(ModelError, match=message), local_session(config, 3):
        pass
    config = config_of(model, 1.0, own=False)
    with local_session(config, 1) as session, pytest.raises(SettingError, match="draft is not loaded, but mtp is"):
        generate(session, GREEDY, SpeculationConfig(drafters=("draft",)))
