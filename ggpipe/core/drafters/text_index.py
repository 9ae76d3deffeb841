"""Where the last tokens of an output occurred before: in its own prompt and output, and in those of other requests.

    text             found by its last          kept
    the request's    `_OWN` tokens              while the request lasts
    all requests'    `_SHARED` tokens           up to a number of tokens; the texts that ended first are evicted

Both are hash chains: for an n-gram the latest position, and for each position the one before it. The shared chains
start in a table of fixed size. Nothing is removed from it when a text is evicted: places in evicted texts are skipped,
and every place is compared with the text before it is used, so that n-grams may share a slot.
"""

from __future__ import annotations

import collections
import mmap
from array import array
from collections.abc import Sequence
from typing import NamedTuple

_OWN = 3
"""Tokens of a match in the request's own text, at least."""
_SHARED = 5
"""Tokens of a match in other requests' texts, at least."""
_MOST_TRIED = 12
"""Places of each chain that are compared, the latest first."""
MOST_FOUND = 16
"""Tokens of a match that are compared. Longer ones show while the match continues; until then others are looked for."""
_TOKEN_BITS = 20
_OWN_MASK = (1 << _TOKEN_BITS * _OWN) - 1
_SHARED_MASK = (1 << _TOKEN_BITS * _SHARED) - 1
_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1


