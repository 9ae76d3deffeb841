"""An index of n-grams: earlier occurrences of a sequence's last tokens, in its own prompt and output and in others'.

    index of           n-grams of            kept
    one request        `_OWN` tokens         while the request is running
    all requests       `_SHARED` tokens      up to a number of tokens; sequences that ended first are evicted first

A copy that was changed somewhere is followed across the change (`_Copy`), before the tokens after it are an n-gram that
is found.

Both are hash chains: the latest position of each n-gram, and for each position the previous one. The shared chains
start in a table of fixed size. Eviction removes nothing from the table: places in evicted sequences are skipped. Every
place is compared with the sequence before it is used, so n-grams may share a slot.
"""

from __future__ import annotations

import collections
import mmap
from array import array
from collections.abc import Sequence
from typing import NamedTuple

_OWN = 3
"""Minimum length of a match within the same request, in tokens."""
_SHARED = 5
"""Minimum length of a match in another request, in tokens."""
_MOST_TRIED = 12
"""Maximum number of places of a chain that are compared, from the latest on."""
MOST_FOUND = 16
"""Maximum number of tokens compared per match. A match grows longer than that only by continuing."""
LEAST_COPIED = 8
"""Length of a match, in tokens, from which on it shows that a passage is being copied."""
_MOST_CHANGED = 8
"""Maximum number of tokens in a row that a copy adds or leaves out."""
_TOKEN_BITS = 20
_OWN_MASK = (1 << _TOKEN_BITS * _OWN) - 1
_SHARED_MASK = (1 << _TOKEN_BITS * _SHARED) - 1
_PLACE_BITS = 32
_PLACE_MASK = (1 << _PLACE_BITS) - 1


