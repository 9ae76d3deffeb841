"""Text to tokens and back: as llama.cpp does it, and never with half a character."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import llama_cpp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs
from support.chat_model import recommend
from support.zoo import N_VOCAB_SPM, make

from ggpipe.config.model import ModelConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.draft_messages import VocabOutline
from ggpipe.errors import ModelError, UsageError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.vocab import TextDecoder, Vocab

TALES = Path(__file__).parents[2] / "ggpipe" / "models" / "tales-target.gguf"
TEXTS = (
    "Once upon a time there was a king who had three sons.",
    "",
    " ",
    "  leading and trailing  ",
    "line\nline\r\n\n\ttab",
    "Naïve façade, größer, 王様と三人の息子",
    "🙂🇩🇪👩‍👩‍👧 emoji",
    "<|endoftext|>in front, and<|endoftext|>inside",
    "1234567890 3.14159 x = y**2",
    "a\x00b",
)
SPLIT_CHARACTERS = "née 🙂 王様 👩‍👩‍👧!"


@pytest.fixture(scope="module")
def tales() -> Iterator[Vocab]:
    vocab = Vocab(ModelFile.open(TALES), ModelConfig(path=TALES))
    yield vocab
    vocab.close()


@pytest.fixture(scope="module")
def byte_tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Vocab]:
    """A vocabulary that writes all but ASCII byte by byte, and puts a space in front."""
    path = make("llama-tied", tmp_path_factory.mktemp("vocab") / "spm.gguf", tokenizer="spm")
    vocab = Vocab(ModelFile.open(path), ModelConfig(path=path))
    yield vocab
    vocab.close()


@pytest.fixture(scope="module")
def theirs() -> Iterator[llama_cpp.Llama]:
    llama = llama_cpp.Llama(str(TALES), vocab_only=True, verbose=False)
    yield llama
    llama.close()


def test_what_it_says_of_itself(tales: Vocab, theirs: llama_cpp.Llama) -> None:
    assert tales.n_tokens == theirs.n_vocab() == 2048
    assert theirs.token_eos() == 0
    assert tales.end_tokens == (0, 2)  # of the text, and of a turn
    assert tales.suppressed_tokens == ()


def test_end_tokens_of_another_vocabulary(byte_tokens: Vocab) -> None:
    assert byte_tokens.n_tokens == N_VOCAB_SPM
    assert byte_tokens.end_tokens == (2,)


@pytest.mark.parametrize("text", TEXTS)
def test_tokens_are_llama_cpps(tales: Vocab, theirs: llama_cpp.Llama, text: str) -> None:
    assert tales.tokenize(text) == tuple(theirs.tokenize(text.encode(), add_bos=True, special=True))


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200))
def test_tokens_of_any_text_are_llama_cpps(tales: Vocab, theirs: llama_cpp.Llama, text: str) -> None:
    assert tales.tokenize(text) == tuple(theirs.tokenize(text.encode(), add_bos=True, special=True))


@settings(max_examples=150, deadline=None)
@given(st.text(max_size=200).filter(lambda text: "<|" not in text))
def test_pieces_add_up_to_the_text(tales: Vocab, text: str) -> None:
    tokens = tales.tokenize(text)
    assert b"".join(tales.piece(token) for token in tokens) == text.encode()


def test_a_long_text(tales: Vocab) -> None:
    text = "In a forest. " * 5000
    tokens = tales.tokenize(text)
    assert b"".join(map(tales.piece, tokens)) == text.encode()


def test_a_text_of_many_tokens_a_byte(byte_tokens: Vocab) -> None:
    """BOS and a space come in front: more tokens than bytes."""
    assert byte_tokens.tokenize("\x01") == (1, *byte_tokens.tokenize(" ")[1:2], 3 + 1)


def test_bytes_that_are_no_utf8_go_through(byte_tokens: Vocab) -> None:
    """`-e` makes them of \\xHH; they travel as surrogates, as in file names."""
    text = b"a\xff\xc3".decode("utf-8", "surrogateescape")
    assert byte_tokens.tokenize(text)[-2:] == (3 + 0xFF, 3 + 0xC3)


@pytest.mark.parametrize("data", [b"\xf4\x90\x80\x80", b"\xf5\x80\x80\x80", b"\xf7\xf7\xbf\xbf\xbf"])
def test_bytes_beyond_unicode_are_read_as_other_bytes_that_are_no_utf8(tales: Vocab, data: bytes) -> None:
    """libllama ends the process at a code point that is too large."""
    replaced = "\ufffd" * len(data)
    assert tales.tokenize(f"a{data.decode('utf-8', 'surrogateescape')}b") == tales.tokenize(f"a{replaced}b")


@pytest.mark.parametrize("kind", ["bpe", "spm"])
@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.text(max_size=20), st.booleans()), max_size=6))
def test_a_text_in_pieces_has_the_same_tokens(
    tales: Vocab, byte_tokens: Vocab, kind: str, pieces: list[tuple[str, bool]]
) -> None:
    vocab = tales if kind == "bpe" else byte_tokens
    special = vocab.special_texts[0]
    pieces = [(text if is_literal else f"x{text}{special}", is_literal) for text, is_literal in pieces]
    assert vocab.tokenize_pieces(pieces) == vocab.tokenize("".join(text for text, _ in pieces))


def test_literal_pieces_hold_no_special_token(tales: Vocab) -> None:
    end = "<|endoftext|>"
    assert set(tales.special_texts) == {end, "<|im_start|>", "<|im_end|>"}
    tokens = tales.tokenize_pieces([("a" + end, False), (f"b{end}", True), (" c" + end, False)])
    assert [i for i, token in enumerate(tokens) if token == 0] == [0, 2, len(tokens) - 1]  # the first is BOS
    assert b"".join(map(tales.piece, tokens)).decode() == f"ab{end} c"


@pytest.mark.parametrize("text", ["<|endoftext|>once", "once"])
@pytest.mark.parametrize("is_literal", [False, True])
def test_a_text_in_pieces_has_one_bos(text: str, is_literal: bool) -> None:
    with contextlib.closing(special(add_bos_token=True, bos_token_id=0)) as vocab:
        tokens = vocab.tokenize_pieces([(text, False), (" upon", is_literal)])
        assert tokens == vocab.tokenize("once upon")
        assert tokens.count(0) == 1


def test_special_tokens_have_no_text(tales: Vocab, byte_tokens: Vocab) -> None:
    assert tales.piece(0) == b""
    assert [byte_tokens.piece(token) for token in (0, 1, 2)] == [b""] * 3
    assert tales.tokenize("a<|endoftext|>")[-1] == 0


# What a model's file recommends


def test_sampling_that_the_file_recommends(tales: Vocab, tmp_path: Path) -> None:
    assert tales.sampling() == SamplingConfig()
    values: dict[str, float | str] = {
        "sequence": "top_k;unheard_of;temp", "temp": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.0,
        "xtc_probability": 0.1, "xtc_threshold": 0.2, "penalty_last_n": 5, "penalty_repeat": 1.1, "mirostat": 7,
        "mirostat_tau": 4.0, "mirostat_eta": "a word",
    }  # fmt: skip
    path = recommend(TALES, tmp_path / "recommends.gguf", values)
    vocab = Vocab(ModelFile.open(path), ModelConfig(path=path))
    found = vocab.sampling()
    vocab.close()
    others = {name: value for name, value in vars(found).items() if value != getattr(SamplingConfig, name)}
    assert others.pop("samplers") == ("top_k", "temperature")
    assert others == {
        "temp": 0.6, "top_k": 20, "top_p": 0.9, "min_p": 0.0, "xtc_probability": 0.1, "xtc_threshold": 0.2,
        "repeat_last_n": 5, "repeat_penalty": 1.1, "mirostat_tau": 4.0,
    }  # fmt: skip


# TextDecoder


def decoded(vocab: Vocab, tokens: tuple[int, ...]) -> list[str]:
    decoder = TextDecoder(vocab)
    return [*(decoder.push(token) for token in tokens), decoder.finish()]


def test_characters_split_over_tokens_wait_for_their_rest(byte_tokens: Vocab) -> None:
    tokens = byte_tokens.tokenize(SPLIT_CHARACTERS)
    assert len(tokens) > 2 * len(SPLIT_CHARACTERS), "this vocabulary does not split"
    pieces = decoded(byte_tokens, tokens)
    assert "".join(pieces) == " " + SPLIT_CHARACTERS
    assert all(len(piece) <= 1 for piece in pieces), "a token finishes one character at most"
    assert pieces[-1] == ""


@settings(max_examples=100, deadline=None)
@given(st.text(max_size=60), st.integers(0, 60))
def test_no_prefix_has_a_broken_character(byte_tokens: Vocab, text: str, at: int) -> None:
    tokens = byte_tokens.tokenize(text)
    whole = "".join(decoded(byte_tokens, tokens))
    decoder = TextDecoder(byte_tokens)
    so_far = "".join(decoder.push(token) for token in tokens[:at])
    assert whole.startswith(so_far)
    assert decoder.finish() in ("", "\N{REPLACEMENT CHARACTER}")
    if "\N{REPLACEMENT CHARACTER}" not in text:
        assert "\N{REPLACEMENT CHARACTER}" not in whole


def test_a_text_that_ends_inside_a_character(byte_tokens: Vocab) -> None:
    tokens = byte_tokens.tokenize("ab🙂")[:-1]
    assert decoded(byte_tokens, tokens)[-4:] == ["", "", "", "\N{REPLACEMENT CHARACTER}"]


@settings(max_examples=300, deadline=None)
@given(st.text("ab🙂", max_size=30), st.lists(st.text("ab🙂", min_size=1, max_size=4), max_size=3), st.integers(1, 4))
def test_stop_strings_are_never_shown(byte_tokens: Vocab, text: str, stops: list[str], n: int) -> None:
    """Tokens come one at a time; what is shown is looked at after each `n` of them."""
    decoder, whole = TextDecoder(byte_tokens, stops), TextDecoder(byte_tokens)
    shown, so_far = "", ""
    for i, token in enumerate(byte_tokens.tokenize(text)):
        shown += decoder.push(token)
        so_far += whole.push(token)
        if found := [so_far.find(stop) for stop in stops if stop in so_far]:
            assert decoder.is_stopped
            assert shown + decoder.finish() == so_far[: min(found)]
            return
        if i % n == 0:
            begun = max(k for stop in stops or [" "] for k in range(len(stop)) if so_far.endswith(stop[:k]))
            assert shown == so_far[: len(so_far) - begun]
    assert not decoder.is_stopped
    assert shown + decoder.finish() == so_far + whole.finish()


def test_a_byte_that_no_character_has(byte_tokens: Vocab) -> None:
    assert decoded(byte_tokens, (3 + 0xFF, 3 + ord("a"))) == ["\N{REPLACEMENT CHARACTER}", "a", ""]


def test_closing_twice_does_nothing() -> None:
    vocab = Vocab(ModelFile.open(TALES), ModelConfig(path=TALES))
    vocab.close()
    vocab.close()


def test_a_text_too_long_to_tokenize_is_a_usage_error(tales: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggpipe.llama.vocab.lib.llama_tokenize", lambda *_: -(2**31))
    with pytest.raises(UsageError, match="cannot tokenize"):
        tales.tokenize("text")


def test_a_draft_with_the_same_tokens_fits(tales: Vocab) -> None:
    draft = Vocab(ModelFile.open(TALES.with_name("tales-draft.gguf")), ModelConfig(path=TALES))
    outline = draft.outline()
    draft.close()
    tales.with_draft(outline)
    padded = structs.replace(outline, checksums=(*outline.checksums, *[0] * 128))
    tales.with_draft(padded)


def special(**tokens: int | bool) -> Vocab:
    """The demo target's vocabulary with other special tokens, by the names that GGUF gives them."""
    overrides = (f"tokenizer.ggml.{key}={type(value).__name__}:{str(value).lower()}" for key, value in tokens.items())
    return Vocab(ModelFile.open(TALES), ModelConfig(path=TALES, override_kv=tuple(overrides)))


