"""EAGLE-3 heads: the text stays libllama's wherever the head is, and its draft tokens are llama.cpp's own."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest
from support import head_sessions
from support.commands import TARGET
from support.eagle3 import PlainHead
from support.pipeline import local_session
from support.tale import GREEDY, N_TOKENS, generate, plain, prompt
from support.zoo import make

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.errors import ModelError, SettingError
from ggpipe.llama.bundled import BUNDLED_HEAD

pytestmark = pytest.mark.usefixtures("eager_drafts")

DRAFT = TARGET.with_name("tales-draft.gguf")


@pytest.mark.parametrize("place", head_sessions.PLACES)
def test_the_text_stays_libllamas(place: str) -> None:
    judged, right = head_sessions.check_text(BUNDLED_HEAD, "eagle3", place)
    assert judged > 30
    assert right > 0.45 * judged, "random states would hardly ever be right"


def test_default_numerics() -> None:
    assert head_sessions.check_default_numerics(BUNDLED_HEAD, "eagle3") > N_TOKENS / 4


def test_several_requests_at_a_time() -> None:
    head_sessions.check_several_requests(BUNDLED_HEAD, "eagle3")


def test_drafts_are_llama_cpps(monkeypatch: pytest.MonkeyPatch) -> None:
    drafts_of = PlainHead(TARGET, BUNDLED_HEAD).drafts
    n_accepted = head_sessions.check_drafts(BUNDLED_HEAD, "eagle3", drafts_of, monkeypatch, fast_kernels=False)
    assert n_accepted > N_TOKENS / 3


def test_what_does_not_fit_is_said_in_one_line(tmp_path: Path) -> None:
    heads = (BUNDLED_HEAD,)
    head_sessions.check_refused("head for models of width 256, and this one's is 192", heads=heads, target=DRAFT)
    gemma = make("gemma2", tmp_path / "g.gguf")
    head_sessions.check_refused("does not hand out the hidden states of 'gemma2' models", heads=heads, target=gemma)
    head_sessions.check_refused(r"several draft heads \(.*\): give one", heads=(BUNDLED_HEAD, BUNDLED_HEAD))
    data = BUNDLED_HEAD.read_bytes()
    at = data.index(b"eagle3.target_layers")
    deep = tmp_path / "deep.gguf"
    deep.write_bytes(data[:at] + data[at:].replace(struct.pack("<3i", 2, 4, 6), struct.pack("<3i", 2, 4, 8), 1))
    head_sessions.check_refused("reads the inputs of layers 2, 4, 8, and the model has 8 layers", heads=(deep,))
    words = make("llama", tmp_path / "words.gguf")
    head_sessions.check_refused("does not fit `model`", heads=heads, target=words)
    with (
        pytest.raises(ModelError, match="is an EAGLE-3 head, which only drafts"),
        local_session(head_sessions.config_of(1.0, target=BUNDLED_HEAD, heads=()), 1),
    ):
        pass


def test_a_kind_that_the_file_is_not() -> None:
    with (
        local_session(head_sessions.config_of(1.0, heads=(BUNDLED_HEAD,), own=False), 1) as session,
        pytest.raises(SettingError, match="an EAGLE-3 head"),
    ):
        generate(session, GREEDY, SpeculationConfig(drafters=("draft",)))
    with (
        local_session(head_sessions.config_of(1.0, heads=(DRAFT,), own=False), 1) as session,
        pytest.raises(SettingError, match="eagle3 needs an EAGLE-3 head"),
    ):
        generate(session, GREEDY, SpeculationConfig(drafters=("eagle3",)))


def test_a_head_next_to_a_draft_model() -> None:
    """Both draft for one tree."""
    config = head_sessions.config_of(0.5, 0.5, heads=(DRAFT, BUNDLED_HEAD), own=False)
    with local_session(config, 2) as session:
        tokens, stats = generate(session, GREEDY, SpeculationConfig(drafters=("draft", "eagle3")))
    assert tokens == plain(GREEDY, prompt())
    assert stats.counters.by_drafter.keys() == {0, 1}
