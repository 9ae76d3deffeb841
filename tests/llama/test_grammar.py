"""Grammars on a real vocabulary, against llama.cpp's own procedure on whole rows and other checks of the text."""

from __future__ import annotations

import random
from typing import cast

import numpy as np
import pytest
from support.grammars import GRAMMARS, SCHEMAS, fits, guided

from ggpipe.errors import UsageError
from ggpipe.llama.gbnf_grammar import GbnfGrammar
from ggpipe.llama.grammar import Grammar
from ggpipe.llama.guided_grammar import GuidanceVocab
from ggpipe.llama.vocab import TextDecoder, Vocab
from ggpipe.text.grammar import gbnf
from scripts.bench import check_schemas


@pytest.mark.parametrize("name", GRAMMARS)
def test_the_whole_vocabulary_is_filtered_as_libllama_does(name: str, vocab: Vocab) -> None:
    grammar = GbnfGrammar(GRAMMARS[name].grammar, vocab)
    every, choose = np.arange(vocab.n_tokens, dtype=np.int32), random.Random(7)
    for _ in range(12):
        whole = set(every[grammar.allowed(every)].tolist())
        assert set(grammar.best(np.zeros(vocab.n_tokens, np.float32), vocab.n_tokens).tolist()) == whole
        token = choose.choice(sorted(whole))
        assert grammar.accept(token)
        if token in vocab.end_tokens:
            break
    grammar.close()


@pytest.fixture(scope="module")
def whole(vocab: Vocab) -> list[int]:
    """Tokens whose texts are no parts of characters."""
    texts = [vocab.piece(token).decode("utf-8", "replace") for token in range(vocab.n_tokens)]
    return [token for token, text in enumerate(texts) if "\ufffd" not in text]


def generate(own: Grammar, vocab: Vocab, whole: list[int], seed: int) -> str | None:
    """A random text; None when it does not end. The grammar is closed."""
    choose = random.Random(seed)
    decoder, text = TextDecoder(vocab), ""
    ends = list(vocab.end_tokens)
    closing = [token for token in whole if vocab.piece(token)[:1] and vocab.piece(token)[:1] in b'"]})e0']

    def some(tokens: list[int]) -> list[int]:
        tokens = choose.sample(tokens, min(len(tokens), 200))
        return [token for token, fits in zip(tokens, own.allowed(tokens), strict=True) if fits]

    try:
        for n in range(500):
            may_end = own.allowed(ends).any()
            if may_end and choose.random() < 0.3:
                return text
            tokens = (some(closing) if n > 40 else []) or some(whole)
            tokens = tokens or own.best(np.zeros(vocab.n_tokens, np.float32), vocab.n_tokens).tolist()
            tokens = [token for token in tokens if token not in ends]
            if not tokens:
                return text if may_end else None
            token = choose.choice(tokens)
            assert own.accept(token)
            text += decoder.push(token)
        return None
    finally:
        own.close()


def test_a_schema_at_which_llguidance_panics_is_refused_in_one_line(vocab: Vocab) -> None:
    schemas: dict[str, object] = {"0": {"type": "object", "properties": {"0": {"type": "string"}}}}
    for n in range(1, 13):
        inner = {"$ref": f"#/$defs/{n - 1}"}
        schemas[str(n)] = {"anyOf": [inner, {"allOf": [inner, {"required": [str(n)]}]}]}
    guidance = GuidanceVocab(vocab)
    with pytest.raises(UsageError, match="simplify it") as caught:
        guided({"$ref": "#/$defs/12", "$defs": schemas}, guidance)
    guidance.close()
    assert "panic: " in str(caught.value)
    assert "backtrace" not in str(caught.value)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_are_right(name: str, vocab: Vocab, whole: list[int]) -> None:
    texts = [
        text
        for seed in range(4)
        if (text := generate(GbnfGrammar(GRAMMARS[name].grammar, vocab), vocab, whole, seed)) is not None
    ]
    assert texts
    assert all(GRAMMARS[name].is_right(text) for text in texts), texts


@pytest.mark.parametrize("name", SCHEMAS)
def test_texts_fit_their_schema(name: str, guidance: GuidanceVocab, whole: list[int]) -> None:
    first = guided(SCHEMAS[name], guidance)
    found = (generate(first.clone(), guidance.vocab, whole, seed) for seed in range(6))
    texts = [text for text in found if text is not None]
    first.close()
    assert texts
    for text in texts:
        assert fits(text, SCHEMAS[name]), text


def test_schemas_of_tools_and_files_are_followed() -> None:
    """Valid instances fit, and invalid ones do not."""
    counts, guidance = check_schemas.Counts(), GuidanceVocab(cast("Vocab", check_schemas.Bytes()))
    for name, schema, instances in check_schemas.cases(check_schemas.SAMPLE):
        counts.add(guidance, name, schema, instances)
    guidance.close()
    assert counts["right"] == counts["schemas"] > 90


