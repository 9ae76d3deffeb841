"""How many tokens a model may think before it answers, counted as llama.cpp counts them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence


class _At(enum.Enum):
    """Where the text is."""

    OUTSIDE = "in front of a reasoning, or behind one"
    INSIDE = "in a reasoning"
    SPENT = "in a character that is written to its end, with the budget used up"
    WRITING = "in the end that is written"


class ReasoningBudget:
    """Follows a text and says where the end of a reasoning is to be written."""

    def __init__(
        self,
        begins: Sequence[Sequence[int]],
        ends: Sequence[Sequence[int]],
        written: Sequence[int],
        n_most: int,
        is_open: bool,
        piece: Callable[[int], bytes],
    ) -> None:
        """`begins`, `ends`: the tokens of marks. `written`: the end that is written behind `n_most` tokens. `is_open`:
        the text begins inside a reasoning. `piece`: a token's text."""
        self._begins, self._ends = _Finder(begins), _Finder(ends)
        self._written, self._n_most, self._piece = tuple(written), n_most, piece
        self._at, self._n_left = _At.OUTSIDE, n_most
        self._n_written = 0
        if is_open:
            self._begin()

    @property
    def written(self) -> tuple[int, ...]:
        """The next tokens, where they are those of the end that is written; none: the next one is the model's own."""
        return self._written[self._n_written :] if self._at is _At.WRITING else ()

    def accept(self, token: int) -> None:
        """The text goes on with this token."""
        match self._at:
            case _At.OUTSIDE:
                if self._begins.ends_with(token):
                    self._begin()
            case _At.INSIDE | _At.SPENT:
                if self._ends.ends_with(token):
                    self._at = _At.OUTSIDE
                    return
                self._n_left -= 1
                if self._n_left <= 0:
                    if self._at is _At.INSIDE:
                        self._ends.forget()
                        self._at = _At.SPENT
                    if _is_whole(self._piece(token)):
                        self._write()
            case _At.WRITING:
                self._n_written += 1
                if token != self._written[self._n_written - 1] or self._n_written == len(self._written):
                    self._at = _At.OUTSIDE

    def _begin(self) -> None:
        self._ends.forget()
        self._at, self._n_left = _At.INSIDE, self._n_most
        if self._n_left <= 0:
            self._write()

    def _write(self) -> None:
        self._at, self._n_written = (_At.WRITING if self._written else _At.OUTSIDE), 0


class _Finder:
    """Looks for sequences of tokens in a text."""

    def __init__(self, wanted: Sequence[Sequence[int]]) -> None:
        self._wanted = [tuple(one) for one in wanted if one]
        self._last: tuple[int, ...] = ()
        """As many tokens as matter."""
        self._n_most = max(map(len, self._wanted), default=0)

    def ends_with(self, token: int) -> bool:
        """The text goes on with this token, and ends with one of them now: no further one begins in it."""
        self._last = (*self._last, token)[-self._n_most :] if self._n_most else ()
        found = any(self._last[-len(one) :] == one for one in self._wanted)
        if found:
            self.forget()
        return found

    def forget(self) -> None:
        """What comes is looked at as if nothing were in front of it."""
        self._last = ()


def _is_whole(piece: bytes) -> bool:
    """It does not end inside a character in UTF-8."""
    for n, byte in enumerate(reversed(piece[-4:]), 1):
        if byte & 0xC0 != 0x80:
            return n >= (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1)
    return not piece
