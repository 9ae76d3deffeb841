"""An n-gram drafter: what it proposes after which text."""

from __future__ import annotations

import random

import pytest

from ggpipe.config.engine import SpeculationConfig
from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, EndDrafting, MicroBatch
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.ngram import Ngrams

END = 0


class Copier:
    """An n-gram drafter with one request, and the paths of all that it proposed."""

    def __init__(
        self, *prompt: int, look_ahead: int = 4, n_left: int = 100, banned: tuple[int, ...] = (), n_min: int = 0
    ):
        self.drafter, self.look_ahead, self.text = Ngrams(3), look_ahead, list(prompt)
        self.n_prompt = len(prompt)
        self.paths: dict[int, tuple[int, ...]] = {}
        begin = BeginDrafting(
            request=1, prompt=prompt, n_left=n_left, look_ahead=look_ahead, ends=frozenset({END}), banned=banned,
            speculation=SpeculationConfig(n_min=n_min),
        )  # fmt: skip
        self.first = self._read(self.drafter.answer(begin))

    def accept(self, *tokens: int) -> list[int]:
        """The text goes on: the last tokens of the paths that are proposed because of it."""
        self.text += tokens
        epoch = len(self.text) - self.n_prompt
        return self._read(self.drafter.answer(Accepted(1, epoch, tokens, self.look_ahead)))

    def _read(self, batches: list[MicroBatch]) -> list[int]:
        (batch,) = batches
        assert (batch.request, batch.drafter, batch.complete) == (1, 3, True)
        assert batch.epoch == len(self.text) - self.n_prompt
        last = []
        for expansion in batch.expansions:
            path = tuple(self.text) if expansion.parent == ROOT else self.paths[expansion.parent]
            ((token, prob),) = expansion.candidates
            assert 0 < prob < 1
            assert expansion.first not in self.paths
            self.paths[expansion.first] = (*path, token)
            assert path[: len(self.text)] == tuple(self.text)
            last.append(token)
        return last


def test_it_continues_as_the_same_tokens_continued_before() -> None:
    it = Copier(1, 2, 3, 4, 5, 6, 7, 9, 1, 2, 3)
    assert it.first == [4, 5, 6, 7]
    assert it.accept(4) == [9], "what it proposed before is not proposed again"
    assert it.accept(5, 6) == [1, 2]
    assert it.accept(8) == []


def test_nothing_that_occurs_again() -> None:
    assert Copier(1, 2, 3, 4).first == []
    assert Copier(1).first == []
    assert Copier(1, 2, 9, 1, 2).first == [], "two tokens are too few"


def test_a_longer_match_comes_before_a_later_one() -> None:
    it = Copier(7, 8, 1, 2, 3, 50, 9, 1, 2, 3, 60, 8, 1, 2, 3, look_ahead=1)
    assert it.first == [50]
    assert Copier(8, 1, 2, 3, 50, 9, 1, 2, 3, 60, 4, 1, 2, 3, look_ahead=1).first == [60], "of equal ones the latest"


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    assert Copier(5, 6, 5, 6, 5, 6, look_ahead=5).first == [5, 6, 5, 6, 5]
    assert Copier(5, 5, 5, 5, look_ahead=3).first == [5, 5, 5]


def test_longer_matches_are_surer() -> None:
    def prob(n: int) -> float:
        prompt = (*range(10, 10 + n), 9, *range(10, 10 + n))
        begin = BeginDrafting(
            request=1,
            prompt=prompt,
            n_left=9,
            look_ahead=1,
            ends=frozenset(),
            banned=(),
            speculation=SpeculationConfig(),
        )
        (batch,) = Ngrams(0).answer(begin)
        return batch.expansions[0].candidates[0][1]

    probs = [prob(n) for n in (3, 5, 20, 100)]
    assert probs == sorted(probs)
    assert probs[0] < 0.3


def test_it_stops_where_the_text_may_end() -> None:
    assert Copier(1, 2, 3, 4, END, 1, 2, 3).first == [4]
    assert Copier(1, 2, 3, 4, 5, 1, 2, 3, banned=(5,)).first == [4]
    assert Copier(1, 2, 3, 4, 5, 6, 1, 2, 3, n_left=3).first == [4, 5], "the last token needs no row"
    assert Copier(1, 2, 3, 4, 5, 6, 1, 2, 3, look_ahead=0).first == []
    assert Copier(1, 2, 3, 4, END, 1, 2, 3, n_min=2).first == []


def test_requests_do_not_see_each_other() -> None:
    drafter, speculation = Ngrams(0), SpeculationConfig()
    for request, prompt in ((1, (1, 2, 3, 4)), (2, (9, 1, 2, 3))):
        begin = BeginDrafting(
            request=request, prompt=prompt, n_left=9, look_ahead=2, ends=frozenset(), banned=(), speculation=speculation
        )
        (batch,) = drafter.answer(begin)
        assert batch.expansions == ()
    assert drafter.answer(EndDrafting(1)) == []
    (batch,) = drafter.answer(Accepted(2, 1, (4,), 2))
    assert batch.request == 2


@pytest.mark.parametrize("seed", range(20))
def test_every_match_is_a_match(seed: int) -> None:
    """Against a search through the whole text. Random texts of few tokens, which repeat themselves a lot."""
    rng = random.Random(seed)
    it = Copier(*(rng.randrange(1, 4) for _ in range(30)), look_ahead=2, n_left=1000)
    for _ in range(200):
        it.accept(*(rng.randrange(1, 4) for _ in range(rng.randint(1, 3))))
        index = it.drafter._requests[1]._index
        assert index.tokens == it.text
        if index.place >= 0:
            n = index.length
            assert n >= 3
            assert it.text[index.place - n + 1 : index.place + 1] == it.text[-n:]
            assert index.place < len(it.text) - 1
        else:
            triples = [tuple(it.text[i : i + 3]) for i in range(len(it.text) - 3)]
            assert tuple(it.text[-3:]) not in triples


def test_names_of_drafters() -> None:
    assert registry.read_names("ngram") == ("ngram",)
    assert registry.read_names("draft, ngram-simple,ngram") == ("draft", "ngram")
    assert registry.read_names("none") == ()
    for text in ("", "ngram,", "none,draft", "eagle"):
        with pytest.raises(ValueError, match="draft, ngram, separated by commas, or none"):
            registry.read_names(text)


def test_which_drafters_a_request_has() -> None:
    assert registry.chosen(None, 0) == ()
    assert registry.chosen(None, 2) == (0, 1), "all draft models, and nothing else"
    assert registry.chosen(("ngram",), 0) == (0,)
    assert registry.chosen(("ngram",), 1) == (1,)
    assert registry.chosen(("draft", "ngram"), 1) == (0, 1)
    assert registry.chosen((), 1) == ()