@pytest.mark.parametrize("name", ["person", "patterns", "tree", "found"])
def test_a_mask_is_what_single_tokens_say(name: str, guidance: GuidanceVocab) -> None:
    grammar, choose, n = guided(SCHEMAS[name], guidance), random.Random(3), guidance.n_tokens
    for _ in range(16):
        one_by_one = [token for token in range(n) if grammar.fit((token,))]
        assert np.flatnonzero(grammar.allowed(np.arange(n, dtype=np.int32))).tolist() == one_by_one
        assert grammar.all(len(one_by_one)) is not None
        assert grammar.all(len(one_by_one) - 1) is None
        token = choose.choice(one_by_one)
        assert not grammar.accept(next(other for other in range(n) if other not in one_by_one))
        assert grammar.accept(token)
        if token in guidance.ends:
            assert grammar.accept(token)  # it changes nothing
            break
    grammar.close()


def test_draft_tokens_are_followed_by_llguidance(guidance: GuidanceVocab) -> None:
    grammar = guided({"enum": ["abc", "abd", "b"]}, guidance)
    draft_check = grammar.draft_check()
    token = {text: guidance.vocab.tokenize(f"#{text}")[-1] for text in 'abcd"'}

    def fitting(path: str) -> str:
        paths = tuple(token[text] for text in path)
        return "".join(text for text in token if draft_check.fits(paths, token[text]))

    assert [fitting(path) for path in ("", '"', '"a', '"ab', '"abd', "a", '"b"')] == ['"', "ab", "b", "cd", '"', "", ""]
    assert grammar.accept(token['"'])
    draft_check.accept(token['"'])
    assert [fitting(path) for path in ("", "a", "b", '"')] == ["ab", "b", '"', ""]
    draft_check.close()
    grammar.close()


def mutated(text: str, choose: random.Random) -> str:
    """A text with a few changes."""
    for _ in range(choose.randint(1, 4)):
        at, other = choose.randrange(len(text) + 1), choose.randrange(len(text) + 1)
        match choose.randrange(4):
            case 0:
                text = text[:at] + choose.choice('"[]()|*+?{}1, \n\\-^.<>!:=#ax') + text[at:]
            case 1:
                text = text[:at] + text[at + choose.randint(1, 6) :]
            case 2:
                text = text[:at] + text[other : other + choose.randint(1, 12)] + text[at:]
            case 3:
                text = text.replace(choose.choice(["::=", '"', ")", " ", "a", "{"]), choose.choice('()|"*a '), 1)
    return text


def test_no_mutated_grammar_ends_the_process(vocab: Vocab, capfd: pytest.CaptureFixture[str]) -> None:
    choose = random.Random(20)
    sources = [case.grammar for case in GRAMMARS.values() if len(case.grammar) < 2000]
    n_refused = n_taken = 0
    while n_refused < 150 or n_taken < 40:
        text = mutated(choose.choice(sources), choose)
        try:
            gbnf.check(text)
        except UsageError:
            n_refused += 1
            continue
        own = GbnfGrammar(text, vocab)  # what we take, libllama takes
        n_taken += 1
        for _ in range(20):
            tokens = own.best(np.zeros(vocab.n_tokens, np.float32), vocab.n_tokens)
            assert not own.accept(next(token for token in range(vocab.n_tokens) if token not in tokens))
            if not len(tokens) or not own.accept(token := int(choose.choice(tokens))) or token in vocab.end_tokens:
                break
        own.close()
    assert capfd.readouterr().err == ""


def test_a_grammar_with_exploding_stacks_ends(vocab: Vocab) -> None:
    """There are 2^n ways to read n times "a"."""
    levels = "\n".join(f's{i} ::= "a" s{i + 1} "x" | "a" s{i + 1} "y"' for i in range(40))
    text = f'root ::= s0\n{levels}\ns40 ::= "z"'
    gbnf.check(text)
    grammar = GbnfGrammar(text, vocab)
    (token,) = (token for token in range(vocab.n_tokens) if vocab.piece(token) == b"a")
    n = 0
    while grammar.accept(token):
        n += 1
        assert n < 20
    assert n > 8
    assert not grammar.clone().allowed(np.arange(vocab.n_tokens, dtype=np.int32)).any()
    grammar.close()


def test_draft_tokens_are_followed_through_the_tree(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggpipe.llama.gbnf_grammar._AT_ONCE_S", 600.0)
    grammar = GbnfGrammar('root ::= ("ab" | "cd" | "ce"){2}', vocab)
    token = {text: vocab.tokenize(f"#{text}")[-1] for text in "abcde"}
    tokens = [token[text] for text in "abcde"]
    draft_check = grammar.draft_check()

    def fitting(path: str) -> str:
        paths = tuple(token[text] for text in path)
        return "".join(text for text in "abcde" if draft_check.fits(paths, token[text]))

    assert len(set(tokens)) == 5
    assert [fitting(path) for path in ("", "a", "c", "ab", "cea", "b", "ba", "abab")] == [
        "ac", "b", "de", "ac", "b", "", "", "",
    ]  # fmt: skip
    assert grammar.accept(token["c"])
    draft_check.accept(token["c"])
    assert [fitting(path) for path in ("", "e", "ea", "d")] == ["de", "ac", "b", "ac"]
    draft_check.close()
    grammar.close()


def test_draft_tokens_are_not_looked_at_for_long(vocab: Vocab, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ggpipe.llama.gbnf_grammar._AT_ONCE_S", -1.0)
    grammar = GbnfGrammar('root ::= "b"', vocab)
    draft_check = grammar.draft_check()
    assert draft_check.fits((), vocab.tokenize("xa")[-1])
    grammar.close()
