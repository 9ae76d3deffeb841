"""EAGLE-3 heads: the text stays libllama's wherever the head is, and its draft tokens are llama.cpp's own."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from support.commands import TARGET
from support.draft_heads import all_at_once, chains_sent, modes_of
from support.eagle3 import PlainHead
from support.pipeline import local_session
from support.requests import asked
from support.tale import DRAWN, GREEDY, N_CTX, N_TOKENS, generate, plain, prompt
from support.zoo import make

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.errors import ModelError, SettingError
from ggpipe.llama.bundled import BUNDLED_HEAD

DRAFT = TARGET.with_name("tales-draft.gguf")
ALONE = ("eagle3",)
MODES = modes_of("eagle3")


@pytest.fixture(autouse=True)
def eager_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafts that step back behind whatever else runs on this machine might draft nothing at all."""
    monkeypatch.setattr("ggpipe.llama.machine.yield_to_others", lambda: None)


def config_of(
    *shares: float,
    own: bool = True,
    exact: bool = True,
    heads: tuple[Path, ...] = (BUNDLED_HEAD,),
    target: Path = TARGET,
    n_requests: int = 1,
) -> EngineConfig:
    """`own`: each head has a rank of its own, else it is inside the first rank's process."""
    context = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=2 * n_requests, n_branches=16)
    drafts = tuple(
        DraftConfig(model=ModelConfig(path=head), context=context, layer_split=LayerSplit((1.0,)) if own else None)
        for head in heads
    )
    target_context = ContextConfig(n_ctx=N_CTX, n_ubatch=32, n_seq=2 * n_requests, n_branches=16, exact=exact)
    pipeline = PipelineConfig(LayerSplit(shares), threads=(1,))
    return EngineConfig(ModelConfig(path=target), target_context, pipeline, drafts, n_requests=n_requests)


@pytest.mark.parametrize(
    ("shares", "own"),
    [((0.5, 0.5), True), ((0.4, 0.3, 0.3), True), ((0.6, 0.4), False), ((1.0,), False)],
    ids=["two ranks", "three ranks", "in the head's process", "one rank"],
)
def test_the_text_stays_libllamas(shares: tuple[float, ...], own: bool) -> None:
    judged = right = 0
    with local_session(config_of(*shares, own=own), len(shares) + own) as session:
        assert [rank.drafter for rank in session.ranks] == [""] * len(shares) + ["eagle3"]
        for name, speculation in MODES.items():
            for sampling in (GREEDY, DRAWN):
                tokens, stats = generate(session, sampling, speculation)
                assert tokens == plain(sampling, prompt()), name
                n, n_right = stats.counters.by_drafter.get(0, (0, 0))
                if sampling is GREEDY:
                    judged, right = judged + n, right + n_right
        short = prompt()[:1]  # no state to draft from, until a token is accepted
        assert generate(session, GREEDY, MODES["speculative"], short)[0] == plain(GREEDY, short)
    assert judged > 50
    assert right > 0.45 * judged, "random states would hardly ever be right"


def test_default_numerics() -> None:
    """The same text as without draft tokens: a few near-ties aside, which this one does not have."""
    with local_session(config_of(0.5, 0.5, exact=False), 3) as session:
        expected, _ = generate(session, GREEDY, SpeculationConfig(mode="iterative"))
        assert generate(session, GREEDY, MODES["async"])[0] == expected
        tokens, stats = generate(session, GREEDY, MODES["speculative"])  # where no drafter pauses
    assert tokens == expected
    assert stats.counters.accepted_tokens > N_TOKENS / 4


def test_several_requests_at_a_time() -> None:
    prompts = [prompt(), prompt()[:20], (*prompt()[:40], *prompt()[10:30])]
    with local_session(config_of(0.5, 0.5, n_requests=3), 3) as session:
        for mode in ("async", "speculative"):  # the second time, prefixes are cached
            found, drafted = all_at_once(session, [asked(tokens, GREEDY, N_TOKENS, MODES[mode]) for tokens in prompts])
            assert found == [plain(GREEDY, tokens) for tokens in prompts]
    assert max(drafted) > 0, drafted  # where others' tokens fill the pipeline, fewer are worth it


def test_drafts_are_llama_cpps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Drafted in turn with the target, along the same text."""
    sent = chains_sent(monkeypatch)
    with local_session(config_of(0.4, 0.3, 0.3), 4) as session:
        tokens, stats = generate(session, GREEDY, MODES["speculative"])
    sent.pop(0, None)  # before the first token is sampled, llama.cpp drafts nothing
    expected = PlainHead(TARGET, BUNDLED_HEAD).drafts(prompt(), tokens, sorted(sent), 3)
    same = sum(drafted == expected[epoch][: len(drafted)] for epoch, drafted in sent.items())  # fewer at the end
    assert len(sent) >= N_TOKENS / 4
    assert same >= 0.95 * len(sent), "a near-tie may be decided differently"
    assert stats.counters.accepted_tokens > N_TOKENS / 3


def test_what_does_not_fit_is_said_in_one_line(tmp_path: Path) -> None:
    def refused(message: str, *shares: float, **settings: object) -> None:
        config = config_of(*(shares or (1.0,)), own=False, **settings)  # type: ignore[arg-type]
        with pytest.raises(ModelError, match=message), local_session(config, max(len(shares), 1)):
            pass

    refused("head for models of width 256, and this one's is 128", target=DRAFT)
    refused("does not hand out the hidden states of 'gemma2' models", target=make("gemma2", tmp_path / "g.gguf"))
    refused(r"several EAGLE-3 heads \(.*\): give one", heads=(BUNDLED_HEAD, BUNDLED_HEAD))
    data = BUNDLED_HEAD.read_bytes()
    at = data.index(b"eagle3.target_layers")
    deep, bare = tmp_path / "deep.gguf", tmp_path / "bare.gguf"
    deep.write_bytes(data[:at] + data[at:].replace(struct.pack("<3i", 2, 4, 6), struct.pack("<3i", 2, 4, 8), 1))
    refused("reads the inputs of layers 2, 4, 8, and the model has 8 layers", heads=(deep,))
    bare.write_bytes(data.replace(b"token_embd.weight", b"token_else.weight", 1))
    refused("no token embeddings of its own", heads=(bare,))
    words = make("llama", tmp_path / "words.gguf")
    refused("does not fit `model`", target=words)
    with (
        pytest.raises(ModelError, match="is an EAGLE-3 head, which only drafts"),
        local_session(config_of(1.0, target=BUNDLED_HEAD, heads=()), 1),
    ):
        pass


def test_a_kind_that_the_file_is_not() -> None:
    with local_session(config_of(1.0, own=False), 1) as session, pytest.raises(SettingError, match="an EAGLE-3 head"):
        generate(session, GREEDY, SpeculationConfig(drafters=("draft",)))
    with (
        local_session(config_of(1.0, own=False, heads=(DRAFT,)), 1) as session,
        pytest.raises(SettingError, match="eagle3 needs an EAGLE-3 head"),
    ):
        generate(session, GREEDY, SpeculationConfig(drafters=ALONE))


def test_a_head_next_to_a_draft_model() -> None:
    """Both draft for one tree."""
    config = config_of(0.5, 0.5, heads=(DRAFT, BUNDLED_HEAD), own=False)
    with local_session(config, 2) as session:
        tokens, stats = generate(session, GREEDY, SpeculationConfig(drafters=("draft", "eagle3")))
    assert tokens == plain(GREEDY, prompt())
    assert stats.counters.by_drafter.keys() == {0, 1}