@pytest.mark.parametrize(
    ("target", "draft"),
    [
        ({}, {"eos_token_id": 5}),
        ({"add_bos_token": False}, {"add_bos_token": False, "bos_token_id": 7}),
        ({"add_eos_token": True, "eos_token_id": 3}, {"add_eos_token": True, "eos_token_id": 3}),
    ],
)
def test_special_tokens_that_are_not_added_may_differ(target: dict[str, Any], draft: dict[str, Any]) -> None:
    """As llama.cpp's own speculation: fine-tunes often move EOS."""
    with contextlib.closing(special(**target)) as own, contextlib.closing(special(**draft)) as other:
        own.with_draft(other.outline())


@pytest.mark.parametrize(
    ("target", "draft", "words"),
    [
        ({}, {"bos_token_id": 7}, "the target adds token 0 as BOS, the draft token 7"),
        ({}, {"add_bos_token": False}, "the target adds token 0 as BOS, the draft nothing"),
        ({"add_eos_token": True}, {}, "the target adds token 0 as EOS, the draft nothing"),
        ({"add_eos_token": True}, {"add_eos_token": True, "eos_token_id": 5}, "token 0 as EOS, the draft token 5"),
    ],
)
def test_special_tokens_that_are_added_must_agree(target: dict[str, Any], draft: dict[str, Any], words: str) -> None:
    with (
        contextlib.closing(special(**target)) as own,
        contextlib.closing(special(**draft)) as other,
        pytest.raises(ModelError, match=words),
    ):
        own.with_draft(other.outline())


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda o: structs.replace(o, kind=o.kind + 1), "different kinds"),
        (lambda o: structs.replace(o, checksums=(*o.checksums, *[0] * 129)), "2048 tokens, the draft 2177"),
        (lambda o: structs.replace(o, checksums=(*o.checksums[:100], 1, *o.checksums[101:])), "token 100 is"),
    ],
)
def test_a_draft_that_does_not_fit(tales: Vocab, change: Callable[[VocabOutline], VocabOutline], words: str) -> None:
    with pytest.raises(ModelError, match=words):
        tales.with_draft(change(tales.outline()))
