"""DFlash heads: the text stays libllama's wherever the head is, and its draft tokens are llama.cpp's own."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from support import dflash, head_sessions
from support.commands import TARGET
from support.pipeline import local_session
from support.tale import GREEDY, generate, plain, prompt
from support.zoo import make

from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.errors import ModelError, SettingError
from ggpipe.llama.bundled import BUNDLED_HEAD
from ggpipe.llama.draft_heads import needs_of
from ggpipe.llama.gguf import ModelFile

pytestmark = pytest.mark.usefixtures("eager_drafts")

DRAFT = TARGET.with_name("tales-draft.gguf")


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By kind. Right now and then: they know which token follows which in the text that comes."""
    folder, text = tmp_path_factory.mktemp("dflash"), [*prompt(), *plain(GREEDY, prompt())]
    return {
        kind: dflash.write(
            folder / f"{kind}.gguf", TARGET, follows=text, settings={"sample_from_anchor": False}, kind=kind
        )
        for kind in dflash.SETTINGS
    }


@pytest.fixture
def head(heads: dict[str, Path]) -> Path:
    return heads[dflash.DFLASH]


@pytest.mark.each_value
@pytest.mark.parametrize("kind", dflash.SETTINGS)
@pytest.mark.parametrize("place", head_sessions.PLACES)
def test_the_text_stays_libllamas(heads: dict[str, Path], place: str, kind: str) -> None:
    judged, right = head_sessions.check_text(heads[kind], "dflash", place)
    assert judged > 50
    assert right > 0.2 * judged, "a random head would hardly ever be right"


def test_default_numerics(head: Path) -> None:
    assert head_sessions.check_default_numerics(head, "dflash") > 0


def test_several_requests_at_a_time(head: Path) -> None:
    head_sessions.check_several_requests(head, "dflash")


def test_drafts_are_llama_cpps(head: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts_of = dflash.PlainDFlash(TARGET, head).drafts
    assert head_sessions.check_drafts(head, "dflash", drafts_of, monkeypatch) > 0


_WINDOW: dflash.Settings = {"attention.sliding_window": 24, "attention.sliding_window_pattern": [True, False]}


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("dflash", {}),
        ("dflash", _WINDOW),
        ("dflash", {"attention.causal": False}),
        ("dflash", {"rope.dimension_sections": [16, 0, 0, 0]}),
        ("dspark", {}),
        ("dspark", _WINDOW),
        ("dspark", {"sample_from_anchor": False}),
        ("dspark", {"rope.dimension_sections": [16, 0, 0, 0]}),
        ("dflash2", {}),
        ("dflash2", _WINDOW),
    ],
    ids=["dflash", "dflash, a sliding window", "dflash, says that blocks are not causal", "dflash, for images",
         "dspark", "dspark, a sliding window", "dspark, masks only", "dspark, for images",
         "dflash2", "dflash2, a sliding window"],
)  # fmt: skip
def test_drafts_of_random_heads(
    kind: str, settings: dflash.Settings, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = dflash.write(tmp_path / "head.gguf", TARGET, settings=settings, kind=kind)
    drafts_of = dflash.PlainDFlash(TARGET, path, kind).drafts
    head_sessions.check_drafts(path, "dflash", drafts_of, monkeypatch, fast_kernels=False)


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_head_of_few_tokens(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = dflash.write(tmp_path / "head.gguf", TARGET, drafts=range(300, 700), kind=kind)
    drafts_of = dflash.PlainDFlash(TARGET, path, kind).drafts
    head_sessions.check_drafts(path, "dflash", drafts_of, monkeypatch, fast_kernels=False)


def test_what_does_not_fit_is_said_in_one_line(head: Path, tmp_path: Path) -> None:
    head_sessions.check_refused("head for models of width 256, and this one's is 192", heads=(head,), target=DRAFT)
    gemma = make("gemma2", tmp_path / "g.gguf")
    head_sessions.check_refused("does not hand out the hidden states of 'gemma2' models", heads=(head,), target=gemma)
    head_sessions.check_refused(r"several draft heads \(.*\): give one", heads=(BUNDLED_HEAD, head))
    deep = dflash.write(tmp_path / "deep.gguf", TARGET, settings={"target_layers": [2, 4, 8]})
    head_sessions.check_refused("reads the inputs of layers 2, 4, 8, and the model has 8 layers", heads=(deep,))
    words = make("llama", tmp_path / "words.gguf")
    head_sessions.check_refused("does not fit `model`", heads=(head,), target=words)
    with (
        pytest.raises(ModelError, match="is a DFlash head, which only drafts"),
        local_session(head_sessions.config_of(1.0, target=head, heads=()), 1),
    ):
        pass
    config = head_sessions.config_of(0.5, 0.5, heads=(head,))
    config = replace(config, drafts=(replace(config.drafts[0], layer_split=LayerSplit((0.5, 0.5))),))
    with pytest.raises(ModelError, match="heads run on one rank, and it has 2"), local_session(config, 4):
        pass


@pytest.mark.parametrize(
    ("settings", "mask", "message"),
    [
        ({}, None, "does not say which token is the mask"),
        ({"block_size": 1}, dflash.MASK, "drafts blocks of 1 tokens"),
        ({"target_layers": 3}, dflash.MASK, "does not say which of its target's states it reads"),
    ],
    ids=["no mask", "block", "no layers"],
)
def test_files_that_do_not_work(settings: dflash.Settings, mask: int | None, message: str, tmp_path: Path) -> None:
    path = dflash.write(tmp_path / "head.gguf", TARGET, settings=settings, mask=mask)
    with pytest.raises(ModelError, match=message):
        needs_of(ModelFile.open(path))


def test_a_kind_that_the_file_is_not(head: Path) -> None:
    for drafters, needed in ((("eagle3",), "eagle3 needs an EAGLE-3 head"), (("draft",), "draft needs a draft model")):
        with (
            local_session(head_sessions.config_of(1.0, heads=(head,), own=False), 1) as session,
            pytest.raises(SettingError, match=f"{needed}, and .* names a DFlash head"),
        ):
            generate(session, GREEDY, SpeculationConfig(drafters=drafters))


def test_a_head_next_to_a_draft_model_and_ngrams(head: Path) -> None:
    """All draft for one tree."""
    with local_session(head_sessions.config_of(0.5, 0.5, heads=(DRAFT, head), own=False), 2) as session:
        tokens, stats = generate(session, GREEDY, SpeculationConfig(drafters=("draft", "dflash", "ngram")))
    assert tokens == plain(GREEDY, prompt())
    assert stats.counters.by_drafter.keys() >= {0, 1}
