"""Where the last tokens of a text occurred before: against a search through all texts."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hypothesis import given, settings
from hypothesis import strategies as st

from ggpipe.core.drafters.text_index import LEAST_COPIED, MOST_FOUND, SharedTexts, Text

OWN, SHARED = 3, 5


def ends_alike(a: Sequence[int], b: Sequence[int]) -> int:
    """How many of their last tokens are the same."""
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    return n


@dataclass
class Model:
    """Some texts that grow at the same time, and all that must hold of them."""

    shared: SharedTexts
    open: list[Text] = field(default_factory=list)
    private: list[Text] = field(default_factory=list)

    def begin(self, prompt: Sequence[int], is_private: bool) -> None:
        text = Text(prompt, None if is_private else self.shared)
        (self.private if is_private else self.open).append(text)
        self.check(text)

    def texts(self) -> Iterator[Text]:
        yield from self.shared._texts.values()

    def check(self, text: Text) -> None:
        """Of a text that has just got a token."""
        self.shared.validate()
        own = list(text.tokens)
        others = [] if text in self.private else [list(other.tokens) for other in self.texts() if other is not text]
        for match in text.matches:
            known = list(match.tokens[: match.at + 1])
            least = 0 if match.resumed else OWN if match.period else SHARED
            assert ends_alike(known, own) >= match.length >= least
            assert match.period == (len(own) - 1 - match.at if match.tokens is text.tokens else 0)
            assert match.tokens is text.tokens or text not in self.private
            followed = match.resumed or text.matches[0].length > MOST_FOUND
            if not match.period and not followed:  # else it may be evicted meanwhile
                assert any(match.tokens.tolist() == other for other in others)
        assert not any(match.resumed for match in text.matches[1:])
        lengths = [match.length for match in text.matches if not match.resumed]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths == [match.length for match in text.matches] or max(lengths, default=0) < LEAST_COPIED
        if not text.matches:
            triples = [tuple(own[i : i + OWN]) for i in range(len(own) - OWN)]
            assert len(own) < OWN or tuple(own[-OWN:]) not in triples


@given(st.integers(0, 2**32), st.sampled_from([2, 3, 50]), st.sampled_from([20, 100, 1000]))
@settings(deadline=None, max_examples=100)
def test_every_match_is_a_match(seed: int, n_vocab: int, most_tokens: int) -> None:
    """Texts of few tokens, which repeat themselves and each other, in any interleaving."""
    rng, model = random.Random(seed), Model(SharedTexts(most_tokens))
    for _ in range(150):
        texts = [*model.open, *model.private]
        if not texts or rng.random() < 0.1:
            said = [list(text.tokens) for text in [*model.texts(), *texts]]
            begun = rng.choice(said) if said and rng.random() < 0.5 else []
            prompt = [*begun[:60], *(rng.randrange(n_vocab) for _ in range(rng.randint(1, 12)))]
            model.begin(prompt, rng.random() < 0.2)
            continue
        text = rng.choice(texts)
        if rng.random() < 0.05:
            text.end()
            (model.private if text in model.private else model.open).remove(text)
            model.shared.validate()
            continue
        following = [token for match in text.matches if (token := match.next()) is not None]
        text.push(rng.choice(following) if following and rng.random() < 0.7 else rng.randrange(n_vocab))
        model.check(text)
        if text.matches and rng.random() < 0.2:
            match = text.matches[0]
            for _ in range(40):  # however far it goes on
                if match.next() is None:
                    assert not match.period
                    break
                match = match.longer()


def test_a_match_grows_with_the_text() -> None:
    text = Text((*range(100), *range(30)), None)
    (match,) = text.matches
    assert (match.at, match.length) == (29, MOST_FOUND), "as far as it is compared"
    for token in range(30, 60):
        assert match.next() == token
        text.push(token)
        (match,) = text.matches
    assert (match.at, match.length) == (59, MOST_FOUND + 30)
    text = Text((*range(100), 7), None)
    assert text.matches == []


A_PASSAGE = tuple(range(100, 160))


def copying(*said: int) -> Text:
    """A text that has a passage, and copied its first 20 tokens before it said these."""
    text = Text((*A_PASSAGE, *A_PASSAGE[:20]), None)
    for token in said:
        text.push(token)
    return text


def resumed(text: Text) -> tuple[int | None, int]:
    """What follows where the copy is resumed, and how many tokens match since then."""
    assert text.matches[0].resumed
    return text.matches[0].next(), text.matches[0].length


def test_a_copy_goes_on_after_a_token_that_was_replaced() -> None:
    text = copying(7)
    assert resumed(text) == (121, 0)
    for n in range(1, LEAST_COPIED):
        text.push(120 + n)
        assert resumed(text) == (121 + n, n)
        assert len(text.matches) == 1, "one place is one match"
    text.push(120 + LEAST_COPIED)
    assert [(match.length, match.resumed) for match in text.matches] == [(LEAST_COPIED, False)]


def test_a_copy_goes_on_after_tokens_that_were_added_or_left_out() -> None:
    assert resumed(copying(123)) == (124, 1), "three are left out"
    assert resumed(copying(7, 8, 9, 120)) == (121, 1), "three are added"
    assert resumed(copying(7, 8, 9)) == (123, 0), "or they stand for three"
    assert resumed(copying(7, 8, 121, 122)) == (123, 2), "two stand for one"


def test_a_copy_is_over_when_other_tokens_follow() -> None:
    assert copying(*range(500, 520)).matches == []
    assert copying(*range(500, 508)).matches != []


def test_a_copy_of_another_text_is_resumed_as_long_as_it_has_tokens() -> None:
    shared = SharedTexts(1000)
    Text(A_PASSAGE, shared).end()
    text = Text((1, *A_PASSAGE[:57]), shared)
    for token in (7, 8, 9):
        text.push(token)
    assert resumed(text) == (None, 0)
    text.push(10)
    assert text.matches == []


def test_a_text_that_repeats_itself_is_continued_beyond_its_end() -> None:
    text = Text((5, 6, 7, 5, 6, 7), None)
    (match,) = text.matches
    said = []
    for _ in range(7):
        said.append(match.next())
        match = match.longer()
    assert said == [5, 6, 7, 5, 6, 7, 5]


def test_other_texts_take_a_longer_match() -> None:
    shared = SharedTexts(1000)
    Text((1, 2, 3, 4, 5, 6), shared).end()
    text = Text((9, 1, 2, 3, 4), shared)
    assert text.matches == []
    text.push(5)
    assert [match.next() for match in text.matches] == [6]


def test_the_texts_that_ended_first_are_evicted() -> None:
    shared = SharedTexts(30)
    for first in (0, 100, 200):
        Text(range(first, first + 14), shared).end()
    assert shared.n_tokens == 28
    assert Text(range(5), shared).matches == [], "evicted"
    assert [match.next() for match in Text(range(200, 205), shared).matches] == [205]


def test_texts_that_have_not_ended_stay() -> None:
    shared = SharedTexts(10)
    text = Text(range(20), shared)
    other = Text(range(15), shared)
    assert shared.n_tokens == 35
    assert other.matches[0].next() == 15
    text.end()
    other.push(15)
    assert shared.n_tokens == 16
    shared.validate()


def test_a_conversation_that_continues_replaces_what_it_was() -> None:
    shared = SharedTexts(1000)
    for n in (10, 20, 30):
        text = Text(range(n), shared)
        assert shared.n_tokens == n
        text.end()
    Text((*range(9), 77), shared)
    assert shared.n_tokens == 40, "only as a whole"


def test_a_private_text_neither_reads_nor_leaves_anything() -> None:
    shared = SharedTexts(1000)
    Text(range(20), shared).end()
    private = Text((*range(10), *range(50, 60)), None)
    assert private.matches == []
    private.end()
    assert shared.n_tokens == 20
    assert Text(range(50, 56), shared).matches == []
