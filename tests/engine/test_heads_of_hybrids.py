"""Draft heads of hybrid models: draft tokens are taken back by states, and accepted ones are computed again. The head
reads the states of these."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import pytest
from support import deepseek4, dflash
from support.architectures import SMALL, write
from support.draft_heads import all_at_once, chains_sent, modes_of
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
from ggpipe.stats.records import RequestStats

pytestmark = pytest.mark.usefixtures("eager_drafts")

N_CTX, N_TOKENS = 256, 40
PROMPT = tuple((5 + 37 * i + i * i) % 110 + 3 for i in range(40))
GREEDY = SamplingConfig(temp=0)
MODES = modes_of("dflash")
LAYERS = (1, 2)
IMAGES: dflash.Settings = {"rope.dimension_sections": [SMALL.width // 16, 0, 0, 0]}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def target_of(name: str, folder: Path) -> Path:
    return write(name, folder / f"{name}.gguf", n_layer=4, sizes=SMALL)


def config_of(target: Path, head: Path, n_requests: int = 1) -> EngineConfig:
    own = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=3 * n_requests, n_branches=16, fast_kernels=False)
    context = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=3 * n_requests, n_branches=16, n_states=8, exact=True)
    draft = DraftConfig(model=ModelConfig(path=head), context=own, layer_split=LayerSplit((1.0,)))
    pipeline = PipelineConfig(LayerSplit((0.5, 0.5)), threads=(1,))
    return EngineConfig(ModelConfig(path=target), context, pipeline, (draft,), n_requests=n_requests)


@cache
def plain(path: Path, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    """What libllama itself generates, with reference kernels."""
    with Reference(path, N_CTX, exact=True) as reference:
        return reference.generate(prompt, GREEDY, N_TOKENS)


@pytest.mark.parametrize("kind", [dflash.DFLASH, dflash.DSPARK, dflash.DFLASH_2])
@pytest.mark.parametrize("name", ["deepseek4", "qwen35", "lfm2", "nemotron_h", "bailingmoe3"])
def test_the_text_stays_libllamas(name: str, kind: str, folder: Path) -> None:
    target = target_of(name, folder)
    text = [*PROMPT, *plain(target)]
    settings = {**(IMAGES if name == "qwen35" else {}), "sample_from_anchor": False}
    head = dflash.write(
        folder / f"{name}-{kind}.gguf", target, follows=text, settings=settings, kind=kind, layers=LAYERS
    )
    judged = right = 0
    with local_session(config_of(target, head), 3) as session:
        for mode, speculation in MODES.items():
            stats = RequestStats()
            request = asked(PROMPT, GREEDY, N_TOKENS, speculation)
            tokens = [token.id for token in session.stream(request, stats) if token.id >= 0]
            assert tokens == plain(target), mode
            n, n_right = stats.counters.by_drafter.get(0, (0, 0))
            judged, right = judged + n, right + n_right
    assert judged > 30
    assert right > 0.2 * judged, "a random head would hardly ever be right"


@pytest.mark.parametrize("name", ["deepseek4", "qwen35moe", "qwen3next"])
def test_drafts_are_llama_cpps(name: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted in turn with the target, along the same text."""
    target = target_of(name, folder)
    head = dflash.write(folder / f"{name}-random.gguf", target, settings=IMAGES, kind=dflash.DSPARK, layers=LAYERS)
    sent = chains_sent(monkeypatch)
    with local_session(config_of(target, head), 3) as session:
        request = asked(PROMPT, GREEDY, N_TOKENS, MODES["speculative"])
        tokens = [token.id for token in session.stream(request) if token.id >= 0]
    sent.pop(0, None)  # before the first token is sampled, llama.cpp drafts nothing
    expected = dflash.PlainDFlash(target, head, dflash.DSPARK, len(LAYERS)).drafts(PROMPT, tokens, sorted(sent), 3)
    assert len(sent) >= N_TOKENS / 4
    assert all(drafted == expected[epoch][: len(drafted)] for epoch, drafted in sent.items())


def test_a_dspark_head_of_deepseek4(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its layers are DeepSeek-V4's own."""
    target = target_of("deepseek4", folder)
    head = deepseek4.write_head(folder / "deepseek4-own.gguf", target, LAYERS)
    sent = chains_sent(monkeypatch)
    with local_session(config_of(target, head), 3) as session:
        for mode in ("async", "speculative"):
            sent.clear()
            tokens = [t.id for t in session.stream(asked(PROMPT, GREEDY, N_TOKENS, MODES[mode])) if t.id >= 0]
            assert tokens == plain(target), mode
    sent.pop(0, None)
    expected = dflash.PlainDFlash(target, head, dflash.DSPARK, len(LAYERS)).drafts(PROMPT, tokens, sorted(sent), 3)
    assert len(sent) >= N_TOKENS / 4
    assert all(drafted == expected[epoch][: len(drafted)] for epoch, drafted in sent.items())


def test_several_requests_at_a_time(folder: Path) -> None:
    target = target_of("qwen35", folder)
    head = dflash.write(folder / "several.gguf", target, settings=IMAGES, kind=dflash.DSPARK, layers=LAYERS)
    prompts = [PROMPT, PROMPT[:20], (*PROMPT[:30], *PROMPT[10:30])]
    with local_session(config_of(target, head, n_requests=3), 3) as session:
        for mode in ("async", "speculative"):  # the second time, prefixes are cached
            found, _ = all_at_once(session, [asked(tokens, GREEDY, N_TOKENS, MODES[mode]) for tokens in prompts])
            assert found == [plain(target, tokens) for tokens in prompts]
