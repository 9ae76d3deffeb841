"""A KV cache with libllama's rules. It breaks the test where libllama would refuse a batch."""

from __future__ import annotations

import collections
import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ggpipe.core.kv.prefix_cache import RESTORED
from ggpipe.core.messages import KvKind, KvOp, Row
from support.fake_model import Tokens

HIDDEN = -1
"""A token of a sequence that has no cell any more."""


@dataclass(eq=False)
class Cell:
    token: int
    pos: int
    seqs: set[int]


class FakeCache:
    """A unified KV cache: cells that hold a token at a position for a set of sequences.

    That of a hybrid model also holds a state for each sequence: the tokens that it has read. A copy copies the state as
    it is, whatever the positions; it cannot forget a part of what its state has read, and an abort leaves that broken.
    """

    def __init__(
        self, n_ctx: int, n_seq: int, hybrid: bool = False, may_hide: bool = False, most_back: int | None = None
    ) -> None:
        """`most_back`: see `Limits.most_taken_back`."""
        self._most_back = most_back
        self.n_ctx, self.n_seq, self.hybrid, self._may_hide = n_ctx, n_seq, hybrid, may_hide
        self.cells: set[Cell] = set()
        self._sequences: dict[int, dict[int, Cell]] = collections.defaultdict(dict)
        self._states: dict[int, Tokens | None] = {}
        """None: broken."""
        self._places: dict[int, object] = {}
        """Where each sequence's state is; that of a copy is the original's until one of the two continues."""
        self._read: dict[int, object | None] = {}
        """Where the state was that a sequence had before its latest rows."""
        self._held: list[object] = []
        """Places that a paused run reads."""

    def apply(self, op: KvOp) -> None:
        """As `llama_memory_seq_rm` and `_cp`."""
        self._apply(op)
        self._check_held()

    def hold(self, seqs: Collection[int]) -> None:
        """A run of these sequences pauses: the states that it reads must stay where they are."""
        if self.hybrid:
            self._held = [place for seq in seqs for place in (self._read.get(seq), self._places.get(seq)) if place]

    def let_go(self) -> None:
        """It continues."""
        self._held.clear()

    def _check_held(self) -> None:
        places = self._places.values()
        assert all(place in places for place in self._held), "the place of a state that is read may be used again"

    def _apply(self, op: KvOp) -> None:
        assert 0 <= op.seq < self.n_seq
        p0, p1 = max(op.p0, 0), op.p1 if op.p1 >= 0 else math.inf
        match op.kind:
            case KvKind.RM:
                self._remove(op.seq, p0, p1)
            case KvKind.CP:
                assert 0 <= op.dst < self.n_seq
                assert op.dst != op.seq
                if p0 == p1:  # the state alone, which may be taken back
                    assert self.hybrid, "there is no state to copy"
                    self._copy_state(op.seq, op.dst)
                    return
                assert not self._sequences[op.dst], "cells of an earlier user are left in that sequence"
                assert op.dst not in self._states, "the state of an earlier user is left in that sequence"
                self._copy_state(op.seq, op.dst)
                for pos, cell in self._sequences[op.seq].items():
                    if p0 <= pos < p1:
                        cell.seqs.add(op.dst)
                        self._sequences[op.dst][pos] = cell

    def _copy_state(self, seq: int, dst: int) -> None:
        self._states[dst] = self._states.get(seq, ())
        self._places.pop(dst, None)
        if seq in self._places:
            self._places[dst] = self._places[seq]

    @property
    def with_state(self) -> set[int]:
        """Sequences that have read something."""
        return {seq for seq, state in self._states.items() if state != ()}

    def _remove(self, seq: int, p0: float, p1: float) -> None:
        cells = self._sequences[seq]
        if p0 <= 0 and p1 == math.inf:
            self._states.pop(seq, None)
            self._places.pop(seq, None)
        elif self.hybrid:
            state = self._states.get(seq, ())
            assert state is not None, "a broken state"
            assert p0 >= len(state), "libllama: a state cannot forget a part"
            too_far = self._most_back is not None and cells and max(cells) - p0 >= self._most_back
            assert not too_far, "a cell before these may be lost"
        for pos in [pos for pos in cells if p0 <= pos < p1]:
            cell = cells.pop(pos)
            cell.seqs.remove(seq)
            if not cell.seqs:
                self.cells.remove(cell)

    def restore(self, tokens: Tokens, seq: int = RESTORED) -> None:
        """What a file has, into an empty sequence."""
        assert not self.history(seq), "something is in that sequence"
        self.decode([Row(token=token, pos=i, seqs=(seq,), request=0) for i, token in enumerate(tokens)])

    def history(self, seq: int) -> Tokens:
        """The tokens of a sequence. It must have no gap, or `HIDDEN` tokens, but not at its start."""
        cells = self._sequences[seq]
        if self._may_hide and cells:
            assert 0 in cells, "the start of a text is hidden"
            return tuple(cells[pos].token if pos in cells else HIDDEN for pos in range(max(cells) + 1))
        assert sorted(cells) == list(range(len(cells))), "a hole in the sequence"
        tokens = tuple(cells[pos].token for pos in range(len(cells)))
        assert not self.hybrid or self._states.get(seq, ()) == tokens, "the state is another sequence's"
        return tokens

    def decode(self, rows: Sequence[Row]) -> list[Tokens]:
        """All tokens that each row sees, its own last."""
        for row in rows:
            assert row.seqs
            assert len(set(row.seqs)) == len(row.seqs)
            spans = {(min(cells, default=-1), max(cells, default=-1)) for cells in map(self._cells_of, row.seqs)}
            assert len(spans) == 1, "libllama: coupled sequences have diverged"
        self._place_states({seq for row in rows for seq in row.seqs})
        histories = []
        for row in rows:
            cell = Cell(row.token, row.pos, set(row.seqs))
            self.cells.add(cell)
            for seq in row.seqs:
                cells = self._cells_of(seq)
                assert row.pos == max(cells, default=-1) + 1, "libllama: inconsistent sequence positions"
                cells[row.pos] = cell
                if self.hybrid:
                    state = self._states.get(seq, ())
                    assert state is not None, "a broken state"
                    self._states[seq] = (*state, row.token)
            seen = {self.history(seq) for seq in row.seqs}
            assert len(seen) == 1, "coupled sequences hold different tokens"
            histories.append(seen.pop())
        assert len(self.cells) <= self.n_ctx, "libllama: no free cells"
        return histories

    def _place_states(self, seqs: set[int]) -> None:
        """As libllama does it: a sequence that has a place for itself keeps it; of several, places are moved."""
        assert len(seqs) <= 1 or not self.hybrid or not self._held, "the state that a paused run writes is moved"
        for seq in seqs:
            place = self._read[seq] = self._places.get(seq)
            if place is None or list(self._places.values()).count(place) > 1:
                self._places[seq] = object()
            else:
                assert place not in self._held, "a state that is read is overwritten"
        self._check_held()

    def tip(self, seq: int) -> int:
        """The last position in a sequence; -1: it is empty."""
        return max(self._sequences[seq], default=-1)

    def _cells_of(self, seq: int) -> dict[int, Cell]:
        assert 0 <= seq < self.n_seq
        return self._sequences[seq]

    def forget(self, rows: Sequence[Row]) -> None:
        """After an abort: the rows' cells go, for all their sequences; where there are states, nothing can go."""
        for seq in {seq for row in rows for seq in row.seqs}:
            if self.hybrid:
                self._states[seq] = None
                continue
            self._remove(seq, min(row.pos for row in rows if seq in row.seqs), math.inf)
