"""Grammars on a real vocabulary, against llama.cpp's own procedure on whole rows and other checks of the text."""

from __future__ import annotations

import ctypes
import json
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, cast

import numpy as np
import pytest
from numpy.typing import NDArray
from support.commands import TARGET
from support.common_sampler import common_chain
from support.grammars import GRAMMARS, SCHEMAS, fits

from ggpipe.config.model import ModelConfig
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits
from ggpipe.errors import UsageError
from ggpipe.llama.constrained_sampler import ConstrainedSampler, NoTokenFits
from ggpipe.llama.gbnf_grammar import GbnfGrammar
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.grammar import Grammar
from ggpipe.llama.guided_grammar import GuidanceVocab, GuidedGrammar
from ggpipe.llama.libllama import lib
from ggpipe.llama.params import best_of, whole_row
from ggpipe.llama.sampler import Sampler
from ggpipe.llama.vocab import TextDecoder, Vocab
from ggpipe.text.grammar import gbnf
from ggpipe.text.grammar.check import Constraint, check
from scripts.bench import check_schemas

Logits = NDArray[np.float32]
N_CTX = 256


@pytest.fixture(scope="module")
def vocab() -> Iterator[Vocab]:
    vocab = Vocab(ModelFile.open(TARGET), ModelConfig(path=TARGET))
    yield vocab
    vocab.close()


