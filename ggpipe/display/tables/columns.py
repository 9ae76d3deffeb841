"""Tables that leave columns out where a terminal is too narrow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from rich.table import Table


@dataclass(frozen=True)
class Column:
    """A column, with its cells from the top."""

    title: str
    cells: list[str]
    need: int
    """Columns with the highest number are left out first; 0 never."""
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """Width of its widest cell."""
        return max(len(self.title), *map(len, self.cells))


def columns_table(columns: Sequence[Column], width: int, gap: int) -> Table:
    """A table of the columns that fit into `width` cells, `gap` cells apart."""
    columns = list(columns)
    while sum(c.width + gap for c in columns) - gap > width:
        least = max(columns, key=lambda c: c.need)
        if least.need == 0:
            break
        columns.remove(least)
    table = Table(box=None, padding=(0, gap, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.title, justify=column.justify, no_wrap=True)
    for cells in zip(*(c.cells for c in columns), strict=True):
        table.add_row(*cells)
    return table
