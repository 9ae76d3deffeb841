"""Draft models with another vocabulary than the target's."""

from __future__ import annotations

import pytest
from hypothesis import given, note, settings
from hypothesis import strategies as st
from support.examples import n_examples
from support.translation import FakeDraftModel, KnownTree, Words, WordTranslator

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import Accepted, BeginDrafting, EndDrafting, MicroBatch, Shared
from ggpipe.core.drafters.base import ToHead
from ggpipe.core.drafters.translated import TranslatedModel

LETTERS = (b"a", b"b", b" ", b"\xc3", b"\xa9")
WORDS = st.lists(
    st.text(alphabet="abé", min_size=1, max_size=3).flatmap(
        lambda word: st.sampled_from([word.encode(), b" " + word.encode()])
    ),
    max_size=8,
    unique=True,
).map(lambda words: Words((*LETTERS, *(word for word in words if word not in LETTERS))))


class Session:
    """A target, its head, and a draft model with other tokens, for one request."""

    def __init__(self, target: Words, draft: Words, prompt: bytes = b" a", look_ahead: int = 8) -> None:
        self.target, self.draft = target, draft
        self.model = FakeDraftModel()
        self.drafter = TranslatedModel(self.model, 3, WordTranslator(target, draft))
        self.head = KnownTree()
        self.output = b""
        begin = BeginDrafting(
            request=1,
            prompt=target.tokens(prompt),
            n_left=100,
            look_ahead=look_ahead,
            ends=frozenset(),
            banned=(),
            speculation=SpeculationConfig(mode="async"),
        )
        self._handle(begin)
        assert self.model.begin is not None
        assert draft.text(self.model.begin.prompt) == prompt

    def _handle(self, event: BeginDrafting | Accepted | EndDrafting | Shared) -> list[MicroBatch]:
        sent = [action.micro_batch for action in self.drafter.handle(event, 0.0) if isinstance(action, ToHead)]
        for micro_batch in sent:
            assert micro_batch.drafter == 3
            self.head.take(micro_batch)
        self.drafter.validate()
        return sent

    def accept(self, *tokens: int) -> list[bool]:
        """The target accepts tokens. Returns which of them were among the draft tokens."""
        known = [self.head.accept(token) for token in tokens]
        self.output += self.target.text(tokens)
        self._handle(Accepted(1, self.head.epoch, tokens, 8, n_drawn=self.head.epoch + 7))
        assert self.model.n_drawn == self.head.epoch + 7
        told = self.draft.text(self.model.told)
        assert self.output.startswith(told)
        return known

    def send(self) -> None:
        """What the draft model drafted reaches the head."""
        self._handle(Accepted(1, self.head.epoch, (), 8))

    def write(self, text: bytes, prob: float = 0.9) -> None:
        """The draft model drafts a text after its last token."""
        tokens = self.draft.tokens(text)
        for i, token in enumerate(tokens):
            self.model.draft(tokens[:i], token, prob)
        self.send()

    def tokens(self, text: bytes) -> tuple[int, ...]:
        return self.target.tokens(text)


ENGLISH = (b"a", b"b", b" ", b"\xc3", b"\xa9", b" ab", b" abba", b"ba", b" a", b"ab")


def test_a_token_of_both() -> None:
    session = Session(Words(ENGLISH), Words(ENGLISH[::-1]))
    session.write(b" ab a")
    assert session.head.paths == {session.tokens(b" ab"), session.tokens(b" ab a")}
    assert session.accept(*session.tokens(b" ab a")) == [True, True]
    assert session.model.told == list(session.draft.tokens(b" ab a"))


def test_a_token_of_the_draft_model_is_several_of_the_target() -> None:
    session = Session(Words(ENGLISH[:5]), Words(ENGLISH))
    session.write(b" abba")
    assert session.accept(*session.tokens(b" abb")) == [True] * 4
    assert session.model.told == []  # a part of its token
    assert session.accept(*session.tokens(b"a")) == [True]
    assert session.model.told == list(session.draft.tokens(b" abba"))


def test_a_part_of_a_token_of_the_draft_model_is_wrong() -> None:
    session = Session(Words(ENGLISH[:5]), Words(ENGLISH))
    session.write(b" abba b")
    session.accept(*session.tokens(b" a"))
    assert session.accept(*session.tokens(b" ")) == [False]
    assert session.draft.text(session.model.told) == b" a "
    assert not session.head.paths


