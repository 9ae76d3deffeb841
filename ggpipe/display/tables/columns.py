"""Tables that omit columns if the terminal is too narrow, and printing them without a terminal."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from rich.console import Console, RenderableType
from rich.table import Table

from ggpipe.display.live.terminal import Terminal

LOG_WIDTH = 120
"""Width of pages and tables that are not for a terminal, in cells."""


@dataclass(frozen=True)
class Column:
    """A column, with its cells from top to bottom."""

    title: str
    cells: list[str]
    need: int
    """Columns with the highest number are omitted first; those with 0 never."""
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        """Width of the widest cell."""
        return max(len(self.title), *map(len, self.cells))


def print_below(terminal: Terminal | None, table: Callable[[int], RenderableType], log_width: int = LOG_WIDTH) -> None:
    """Print a table on the terminal, or as plain text on stderr if there is none. `table`: makes it for a width."""
    if terminal is None:
        print(plain_text(table, log_width), end="", file=sys.stderr)
        return
    terminal.measure()
    terminal.console.print(table(terminal.console.width))


def plain_text(table: Callable[[int], RenderableType], width: int = LOG_WIDTH) -> str:
    """A table as plain text. `table`: makes it for a width."""
    plain = io.StringIO()
    Console(file=plain, width=width, color_system=None, force_terminal=False, markup=False).print(table(width))
    return "".join(f"{line.rstrip()}\n" for line in plain.getvalue().splitlines())


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
