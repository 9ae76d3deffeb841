"""Takes draft tokens back in models whose layers keep a recurrent state.

A recurrent state cannot be rolled back. So it is copied to a spare sequence id before each run with draft tokens, and
the copy is restored when one of them is rejected:

    a run with draft tokens begins        CP(sequence's id -> spare id, no positions)
    all of its draft tokens are accepted  RM(spare id)
    one of them is rejected               CP(spare id -> sequence's id, no positions), RM(sequence's id, from there on)

A CP without positions copies only the state, and costs nothing until one of the two ids continues. Tokens of the run
that were accepted are decoded again before the next root, in the root's run. Each run in flight has its own copy, so
the number of spare ids bounds the runs in flight.

DeepSeek-V4 has such a state as well, in which it collects tokens until they become one KV cell. There, a copy is made
at once.
"""

from __future__ import annotations

from dataclasses import dataclass

from ggpipe.core.messages import KvKind, KvOp
from ggpipe.core.sequence_ids import SequenceIds


@dataclass(slots=True)
class _Border:
    """Where a run with draft tokens begins."""

    pos: int
    seq: int
    """The id that holds the state at this position."""
    end: int
    """Position after the run's last row; `pos` before any run starts here."""


class StateRollback:
    """See the module's text. One per sequence; operations and ids are shared by all sequences of a pipeline."""

    def __init__(self, ids: SequenceIds, ops: list[KvOp], most: int | None = None) -> None:
        """`most`: see `Limits.most_taken_back`."""
        self._ids = ids
        self._most = most
        self._ops = ops
        self._borders: list[_Border] = []
        """The oldest run's first."""
        self.n_again = 0
        """Accepted tokens right before the root that are to be decoded again with it."""

    @property
    def seqs(self) -> list[int]:
        """The ids that hold states."""
        return [border.seq for border in self._borders]

    def begin(self, seq: int, pos: int, last: int) -> bool:
        """A run with draft tokens is to begin, or go on up to `last`, its first node at `pos`. False where there is no
        free id for the state, or no way back from so far."""
        pos -= self.n_again
        first = self._borders[0].pos if self._borders else pos
        if self._most is not None and last - first >= self._most:
            return False
        if self._borders and self._borders[-1].pos == pos:
            return True
        if len(self._ids) <= self._ids.reserved:
            return False
        spare = self._ids.take()
        self._ops.append(KvOp(KvKind.CP, seq, spare, 0, 0))
        self._borders.append(_Border(pos, spare, pos))
        return True

    def placed(self, end: int, has_draft_tokens: bool) -> None:
        """A run has rows up to position `end`."""
        if has_draft_tokens:
            self._borders[-1].end = end
        elif self._borders and self._borders[-1].end == self._borders[-1].pos:
            self._drop(self._borders.pop())
        self.n_again = 0

    def accepted(self, pos: int) -> None:
        """The token at this position is in the text: states that are behind all that may be rejected are given up."""
        while self._borders and self._borders[0].end <= pos + 1:
            self._drop(self._borders.pop(0))

    def back(self, seq: int, pos: int) -> int | None:
        """Bring the text's last state back that stands at `pos` or before. Returns where it stands; None: there is
        none."""
        while self._borders and self._borders[-1].pos > pos:
            self._drop(self._borders.pop())
        if not self._borders:
            return None
        border = self._borders[-1]
        border.end = border.pos
        self._ops += [KvOp(KvKind.CP, border.seq, seq, 0, 0), KvOp(KvKind.RM, seq, p0=border.pos)]
        return border.pos

    def reject(self, seq: int, pos: int) -> None:
        """The token at this position becomes the root, in place of a draft token that is in a run."""
        stands_at = self.back(seq, pos)
        assert stands_at is not None
        self.n_again = pos - stands_at

    def close(self) -> None:
        """The text is over."""
        for border in self._borders:
            self._drop(border)
        self._borders.clear()

    def _drop(self, border: _Border) -> None:
        self._ops.append(KvOp(KvKind.RM, border.seq))
        self._ids.give_back(border.seq)

    def validate(self, root: int, is_submitted: bool, last: int) -> None:
        """Check what must hold between events: a text with its root at this position, and its last row at `last`.

        Raises AssertionError.
        """
        ends = [border.pos for border in self._borders]
        assert ends == sorted(set(ends)), "two states of one position"
        assert all(border.end > root + 1 for border in self._borders) or not is_submitted, "a useless state"
        assert self.n_again == 0 or not is_submitted
        assert len(self._borders) <= 1 or is_submitted
        assert last <= root or (self._borders and self._borders[0].pos <= root + 1), "draft tokens without a way back"