def test_a_longer_token_takes_the_place_of_a_shorter_one() -> None:
    session = Session(Words(ENGLISH), Words(ENGLISH[:5]))
    session.write(b" a", 0.8)
    assert session.head.probability(*session.tokens(b" ")) == pytest.approx(0.8 - 0.8 * 0.8)
    assert session.head.probability(*session.tokens(b" a")) == pytest.approx(0.8 * 0.8)
    (b,) = session.draft.tokens(b"b")
    session.model.draft(session.draft.tokens(b" a"), b, 0.5)
    session.send()
    assert session.head.probability(*session.tokens(b" ab")) == pytest.approx(0.32)
    assert session.head.probability(*session.tokens(b" a")) == pytest.approx(0.32)
    assert session.accept(*session.tokens(b" ab")) == [True]


def test_half_a_character_waits_for_the_rest() -> None:
    session = Session(Words((*LETTERS, "é".encode())), Words(LETTERS))
    session.model.draft((), 3, 0.9)
    session.send()
    assert not session.head.paths
    session.model.draft((3,), 4, 0.9)
    session.send()
    assert session.head.paths == {(5,)}


def test_half_a_character_is_read_with_the_rest() -> None:
    session = Session(Words(LETTERS), Words((*LETTERS, "é".encode())))
    session.accept(3)
    assert session.model.told == []
    session.accept(4)
    assert session.model.told == [5]


def test_what_follows_a_shorter_token_is_drafted_while_a_longer_one_may_be_right() -> None:
    session = Session(Words(ENGLISH[:5]), Words(ENGLISH))
    session.write(b" abba")
    begun, rest = session.draft.tokens(b" a")[0], session.draft.tokens(b"ba")[0]
    session.model.draft((), begun, 0.1)
    session.send()
    session.accept(*session.tokens(b" ab"))
    assert session.model.told == []
    session.model.draft((begun,), rest, 0.9)
    session.send()
    assert session.head.paths == {session.tokens(b"b"), session.tokens(b"ba"), session.tokens(b"a")}


def test_look_ahead_counts_the_draft_models_tokens() -> None:
    session = Session(Words(ENGLISH), Words(ENGLISH[:5]), prompt=b" abba abba abba", look_ahead=10)
    assert session.model.begin is not None
    assert session.model.begin.look_ahead == 40  # four times as many, at most


def test_other_drafters_tokens_are_not_continued() -> None:
    session = Session(Words(ENGLISH), Words(ENGLISH))
    assert session.drafter.handle(Shared(1, 0, ()), 0.0) == []
    session.drafter.handle(EndDrafting(1), 0.0)
    assert session.model.begin is None


@settings(max_examples=n_examples(150, 2000), deadline=None)
@given(WORDS, WORDS, st.data())
def test_the_draft_model_reads_the_text_and_all_draft_tokens_are_its_own(
    target: Words, draft: Words, data: st.DataObject
) -> None:
    """In any interleaving of draft tokens, right and wrong ones, and accepted tokens."""
    session = Session(target, draft)
    drafted = {b""}  # whole outputs
    for _ in range(data.draw(st.integers(1, 12), "steps")):
        if data.draw(st.booleans(), "drafts"):
            for _ in range(data.draw(st.integers(1, 5), "drafted")):
                path = data.draw(st.sampled_from(session.model.paths()))
                token = data.draw(st.integers(0, len(draft.words) - 1))
                session.model.draft(path, token, data.draw(st.sampled_from((0.1, 0.5, 0.9))))
                drafted.add(draft.text((*session.model.told, *path, token)))
            session.send()
        elif bool(session.head.paths) and data.draw(st.booleans(), "accepts a draft token"):
            known = data.draw(st.sampled_from(sorted(session.head.paths)).map(tuple))
            assert all(session.accept(*known)[:1])
        else:
            session.accept(data.draw(st.integers(0, len(target.words) - 1)))
        note(f"{session.output!r}, drafted {drafted}")
        for path in session.head.paths:  # whole tokens of the target in what the draft model wrote
            text = session.output + target.text(path)
            assert any(one.startswith(text) for one in drafted), text


@settings(max_examples=n_examples(150, 2000), deadline=None)
@given(WORDS, WORDS, st.lists(st.sampled_from((b" a", b"b", b" ba", b"\xc3\xa9", b" \xc3\xa9a", b"ab")), min_size=1))
def test_a_draft_model_that_is_right_names_all_tokens(target: Words, draft: Words, parts: list[bytes]) -> None:
    text = b"".join(parts)
    session = Session(target, draft)
    session.write(text)
    expected = _by_words(target, text)
    known = [session.accept(token)[0] for token in expected]
    note(f"{[target.words[token] for token in expected]}")
    assert all(known)


def _by_words(vocabulary: Words, text: bytes) -> tuple[int, ...]:
    """Tokens of a text of which none spans a space after a word, as in real vocabularies."""
    words = text.replace(b" ", b"\0 ").split(b"\0")
    return tuple(token for word in words if word for token in vocabulary.tokens(word))
