"""How much work the rows of a run are: the weights that they read, and their attention."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

LONG_ROWS, LONG_CELLS = 256, 1024
"""Rows of a run, and cells that they see, from which on keys and values are expanded from latent vectors: see
native/latent.cpp."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """What attention takes in one or several layers, in any unit of work."""

    cell: float
    """For a row and a KV cell that it sees."""
    most_cells: int = 0
    """Number of cells that a row sees: a sliding window, or those that the model selects. 0: all of its sequence."""
    index: float = 0.0
    """To select them: for a row and a cell of its sequence."""
    near_cell: float = 0.0
    """For a row and a cell of a window, which it sees as well. Then other cells hold several tokens each, and the
    numbers above are for each of these."""
    n_near: int = 0
    """Number of cells of this window; 0: there is none."""
    long_cell: float = 0.0
    """Of latent attention in long runs: for a row and a cell that it sees. 0: the same as in short runs."""
    expansion: float = 0.0
    """Of latent attention in long runs: once for each cell."""

    def of_run(self, n_rows: int, n_past: float) -> float:
        """Work for `n_rows` tokens after `n_past` tokens."""
        short = self.in_short_runs(n_rows, n_past)
        n_cells = n_past + n_rows
        if not self.long_cell or n_rows < LONG_ROWS or n_cells < LONG_CELLS:
            return short
        pairs = _seen(n_rows, n_past, self.most_cells)
        return min(short, short + pairs * (self.long_cell - self.cell) + n_cells * self.expansion)

    def in_short_runs(self, n_tokens: int, n_past: float) -> float:
        """Work for these tokens in any number of runs that are not long."""
        work = self.cell * _seen(n_tokens, n_past, self.most_cells) + self.index * _pairs(n_tokens, n_past)
        return work + self.near_cell * _seen(n_tokens, n_past, self.n_near) if self.n_near else work

    def never_long(self) -> Attention:
        """The same where long runs are computed as short ones."""
        return replace(self, long_cell=0.0, expansion=0.0)

    def times(self, factor: float) -> Attention:
        """The same in another unit, or of several layers."""
        return replace(
            self,
            cell=self.cell * factor,
            index=self.index * factor,
            near_cell=self.near_cell * factor,
            long_cell=self.long_cell * factor,
            expansion=self.expansion * factor,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RowWork:
    """A model's work, relative to that of a row without attention."""

    sparsity: float = 1.0
    """Weights of the model, as a multiple of those that one row uses: 1 where it uses all, more with experts."""
    attention: tuple[Attention, ...] = ()
    """Of all layers."""

    def never_long(self) -> RowWork:
        """The same where long runs are computed as short ones."""
        return replace(self, attention=tuple(attention.never_long() for attention in self.attention))


ONLY_WEIGHTS = RowWork()
"""All rows use all weights, and attention takes no time."""


def together(layers: Iterable[Attention]) -> tuple[Attention, ...]:
    """The attention of all these layers; equal ones are added up."""
    counts: dict[Attention, int] = {}
    for attention in layers:
        if attention.cell or attention.index or (attention.near_cell and attention.n_near):
            counts[attention] = counts.get(attention, 0) + 1
    return tuple(attention.times(n) for attention, n in counts.items())


def _pairs(n_rows: int, n_past: float) -> float:
    """Pairs of a row and a cell of its sequence, its own included."""
    return n_rows * (n_past + (n_rows + 1) / 2)


def _seen(n_rows: int, n_past: float, most_cells: int) -> float:
    """Pairs of a row and a cell that it sees; `most_cells`: see `Attention`."""
    if not most_cells:
        return _pairs(n_rows, n_past)
    n_growing = int(min(max(most_cells - n_past, 0), n_rows))
    return _pairs(n_growing, n_past) + (n_rows - n_growing) * most_cells
