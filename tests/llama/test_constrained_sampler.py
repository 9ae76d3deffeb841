"""Sampling under a grammar: the tokens are those of llama.cpp's own procedure on whole rows."""

from __future__ import annotations

import ctypes
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from msgspec import structs
from numpy.typing import NDArray
from support.common_sampler import common_chain
from support.grammars import GRAMMARS, guided

from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, RowLogits
from ggpipe.core.random_numbers import RandomNumbers
from ggpipe.llama.constrained_sampler import ConstrainedSampler, NoTokenFits
from ggpipe.llama.gbnf_grammar import GbnfGrammar
from ggpipe.llama.guided_grammar import GuidanceVocab
from ggpipe.llama.libllama import lib
from ggpipe.llama.params import row_of, whole_row
from ggpipe.llama.sampler import Sampler
from ggpipe.llama.vocab import Vocab

Logits = NDArray[np.float32]
N_CTX = 256


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
        self._numbers, self._n_drawn, self._n_drawn_before = RandomNumbers(sampler.seed), 0, 0

    def draw(self, logits: Logits) -> tuple[int, bool]:
        own = want = self.sampler.logits_request()
        self.sampler.settle()
        place = self._n_drawn
        if self._drafts and (before := self._before) is not None:
            place = self._n_drawn_before + 1
            want = structs.replace(before, n=before.n + self.sampler.logits_request_grows) if before.keeps else before
        self._before = own
        assert want.keeps is (want.kind is not LogitsKind.FULL)
        whole = whole_row(0, logits, want)
        drawn = self.sampler.sample(row_of(0, logits, structs.replace(want, number=self._numbers[place])))
        if drawn is None:
            assert want.keeps
            self.n_fetched += 1
            drawn = self.sampler.sample(whole)
        assert drawn is not None
        self._n_drawn_before = self._n_drawn
        self._n_drawn += 1 + drawn.is_second
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
    "min-p": {"temp": 1.5, "top_k": 0, "top_p": 1.0, "min_p": 0.02},
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
        (r"root ::= [^\x00-\x7f]+", 3),
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
