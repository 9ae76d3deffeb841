"""Forced text on a real vocabulary: the tokens that an output has there, in any layout."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from support.grammars import GRAMMARS, SCHEMAS, followed

from ggpipe.llama import forced_text
from ggpipe.llama.forced_text import ByteVocab, ForcedText
from ggpipe.llama.vocab import Vocab
from ggpipe.text.grammar.check import Constraint, check

SCHEMA = {
    "type": "object",
    "properties": {
        "title": {"type": "string"},
        "persons": {
            "type": "array",
            "items": {
                "type": "object",
                "properties": {
                    "name": {"type": "string"},
                    "kind": {"enum": ["human", "animal"]},
                    "ages": {"type": "array", "items": {"type": "integer"}},
                    "born": {"type": "string", "format": "date-time"},
                },
                "required": ["name", "kind", "ages", "born"],
                "additionalProperties": False,
            },
        },
        "is_true": {"type": "boolean"},
    },
    "required": ["title", "persons", "is_true"],
    "additionalProperties": False,
}
PERSONS = [
    {"name": 'Hans "the, [lad]": {x}', "kind": "human", "ages": [7, 8], "born": "1812-12-20T10:30:00Z"},
    {"name": "back\\", "kind": "animal", "ages": [], "born": "1815-01-02T00:00:00Z"},
]
LAYOUTS: list[dict[str, Any]] = [{}, {"separators": (",", ":")}, {"indent": 2}, {"indent": "\t"}]


@pytest.fixture
def byte_vocab(vocab: Vocab) -> Iterator[ByteVocab]:
    byte_vocab = ByteVocab(vocab)
    yield byte_vocab
    byte_vocab.close()


def begun(schema: Any, byte_vocab: ByteVocab) -> ForcedText:
    found = byte_vocab.text(check(Constraint(json_schema=json.dumps(schema))).lark)
    assert found is not None
    return found


@pytest.mark.parametrize("layout", LAYOUTS, ids=["one line", "no spaces", "indented", "tabs"])
def test_names_and_brackets_come_in_the_layout_of_the_output(layout: dict[str, Any], byte_vocab: ByteVocab) -> None:
    tokens = byte_vocab.vocab.inner_tokens(json.dumps({"title": "T", "persons": PERSONS, "is_true": True}, **layout))
    first, second = begun(SCHEMA, byte_vocab), begun(SCHEMA, byte_vocab)
    followed(first, tokens)
    n_forced, n_right, n_runs = followed(second, tokens)  # the layout is known from the first output
    assert n_right > 0.95 * n_forced
    assert n_right > 0.4 * len(tokens)
    assert n_runs < 0.6 * len(tokens)
    assert second.after(()) == (), "it has ended"
    first.close()
    second.close()


def test_a_layout_is_learned_within_an_output(byte_vocab: ByteVocab) -> None:
    value = {"title": "T", "persons": PERSONS * 4, "is_true": True}
    forced = begun(SCHEMA, byte_vocab)
    followed(forced, byte_vocab.vocab.inner_tokens(json.dumps(value)))
    other = begun(SCHEMA, byte_vocab)
    n_forced, n_right, _ = followed(other, byte_vocab.vocab.inner_tokens(json.dumps(value, indent=3)))
    assert n_right > 0.9 * n_forced


@pytest.mark.parametrize("name", SCHEMAS)
def test_forced_text_fits_the_grammar(name: str, byte_vocab: ByteVocab) -> None:
    """Whatever is forced at the beginning may be written: all of it fits, one token after the other."""
    forced = begun(SCHEMAS[name], byte_vocab)
    for token, probability in forced.after(()):
        assert 0 < probability < 1
        forced.accept(token)
    forced.after(())
    assert not forced._is_lost
    forced.close()


def test_what_is_forced_after_draft_tokens_is_what_is_forced_after_the_same_text(byte_vocab: ByteVocab) -> None:
    tokens = byte_vocab.vocab.inner_tokens(json.dumps({"title": "T", "persons": PERSONS, "is_true": True}))
    followed(begun(SCHEMA, byte_vocab), tokens)
    forced, places = begun(SCHEMA, byte_vocab), range(0, len(tokens), 5)
    for at in places:
        expected = [begun(SCHEMA, byte_vocab) for _ in range(3)]
        for n, other in zip((1, 4, 2), expected, strict=True):
            for token in tokens[: at + n]:
                other.accept(token)
            found = forced.after(tokens[at : at + n])
            assert [token for token, _ in found] == [token for token, _ in other.after(())]
            other.close()
        assert forced.after((*tokens[at : at + 2], byte_vocab.vocab.end_tokens[0])) == ()
        for token in tokens[at : at + 5]:
            forced.accept(token)
    clone = forced.clone()
    assert clone.after(()) == forced.after(())
    forced.close()
    assert forced.after(()) == ()
    clone.close()


def test_nothing_is_forced_where_that_is_not_known(byte_vocab: ByteVocab, monkeypatch: pytest.MonkeyPatch) -> None:
    forced = begun(SCHEMA, byte_vocab)
    assert forced.after(())
    for token in byte_vocab.vocab.inner_tokens("Once"):
        forced.accept(token)
    assert forced.after(()) == (), "it is another text"
    forced.close()
    monkeypatch.setattr(forced_text, "_AT_ONCE_S", -1.0)
    forced = begun(SCHEMA, byte_vocab)
    assert forced.after(()) == (), "it took too long so far"
    forced.close()


def test_a_grammar_in_gbnf_forces_nothing(vocab: Vocab) -> None:
    from ggpipe.llama.gbnf_grammar import GbnfGrammar

    grammar = GbnfGrammar(next(iter(GRAMMARS.values())).grammar, vocab)
    assert not grammar.forces
    assert grammar.draft_check().forced(()) == ()
    grammar.close()
