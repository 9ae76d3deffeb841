"""The same text in the tokens of two vocabularies, and tokenizers as files of their own."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

import pytest
from support.chat_model import add_tokens
from support.commands import TARGET
from support.zoo import make

from ggpipe.config.model import ModelConfig
from ggpipe.errors import ModelError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.tokenizer_file import tokenizer_of
from ggpipe.llama.translator import TextTranslator
from ggpipe.llama.vocab import Vocab
from scripts.models.renumber import renumbered

DRAFT = TARGET.with_name("tales-draft.gguf")
TEXTS = (
    "Once upon a time there was a king, and he had a daughter.",
    "naïve café: 日本語 and 🙂\n\n\tdef f(x):\n        return x ** 2\n",
    " a  b   c\n \n",
)


def opened(path: Path) -> Vocab:
    return Vocab(path, ModelConfig(path=path))


@pytest.fixture(scope="module")
def vocabularies(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Vocab, Vocab]]:
    """Of a target with a further special token, and of a draft with other numbers and another one."""
    folder = tmp_path_factory.mktemp("vocabularies")
    target = add_tokens(TARGET, folder / "target.gguf", ("<|turn|>", "<|think|>"), like=5)
    draft = add_tokens(renumbered(DRAFT, folder / "draft.gguf"), folder / "more.gguf", ("<|think|>", "<|own|>"), like=5)
    with contextlib.closing(opened(target)) as own, contextlib.closing(opened(draft)) as other:
        yield own, other


@pytest.mark.parametrize("text", TEXTS)
def test_text_stays_the_same(vocabularies: tuple[Vocab, Vocab], text: str) -> None:
    own, other = vocabularies
    translator = TextTranslator(own, other)
    there = translator.draft_tokens(b"".join(map(translator.target_text, own.inner_tokens(text))))
    assert there == other.inner_tokens(text)
    back = translator.target_tokens(b"".join(map(translator.draft_text, there)))
    assert back == own.inner_tokens(text)
    assert there != back


def test_vocabularies_of_different_kinds(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "words.gguf", tokenizer="spm")
    with contextlib.closing(opened(TARGET)) as own, contextlib.closing(opened(path)) as other:
        translator = TextTranslator(own, other)
        for text in TEXTS:
            there = translator.draft_tokens(text.encode())
            assert b"".join(map(translator.draft_text, there)) == text.encode()


def test_special_tokens(vocabularies: tuple[Vocab, Vocab]) -> None:
    """Those with the same name are the same. The target's others are read as their names, the draft's have no text."""
    own, other = vocabularies
    translator = TextTranslator(own, other)
    turn, think = own.special_tokens["<|turn|>"], own.special_tokens["<|think|>"]
    theirs, alone = other.special_tokens["<|think|>"], other.special_tokens["<|own|>"]
    assert translator.draft_tokens(translator.target_text(think)) == (theirs,)
    assert translator.target_tokens(translator.draft_text(theirs)) == (think,)
    assert translator.draft_tokens(translator.target_text(turn)) == other.inner_tokens("<|turn|>")
    assert translator.target_tokens(translator.draft_text(alone)) == ()


def test_ends(vocabularies: tuple[Vocab, Vocab]) -> None:
    own, other = vocabularies
    translator = TextTranslator(own, other)
    assert translator.draft_ends == frozenset(other.end_tokens)
    for end in set(own.end_tokens) - {own.bos}:
        assert translator.draft_tokens(translator.target_text(end)) == (other.turn_end,)
    for end in other.end_tokens:
        assert translator.target_tokens(translator.draft_text(end)) == ()


def test_prompts_begin_as_the_draft_model_wants_them(vocabularies: tuple[Vocab, Vocab]) -> None:
    own, other = vocabularies
    translator = TextTranslator(own, other)
    text = b"".join(map(translator.target_text, own.tokenize(TEXTS[0])))
    assert translator.draft_prompt(text) == other.tokenize(TEXTS[0])
    assert translator.draft_prompt(b"") == (other.bos,)


def test_banned_tokens(vocabularies: tuple[Vocab, Vocab]) -> None:
    """Those with the same text."""
    own, other = vocabularies
    translator = TextTranslator(own, other)
    (king,) = own.inner_tokens(" king")
    assert translator.draft_banned((king, own.bos)) == other.inner_tokens(" king")


def test_a_tokenizer_as_a_file(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.gguf"
    path.write_bytes(tokenizer_of(TARGET))
    assert path.stat().st_size < 100_000
    with contextlib.closing(opened(path)) as alone, contextlib.closing(opened(TARGET)) as own:
        assert alone.outline() == own.outline()
        assert alone.tokenize(TEXTS[0]) == own.tokenize(TEXTS[0])
    with pytest.raises(ModelError, match="holds no language model"):
        ModelFile.open(path)


def test_no_tokenizer(tmp_path: Path) -> None:
    path = tmp_path / "none.gguf"
    for data in (b"", b"GGUF", b"ABCD" + bytes(20), TARGET.read_bytes()[:100]):
        path.write_bytes(data)
        with pytest.raises(ModelError, match=r"none\.gguf"):
            tokenizer_of(path)