class Reference:
    """llama.cpp's `common_sampler_sample` (common/sampling.cpp), on whole rows."""

    def __init__(self, config: SamplingConfig, vocab: Vocab) -> None:
        self._chain = common_chain(config, vocab.pointer, N_CTX)
        self._grammar: Any = lib.llama_sampler_init_grammar(vocab.pointer, config.grammar.encode(), b"root")

    def sample(self, row: Logits) -> tuple[int, bool]:
        """A token, and whether it was drawn at the second attempt."""
        data = self._data(np.arange(len(row)), row)
        token = self._apply(self._chain, data)
        one = self._data(np.array([token]), np.ones(1, np.float32))
        self._apply(self._grammar, one)
        if one["logit"][0] != -np.inf:
            return token, False
        data = self._data(np.arange(len(row)), row)
        self._apply(self._grammar, data)
        return self._apply(self._chain, data), True

    @staticmethod
    def _data(ids: NDArray[np.int64], logits: Logits) -> NDArray[Any]:
        data = np.zeros(len(ids), np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")]))
        data["id"], data["logit"] = ids, logits
        return data

    @staticmethod
    def _apply(sampler: Any, data: NDArray[Any]) -> int:
        pointer = ctypes.cast(data.ctypes.data, ctypes.POINTER(lib.llama_token_data))
        array = lib.llama_token_data_array(pointer, len(data), -1, False)
        lib.llama_sampler_apply(sampler, ctypes.byref(array))
        return int(array.data[max(array.selected, 0)].id)

    def accept(self, token: int) -> None:
        lib.llama_sampler_accept(self._grammar, token)
        lib.llama_sampler_accept(self._chain, token)

    def close(self) -> None:
        lib.llama_sampler_free(self._grammar)
        lib.llama_sampler_free(self._chain)


class Rank:
    """The last rank: the best logits of a row, and the whole row when it is asked for it."""

    def __init__(self, sampler: ConstrainedSampler, drafts: bool = False) -> None:
        """`drafts`: rows are those of draft tokens, which were submitted before the last token was drawn."""
        self.sampler = sampler
        self.n_fetched = 0
        self._drafts = drafts
        self._before: LogitsRequest | None = None

    def draw(self, logits: Logits) -> tuple[int, bool]:
        own = want = self.sampler.logits_request()
        self.sampler.settle()
        if self._drafts and (before := self._before) is not None:
            want = replace(before, n=before.n + self.sampler.logits_request_grows) if before.keeps else before
        self._before = own
        assert want.keeps is (want.kind is LogitsKind.TOP)
        whole = whole_row(0, logits, want)
        drawn = self.sampler.sample(best_of(0, logits, want) if want.keeps else whole)
        if drawn is None:
            assert want.keeps
            self.n_fetched += 1
            drawn = self.sampler.sample(whole)
        assert drawn is not None
        return drawn.token, drawn.is_second


def constrained(config: SamplingConfig, vocab: Vocab) -> ConstrainedSampler:
    return ConstrainedSampler(Sampler(config, vocab, N_CTX), GbnfGrammar(config.grammar, vocab))


def rows(vocab: Vocab, seed: int, ends: float) -> Iterator[Logits]:
    """Random rows; `ends`: is added to the logits of ends of the text, the more the longer it is."""
    random_numbers = np.random.default_rng(seed)
    n = 0
    while True:
        row = random_numbers.normal(0, 3, vocab.n_tokens).astype(np.float32)
        row[list(vocab.end_tokens)] += ends * n
        n += 1
        yield row


CONFIGS: dict[str, dict[str, Any]] = {
    "default": {},
    "greedy": {"temp": 0.0},
    "penalties": {"repeat_penalty": 1.3, "presence_penalty": 0.5},
    "all": {"top_k": 0, "top_p": 1.0, "min_p": 0.0},
    "no end": {"ignore_eos": True},
    "others": {"top_k": 12, "typical_p": 0.9, "xtc_probability": 0.5, "xtc_threshold": 0.05},
    "mirostat": {"mirostat": 2},
    "probs": {"n_probs": 3, "ignore_eos": True},
    "biased": {"logit_bias": ((300, 3.0), (301, -4.0))},
    "whole rows soon": {"top_k": 2044, "repeat_penalty": 1.3, "min_p": 0.0, "top_p": 1.0},
}


@pytest.mark.pairwise
@pytest.mark.parametrize("settings", CONFIGS)
@pytest.mark.parametrize("name", ["words", "negated", "json", "enum", "georgian"])
@pytest.mark.parametrize("drafts", [False, True])
def test_tokens_are_those_of_llama_cpp(settings: str, name: str, drafts: bool, vocab: Vocab) -> None:
    n_second = 0
    for seed in range(3):
        config = SamplingConfig(seed=seed, grammar=GRAMMARS[name].grammar, **CONFIGS[settings])
        reference, rank = Reference(config, vocab), Rank(constrained(config, vocab), drafts)
        for logits, _ in zip(rows(vocab, seed, 0.5), range(60), strict=False):
            try:
                token, is_second = rank.draw(logits)
            except NoTokenFits:
                assert config.ignore_eos
                break
            assert (token, is_second) == reference.sample(logits)
            n_second += is_second
            if token in vocab.end_tokens:
                break
            rank.sampler.accept((token,))
            reference.accept(token)
        rank.sampler.close()
        reference.close()
    assert n_second > 0


def test_a_resumed_sampler_goes_on_as_before(vocab: Vocab) -> None:
    config = SamplingConfig(seed=5, grammar=GRAMMARS["words"].grammar)
    first = Rank(constrained(config, vocab))
    drawn = []
    for logits, _ in zip(rows(vocab, 1, 0.0), range(24), strict=False):
        drawn.append(first.draw(logits))
        first.sampler.accept((drawn[-1][0],))
        if len(drawn) == 12:
            second = Rank(constrained(config, vocab))
            second.sampler.resume([token for token, _ in drawn], {i for i, (_, again) in enumerate(drawn) if again})
        elif len(drawn) > 12:
            assert second.draw(logits) == drawn[-1]
            second.sampler.accept((drawn[-1][0],))
    assert {again for _, again in drawn} == {True, False}
    first.sampler.close()
    second.sampler.close()


@pytest.mark.parametrize("fields", [{"mirostat": 2}, {"xtc_probability": 0.5, "xtc_threshold": 0.01}], ids=str)
def test_a_resumed_sampler_that_remembers_rows(vocab: Vocab, fields: dict[str, Any]) -> None:
    """Tokens that were drawn again are drawn again when their rows come back."""
    config = SamplingConfig(seed=5, grammar=GRAMMARS["words"].grammar, **fields)
    first, second = Rank(constrained(config, vocab)), Rank(constrained(config, vocab))
    assert second.sampler.replay_logits_request(12).kind is LogitsKind.FULL
    n_again = 0
    for n, logits in zip(range(24), rows(vocab, 1, 0.0), strict=False):
        token, is_second = first.draw(logits)
        first.sampler.accept((token,))
        if n < 12:
            second.sampler.replay(RowLogits(0, None, logits, 0.0), token, is_second)
            n_again += is_second
        else:
            assert second.draw(logits) == (token, is_second)
            second.sampler.accept((token,))
    assert n_again > 0
    first.sampler.close()
    second.sampler.close()


@pytest.mark.parametrize(
    ("grammar", "n_fetched"),
    [
        (r"root ::= [^0-9]+", 0),
        (r"root ::= [0-9]+", 1),
        (r"root ::= [^\x00-\x7f]+", 1),
        (r"root ::= [#$%&@]{4} [x-z]+", 2),
    ],
)
def test_a_whole_row_is_fetched_only_where_few_tokens_fit_first(grammar: str, n_fetched: int, vocab: Vocab) -> None:
    """Then the tokens that fit are asked for, as long as they are few."""
    rank = Rank(constrained(SamplingConfig(seed=1, grammar=grammar, ignore_eos=True), vocab))
    for logits, _ in zip(rows(vocab, 3, 0.0), range(8), strict=False):
        token, _ = rank.draw(logits)
        rank.sampler.accept((token,))
    assert rank.n_fetched == n_fetched
    rank.sampler.close()


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


@pytest.mark.parametrize("name", GRAMMARS)
def test_texts_are_right(name: str, vocab: Vocab, whole: list[int]) -> None:
    texts = [
        text
        for seed in range(4)
        if (text := generate(GbnfGrammar(GRAMMARS[name].grammar, vocab), vocab, whole, seed)) is not None
    ]
    assert texts
    assert all(GRAMMARS[name].is_right(text) for text in texts), texts


@pytest.fixture(scope="module")
def guidance(vocab: Vocab) -> Iterator[GuidanceVocab]:
    guidance = GuidanceVocab(vocab)
    yield guidance
    guidance.close()


def guided(schema: Any, guidance: GuidanceVocab) -> GuidedGrammar:
    checked = check(Constraint(json_schema=json.dumps(schema)))
    assert not checked.problem
    return guidance.matcher(checked.lark)


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
    token = {text: guidance.vocab.tokenize(f"x{text}")[-1] for text in 'abcd"'}

    def fitting(path: str) -> str:
        paths = tuple(token[text] for text in path)
        return "".join(text for text in token if draft_check.fits(paths, token[text]))

    assert [fitting(path) for path in ("", '"', '"a', '"ab', '"abd', "a", '"b"')] == ['"', "ab", "b", "cd", '"', "", ""]
    assert grammar.accept(token['"'])
    draft_check.accept(token['"'])
    assert [fitting(path) for path in ("", "a", "b", '"')] == ["ab", "b", '"', ""]
    draft_check.close()
    grammar.close()


@pytest.mark.parametrize("settings", ["default", "greedy", "penalties", "all", "mirostat", "whole rows soon"])
def test_schemas_and_grammars_draw_the_same(settings: str, vocab: Vocab, guidance: GuidanceVocab) -> None:
    """A schema, and a grammar in GBNF that allows the same."""
    gbnf_text = 'root ::= "\\"" ("fox" | "emu" | "ox") [0-9]{1,3} "\\""'
    schema = {"type": "string", "pattern": "^(fox|emu|ox)[0-9]{1,3}$"}
    n_second = 0
    for seed in range(4):
        config = SamplingConfig(seed=seed, grammar=gbnf_text, **CONFIGS[settings])
        one, other = (
            Rank(ConstrainedSampler(Sampler(config, vocab, N_CTX), grammar))
            for grammar in (GbnfGrammar(gbnf_text, vocab), guided(schema, guidance))
        )
        for logits, _ in zip(rows(vocab, seed, 0.5), range(20), strict=False):
            token, is_second = one.draw(logits)
            assert other.draw(logits) == (token, is_second)
            n_second += is_second
            if token in vocab.end_tokens:
                break
            one.sampler.accept((token,))
            other.sampler.accept((token,))
        one.sampler.close()
        other.sampler.close()
    assert n_second > 0


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
    token = {text: vocab.tokenize(f"x{text}")[-1] for text in "abcde"}
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


def test_a_request_whose_grammar_allows_no_token_ends(vocab: Vocab) -> None:
    config = SamplingConfig(grammar='root ::= "a"', ignore_eos=True, seed=1)
    rank = Rank(constrained(config, vocab))
    source = rows(vocab, 1, 0.0)
    token, _ = rank.draw(next(source))
    assert vocab.piece(token) == b"a"
    rank.sampler.accept((token,))
    with pytest.raises(NoTokenFits):
        rank.draw(next(source))
    rank.sampler.close()


def test_tokens_that_do_not_fit_cannot_be_resumed(vocab: Vocab) -> None:
    sampler = constrained(SamplingConfig(grammar='root ::= "a"'), vocab)
    with pytest.raises(NoTokenFits):
        sampler.resume(vocab.tokenize("Once upon a time"), ())
    sampler.close()
