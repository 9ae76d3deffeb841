"""How draft tokens are taken back where a layer's state cannot go back.

A recurrent layer keeps all that it has read in one state. So before a run with draft tokens the state is copied to an
id of its own, and a rejected draft token brings the copy back:

    a run with draft tokens begins        CP(the text's id -> a free id, no positions)
    all of its draft tokens are accepted  RM(that id)
    one of them is rejected               CP(that id -> the text's id, no positions), RM(the text's id, from there on)

A CP without positions copies the state alone, and costs nothing until one of the two ids continues. The tokens between
the place where the run began and the rejected one were accepted: they are decoded again, before the next root, in its
run. Each run in flight has a copy of its own, so as many may follow each other as there are free ids.
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
    """Position after the run's last row; `pos` while no run has begun here."""


class StateRollback:
    """See the module's text. One for each text; operations and ids are those of all texts of a pipeline."""

    def __init__(self, ids: SequenceIds, ops: list[KvOp]) -> None:
        self._ids = ids
        self._ops = ops
        self._borders: list[_Border] = []
        """The oldest run's first."""
        self.n_again = 0
        """Accepted tokens right before the root that are to be decoded again with it."""

    @property
    def seqs(self) -> list[int]:
        """The ids that hold states."""
        return [border.seq for border in self._borders]

    def begin(self, seq: int, pos: int) -> bool:
        """A run with draft tokens is to begin, its first node at `pos`. False where there is no free id for the
        state."""
        pos -= self.n_again
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
        assert all(border.end > root + 1 for border in self._borders) or not is_submitted, "a state of no use"
        assert self.n_again == 0 or not is_submitted
        assert len(self._borders) <= 1 or is_submitted
        assert last <= root or (self._borders and self._borders[0].pos <= root + 1), "draft tokens without a way back"
