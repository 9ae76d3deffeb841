"""Leaves dead rows out of the runs of a stage, and out of what the stage before sent for them."""

from __future__ import annotations

import struct
from collections.abc import Callable, Collection, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from ggpipe.core.dropped_rows import kept, rows_in_group
from ggpipe.core.messages import Row, Run

FRAME = struct.Struct("<QQ")  # native/wire.cpp: bytes of the name, bytes of data
SAME = 1 << 63
"""In a frame's second number: no data follow. They are those of the frame whose number the other bits are."""
_NOTHING: frozenset[int] = frozenset()


class RowFilter:
    """Decides which rows of its runs a stage drops; see `core.dropped_rows`."""

    def __init__(self, row_bytes: Mapping[str, int] | None, tip: Callable[[int], int] | None) -> None:
        """`row_bytes`: bytes for each row of the tensors that come from the stage before, by name; None: not all of
        them have bytes for each row, or the model cannot do without a row, so the stage drops none. `tip`: in a group,
        gives the last position in a sequence, -1 if it is empty."""
        self._row_bytes = row_bytes
        self._tip = tip

    def dropped(self, run: Run, dead: Collection[int]) -> frozenset[int]:
        """Numbers of the rows that are not computed: those that the stage before dropped, and these dead ones."""
        dead = _NOTHING.union(dead) - run.dropped
        if self._row_bytes is None or not dead:
            return run.dropped
        return run.dropped | (dead - self._fillers(run, dead) if self._tip is not None else dead)

    def _fillers(self, run: Run, dead: Collection[int]) -> set[int]:
        """Dead rows that are computed all the same, so that a group's graph comes again. What they hang on must be
        there."""
        assert self._tip is not None
        n_rows = len(run.rows) - len(run.dropped)
        n_more = rows_in_group(n_rows - len(dead), n_rows) - (n_rows - len(dead))
        fillers: set[int] = set()
        tips: dict[int, int] = {}
        for number, row in enumerate(run.rows):
            if number in dead:
                if len(fillers) == n_more or not self._follows(row, tips):
                    continue
                fillers.add(number)
            if number not in run.dropped:
                tips.update(dict.fromkeys(row.seqs, row.pos))
        return fillers

    def _follows(self, row: Row, tips: Mapping[int, int]) -> bool:
        """Whether the row before it is computed. `tips`: last positions in the sequences of the rows before."""
        assert self._tip is not None
        seq, *others = row.seqs
        return not others and row.pos == 1 + (tips[seq] if seq in tips else self._tip(seq))

    def incoming(self, data: memoryview, run: Run, dropped: Collection[int]) -> bytes | memoryview | None:
        """What the stage before sent for a run, without the rows that are dropped here. None: it has another form, and
        this stage drops no rows from now on."""
        if len(dropped) == len(run.dropped):
            return data
        n_rows = len(run.rows) - len(run.dropped)
        places = [i for i, row in enumerate(kept(range(len(run.rows)), run.dropped)) if row not in dropped]
        parts: list[bytes | memoryview] = []
        sizes: dict[int, int] = {}
        at = 0
        while at < len(data):
            n_name, n_data = FRAME.unpack_from(data, at)
            name_at, data_at = at + FRAME.size, at + FRAME.size + padded(n_name)
            is_same = n_data & SAME > 0
            if is_same:
                n_data = sizes.get(n_data ^ SAME, 0)
            sizes[len(sizes)] = n_data
            name = bytes(data[name_at : name_at + n_name]).decode()
            assert self._row_bytes is not None
            if n_data != n_rows * self._row_bytes.get(name, 0):
                self._row_bytes = None
                return None
            if is_same:
                parts.append(data[at:data_at])
                at = data_at
                continue
            rows = np.frombuffer(data, np.uint8, n_data, data_at).reshape(n_rows, -1)[places]
            parts += [FRAME.pack(n_name, rows.nbytes), data[name_at:data_at]]
            parts += [rows.tobytes(), bytes(padded(rows.nbytes) - rows.nbytes)]
            at = data_at + padded(n_data)
        return b"".join(parts)


def padded(n_bytes: int) -> int:
    """Bytes in a frame of a name or data with that many."""
    return n_bytes + -n_bytes % 8


def with_dropped(states: NDArray[np.float32], numbers: Sequence[int], n_dropped: int) -> NDArray[np.float32]:
    """States of computed rows, (rows, width), with zeros for `n_dropped` others. `numbers`: of the computed rows."""
    whole = np.zeros((len(numbers) + n_dropped, states.shape[1]), np.float32)
    whole[list(numbers)] = states
    return whole
