"""A limit on the tokens of a model's reasoning, which are counted as llama.cpp counts them."""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence


class _At(enum.Enum):
    """What the output has reached."""

    OUTSIDE = "text outside any reasoning"
    INSIDE = "reasoning"
    SPENT = "the end of the budget, inside a UTF-8 character that is completed first"
    WRITING = "the forced end of the reasoning"


class ReasoningBudget:
    """Follows the output, and forces the end of a reasoning when its budget is spent."""

    def __init__(
        self,
        begins: Sequence[Sequence[int]],
        ends: Sequence[Sequence[int]],
        written: Sequence[int],
        n_most: int,
        is_open: bool,
        piece: Callable[[int], bytes],
    ) -> None:
        """`begins`, `ends`: tokens of the marks. `written`: tokens that end the reasoning after `n_most` tokens.
        `is_open`: the output begins inside a reasoning. `piece`: returns a token's text as bytes."""
        self._begins, self._ends = _Finder(begins), _Finder(ends)
        self._written, self._n_most, self._piece = tuple(written), n_most, piece
        self._at, self._n_left = _At.OUTSIDE, n_most
        self._n_written = 0
        if is_open:
            self._begin()

    @property
    def written(self) -> tuple[int, ...]:
        """The tokens that are forced next; empty if the model chooses the next token."""
        return self._written[self._n_written :] if self._at is _At.WRITING else ()

    def accept(self, token: int) -> None:
        """Take the next token of the output."""
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
    """Finds sequences of tokens in the output."""

    def __init__(self, wanted: Sequence[Sequence[int]]) -> None:
        self._wanted = [tuple(one) for one in wanted if one]
        self._last: tuple[int, ...] = ()
        """The last tokens, as many as the longest sequence has."""
        self._n_most = max(map(len, self._wanted), default=0)

    def ends_with(self, token: int) -> bool:
        """Take the next token. Returns whether one of the sequences is complete; sequences do not overlap."""
        self._last = (*self._last, token)[-self._n_most :] if self._n_most else ()
        found = any(self._last[-len(one) :] == one for one in self._wanted)
        if found:
            self.forget()
        return found

    def forget(self) -> None:
        """Start a new search with the next token."""
        self._last = ()


def _is_whole(piece: bytes) -> bool:
    """Whether the bytes end with a complete UTF-8 character."""
    for n, byte in enumerate(reversed(piece[-4:]), 1):
        if byte & 0xC0 != 0x80:
            return n >= (4 if byte >= 0xF0 else 3 if byte >= 0xE0 else 2 if byte >= 0xC0 else 1)
    return not piece
