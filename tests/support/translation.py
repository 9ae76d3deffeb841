"""A draft model and a target with other tokens, and what the head knows of their draft tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, BlockOf, EndDrafting, Expansion, MicroBatch
from ggpipe.core.drafters.base import DraftAction, DraftEvent, ToHead


class Words:
    """A vocabulary of strings: of those that fit, the longest one is the next token."""

    def __init__(self, words: Sequence[bytes]) -> None:
        self.words = tuple(words)
        self._places = {word: token for token, word in enumerate(words)}
        self._sizes = sorted({len(word) for word in words}, reverse=True)

    def tokens(self, text: bytes) -> tuple[int, ...]:
        found: list[int] = []
        while text:
            size = next(size for size in self._sizes if text[:size] in self._places and size <= len(text))
            found.append(self._places[text[:size]])
            text = text[size:]
        return tuple(found)

    def text(self, tokens: Iterable[int]) -> bytes:
        return b"".join(self.words[token] for token in tokens)


class WordTranslator:
    """A `Translator` between two of these."""

    def __init__(self, target: Words, draft: Words, draft_ends: frozenset[int] = frozenset()) -> None:
        self.target, self.draft, self.draft_ends = target, draft, draft_ends

    def target_text(self, token: int) -> bytes:
        return self.target.words[token]

    def draft_text(self, token: int) -> bytes:
        return self.draft.words[token]

    def target_tokens(self, text: bytes) -> tuple[int, ...]:
        return self.target.tokens(text)

    def draft_tokens(self, text: bytes) -> tuple[int, ...]:
        return self.draft.tokens(text)

    def draft_prompt(self, text: bytes) -> tuple[int, ...]:
        return self.draft.tokens(text) or (0,)

    def draft_banned(self, banned: Iterable[int]) -> tuple[int, ...]:
        return tuple(t for token in banned for t in self.draft.tokens(self.target_text(token)))


class FakeDraftModel:
    """Drafts what a test tells it, in the draft model's tokens, and checks what it is told."""

    wake_at = None

    def __init__(self) -> None:
        self.begin: BeginDrafting | None = None
        self.told: list[int] = []
        self.n_drawn = 0
        self.answers: list[MicroBatch] = []
        """What the next event is answered with."""
        self.children: dict[int, dict[int, int]] = {ROOT: {}}
        """Numbers of live draft tokens after each one, by their tokens."""
        self._next = ROOT + 1

    def handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
        match event:
            case BeginDrafting():
                self.begin = event
            case Accepted(_, epoch, tokens, n_drawn=n_drawn):
                self.n_drawn = n_drawn
                for token in tokens:
                    self.told.append(token)
                    number = self.children[ROOT].get(token)
                    self.children[ROOT] = self.children.get(number, {}) if number is not None else {}
                assert epoch == len(self.told)
            case EndDrafting():
                self.begin = None
        answers, self.answers = self.answers, []
        return [ToHead(micro_batch) for micro_batch in answers]

    def draft(self, path: Sequence[int], token: int, prob: float) -> bool:
        """Answer the next event with a draft token after a path below the root. False: it was drafted already."""
        parent = ROOT
        for one in path:
            parent = self.children[parent][one]
        if token in self.children.setdefault(parent, {}):
            return False
        number, self._next = self._next, self._next + 1
        self.children[parent][token] = number
        self.children[number] = {}
        expansion = Expansion(parent, number, 1, ((token, prob),))
        self.answers.append(
            MicroBatch(request=1, epoch=len(self.told), expansions=(expansion,), complete=False, block=BlockOf.NONE)
        )
        return True

    def paths(self, below: int = ROOT, path: tuple[int, ...] = ()) -> list[tuple[int, ...]]:
        """The paths of all live draft tokens, and the root's."""
        found = [path]
        for token, number in self.children.get(below, {}).items():
            found += self.paths(number, (*path, token))
        return found


class KnownTree:
    """The draft tokens that the head was sent, as it keeps them."""

    def __init__(self) -> None:
        self.epoch = 0
        self.probabilities: dict[int, float] = {}
        self._numbers: set[int] = set()
        self._paths: dict[int, tuple[int, ...]] = {ROOT: ()}
        """Of live draft tokens: their paths below the root."""

    @property
    def paths(self) -> set[tuple[int, ...]]:
        """The paths of all live draft tokens."""
        return {path for number, path in self._paths.items() if number != ROOT}

    def take(self, micro_batch: MicroBatch) -> None:
        assert micro_batch.epoch == self.epoch
        for expansion in micro_batch.expansions:
            parent = self._paths[expansion.parent]
            assert len(expansion.candidates) == expansion.n
            for number, (token, prob) in enumerate(expansion.candidates, expansion.first):
                assert number not in self._numbers
                assert number > ROOT
                assert (*parent, token) not in self._paths.values()
                assert 0 < prob <= 1
                self._numbers.add(number)
                self._paths[number] = (*parent, token)
                self.probabilities[number] = prob
            for number, prob in expansion.again:
                assert self._paths[number][:-1] == parent
                self.probabilities[number] = prob

    def accept(self, token: int) -> bool:
        """The target accepted a token. Returns whether it was among the draft tokens."""
        self.epoch += 1
        was_known = (token,) in self.paths
        self._paths = {
            number: path[1:] for number, path in self._paths.items() if path[:1] == (token,) and len(path) > 1
        } | {ROOT: ()}
        return was_known

    def probability(self, *path: int) -> float:
        """The probability of a live draft token after its parent."""
        (number,) = (number for number, one in self._paths.items() if one == path)
        return self.probabilities[number]