class Match(NamedTuple):
    """An earlier place with the same tokens as the end of a sequence."""

    tokens: array[int]
    """The sequence that contains the place."""
    at: int
    """Position of the last matching token."""
    length: int
    """Number of matching tokens up to there, as far as they were compared."""
    period: int
    """Distance of the match from the end, if it lies in the same request; otherwise 0."""
    resumed: bool = False
    """The place follows from what was copied before the last change; `length` counts the matching tokens after it."""

    def next(self) -> int | None:
        """The token after the match, or None at the end of another sequence. A request's own sequence is assumed to
        repeat itself beyond its end."""
        n, following = len(self.tokens), self.at + 1
        if following >= n:
            if not self.period:
                return None
            following -= ((following - n) // self.period + 1) * self.period
        return self.tokens[following]

    def longer(self) -> Match:
        """This match, after the sequence has continued with `next()`."""
        tokens, at, length, period, resumed = self
        return Match(tokens, at + 1, length + 1, period, resumed and length + 1 < LEAST_COPIED)


class SharedTexts:
    """Sequences of all requests of an engine, up to a total number of tokens."""

    def __init__(self, most_tokens: int) -> None:
        """`most_tokens`: above this total, sequences that have ended are evicted."""
        self.most_tokens = most_tokens
        self.n_tokens = 0
        """Total number of tokens."""
        self._n_slots = most_tokens | 1  # an odd number: the last token alone would else choose the slot
        self._slots: memoryview | None = None
        self._texts: dict[int, Text] = {}
        self._ended: collections.deque[Text] = collections.deque()
        self._next_id = 1

    @property
    def slots(self) -> memoryview:
        """Place of the last token of an n-gram, by its hash; 0: none. Memory is committed as it is used."""
        if self._slots is None:
            self._slots = memoryview(mmap.mmap(-1, 8 * self._n_slots)).cast("q")
        return self._slots

    def begin(self, text: Text, prompt: array[int]) -> int:
        """Add a new sequence, and return its id. If `prompt` continues a sequence that has ended, as each message of a
        conversation does, the old one is evicted."""
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
        """Mark a sequence as complete. It is kept until its memory is needed."""
        self._ended.append(text)
        self.grown(0)

    def slot(self, key: int) -> int:
        """Slot of the n-gram with this key."""
        return key % self._n_slots

    def grown(self, n_tokens: int) -> None:
        """Count new tokens, and evict sequences that have ended while there are too many."""
        self.n_tokens += n_tokens
        while self.n_tokens > self.most_tokens and self._ended:
            self._evict(self._ended.popleft())

    def _evict(self, text: Text) -> None:
        del self._texts[text.id]
        self.n_tokens -= len(text.tokens)

    def text_at(self, place: int) -> Text | None:
        """The sequence that contains a place. None if it was evicted, and for place 0."""
        return self._texts.get(place >> _PLACE_BITS)

    def validate(self) -> None:
        """Check what must hold between calls. Raises AssertionError."""
        assert self.n_tokens == sum(len(text.tokens) for text in self._texts.values())
        assert self.n_tokens <= self.most_tokens or not self._ended
        assert all(self._texts[text.id] is text for text in self._ended)


class Text:
    """Prompt and output of a request, and the places that match its end."""

    def __init__(self, prompt: Sequence[int], shared: SharedTexts | None) -> None:
        """`shared`: the index that it shares with other requests; None: it shares nothing."""
        self.tokens = array("i")
        self.matches: list[Match] = []
        """Places that match the end: the longest matches first, and the latest first among equally long ones. If none
        is `LEAST_COPIED` tokens long, the place in a changed copy comes before them."""
        self._copy = _Copy()
        self._latest: dict[int, int] = {}
        """Latest position of each n-gram, by its tokens."""
        self._before = array("i")
        """For each position, the previous occurrence of the n-gram that ends there; -1: none."""
        self._key = 0
        self._shared = shared
        self._shared_before = array("q")
        """The same over all requests, as places; 0: none."""
        own = array("i", prompt)
        self.id = shared.begin(self, own) if shared is not None else 0
        self._index(own)
        self._find()

    def push(self, token: int) -> bool:
        """Append a token. Returns True if the matches are the earlier ones, continued."""
        followed = [match.longer() for match in self.matches if match.next() == token]
        self._copy.push(token, self.matches, len(self.tokens))
        self._index((token,))
        if followed and followed[0].length > MOST_FOUND:
            self.matches = followed
            return True
        self._find()
        return False

    def end(self) -> None:
        """Mark the sequence as complete, and free everything that other requests do not need."""
        self.matches, self._copy, self._latest, self._before = [], _Copy(), {}, array("i")
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
        """Find the longest matches."""
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
        if (copied := self._copy.place(end)) is not None and not (found and found[0].length >= LEAST_COPIED):
            found = [copied, *(match for match in found if match.tokens is not copied.tokens or match.at != copied.at)]
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


class _Copy:
    """A passage that a sequence copies, and where in it the sequence is.

    A token that is not the passage's next one may stand for it, be added to it, or come after some that are left out.
    The passage is searched for it; until one of the next tokens is found there, each is thought to stand for one of the
    passage's.
    """

    def __init__(self) -> None:
        self._at: Match | None = None
        """The last token that is the passage's; None: nothing is copied."""
        self._n_changed = 0
        """Tokens since then."""

    def push(self, token: int, matches: Sequence[Match], n: int) -> None:
        """A token is appended to a sequence of `n` tokens. `matches`: the matches before it."""
        if matches and matches[0].length >= LEAST_COPIED:
            self._at, self._n_changed = matches[0], 0
        if (at := self._at) is None:
            return
        if not self._n_changed and at.next() == token:
            self._at = at.longer()
            return
        self._n_changed += 1
        for place in range(at.at + 1, min(at.at + 1 + _MOST_CHANGED, len(at.tokens))):
            if at.tokens[place] == token:
                self._at, self._n_changed = Match(at.tokens, place, 1, at.period and n - place, resumed=True), 0
                return
        if self._n_changed > _MOST_CHANGED:
            self._at = None

    def place(self, end: int) -> Match | None:
        """The place in the passage that the sequence has reached with its last token, number `end`; None: no passage
        was changed lately."""
        if (at := self._at) is None or not (self._n_changed or at.resumed):
            return None
        if not self._n_changed:
            return at
        reached = at.at + self._n_changed
        if not at.period and reached >= len(at.tokens):
            return None
        return Match(at.tokens, reached, 0, at.period and end - reached, resumed=True)


def _length(tokens: array[int], at: int, own: array[int], end: int) -> int:
    """Number of equal tokens before and at `tokens[at]` and `own[end]`, `MOST_FOUND` at most."""
    most = min(at + 1, end + 1, MOST_FOUND)
    if most == MOST_FOUND and tokens[at - most + 1 : at + 1] == own[end - most + 1 : end + 1]:
        return most
    n = 0
    while n < most and tokens[at - n] == own[end - n]:
        n += 1
    return n