class Match(NamedTuple):
    """A place whose tokens are those at the end of a text."""

    tokens: array[int]
    """The text in which the place is."""
    at: int
    """Position of the last token that matches."""
    length: int
    """Tokens up to there that match, as far as they were counted."""
    period: int
    """Within the request's own text: how far before the end of the text the match lies; else 0."""

    def next(self) -> int | None:
        """The token that follows, None at the end of another text. The request's own text is taken to repeat itself
        beyond its end."""
        n, following = len(self.tokens), self.at + 1
        if following >= n:
            if not self.period:
                return None
            following -= ((following - n) // self.period + 1) * self.period
        return self.tokens[following]

    def longer(self) -> Match:
        """The match when the text continues with the token that follows."""
        return Match(self.tokens, self.at + 1, self.length + 1, self.period)


class SharedTexts:
    """The texts of all requests of an engine, within a bound."""

    def __init__(self, most_tokens: int) -> None:
        """`most_tokens`: texts that have ended are evicted beyond it."""
        self.most_tokens = most_tokens
        self.n_tokens = 0
        """Of all texts."""
        self._n_slots = most_tokens | 1  # an odd number: the last token alone would else choose the slot
        self._slots: memoryview | None = None
        self._texts: dict[int, Text] = {}
        self._ended: collections.deque[Text] = collections.deque()
        self._next_id = 1

    @property
    def slots(self) -> memoryview:
        """By the hash of an n-gram: the place of its last token, 0 for none. Its memory is committed as it is used."""
        if self._slots is None:
            self._slots = memoryview(mmap.mmap(-1, 8 * self._n_slots)).cast("q")
        return self._slots

    def begin(self, text: Text, prompt: array[int]) -> int:
        """Take in a text that begins; returns its id. An ended text that `prompt` continues is evicted, since all of
        it is in the new one: conversations come back with each message."""
        for ended in self._ended:
            n = len(ended.tokens)
            if n <= len(prompt) and ended.tokens[-1] == prompt[n - 1] and ended.tokens == prompt[:n]:
                self._ended.remove(ended)
                self._evict(ended)
                break
        self._next_id += 1
        self._texts[self._next_id - 1] = text
        return self._next_id - 1

    def end(self, text: Text) -> None:
        """It gets no more tokens. It stays until its memory is needed."""
        self._ended.append(text)
        self.grown(0)

    def slot(self, key: int) -> int:
        """Of the n-gram with this key."""
        return key % self._n_slots

    def grown(self, n_tokens: int) -> None:
        """A text got this many tokens: evict what is beyond the bound."""
        self.n_tokens += n_tokens
        while self.n_tokens > self.most_tokens and self._ended:
            self._evict(self._ended.popleft())

    def _evict(self, text: Text) -> None:
        del self._texts[text.id]
        self.n_tokens -= len(text.tokens)

    def text_at(self, place: int) -> Text | None:
        """The text that a place is in; None where it was evicted, or for no place."""
        return self._texts.get(place >> _PLACE_BITS)

    def validate(self) -> None:
        """Check what must hold between calls. Raises AssertionError."""
        assert self.n_tokens == sum(len(text.tokens) for text in self._texts.values())
        assert self.n_tokens <= self.most_tokens or not self._ended
        assert all(self._texts[text.id] is text for text in self._ended)


class Text:
    """One request's prompt and output, and what its end matches."""

    def __init__(self, prompt: Sequence[int], shared: SharedTexts | None) -> None:
        """`shared`: where it is found by other requests and finds them; None keeps it to itself."""
        self.tokens = array("i")
        self.matches: list[Match] = []
        """Places whose tokens are those at the end of the text, the longest and of these the latest ones first."""
        self._latest: dict[int, int] = {}
        """By the last tokens of an n-gram: its latest position."""
        self._before = array("i")
        """By position: where the n-gram that ends there stood before in this text; -1: nowhere."""
        self._key = 0
        self._shared = shared
        self._shared_before = array("q")
        """By position: the place in any text where the n-gram that ends there stood before; 0: nowhere."""
        own = array("i", prompt)
        self.id = shared.begin(self, own) if shared is not None else 0
        self._index(own)
        self._find()

    def push(self, token: int) -> bool:
        """The text continues with a token. True where the matches are only those before that go on."""
        followed = [match.longer() for match in self.matches if match.next() == token]
        self._index((token,))
        if followed and followed[0].length > MOST_FOUND:
            self.matches = followed
            return True
        self._find()
        return False

    def end(self) -> None:
        """Nothing more is coming. What other requests need stays."""
        self.matches, self._latest, self._before = [], {}, array("i")
        if self._shared is not None:
            self._shared.end(self)

    def _index(self, tokens: Sequence[int]) -> None:
        own_key, latest, before, position = self._key, self._latest, self._before, len(self.tokens)
        for i, token in enumerate(tokens, position):
            own_key = (own_key << _TOKEN_BITS | token) & _SHARED_MASK
            key = own_key & _OWN_MASK
            before.append(latest.get(key, -1))
            latest[key] = i
        if self._shared is not None:
            shared_key, slots, n_slots = self._key, self._shared.slots, self._shared.slot
            place, shared_before = self.id << _PLACE_BITS | position, self._shared_before
            for token in tokens:
                shared_key = (shared_key << _TOKEN_BITS | token) & _SHARED_MASK
                slot = n_slots(shared_key)
                shared_before.append(slots[slot])
                slots[slot] = place
                place += 1
            self._shared.grown(len(tokens))
        self._key = own_key
        self.tokens.extend(tokens)

    def _find(self) -> None:
        """Look for the longest matches."""
        tokens = self.tokens
        end = len(tokens) - 1
        found: list[Match] = []
        place = self._before[end]
        for _ in range(_MOST_TRIED):
            if place < 0:
                break
            length = _length(tokens, place, tokens, end)
            if length >= _OWN:
                found.append(Match(tokens, place, length, end - place))
            place = self._before[place]
        if self._shared is not None:
            found += self._find_shared(self._shared)
        if len(found) > 1:
            found.sort(key=lambda match: -match.length)
        self.matches = found

    def _find_shared(self, shared: SharedTexts) -> list[Match]:
        tokens = self.tokens
        end = len(tokens) - 1
        found: list[Match] = []
        place = self._shared_before[end]
        for _ in range(_MOST_TRIED):
            other = shared.text_at(place)
            if other is None:
                break
            at = place & _PLACE_MASK
            if other is not self:  # its own chain has those
                length = _length(other.tokens, at, tokens, end)
                if length >= _SHARED:
                    found.append(Match(other.tokens, at, length, 0))
            place = other._shared_before[at]
        return found


def _length(tokens: array[int], at: int, own: array[int], end: int) -> int:
    """How many tokens up to `tokens[at]` are those up to `own[end]`; no more than `MOST_FOUND` are compared."""
    most = min(at + 1, end + 1, MOST_FOUND)
    if most == MOST_FOUND and tokens[at - most + 1 : at + 1] == own[end - most + 1 : end + 1]:
        return most
    n = 0
    while n < most and tokens[at - n] == own[end - n]:
        n += 1
    return n
