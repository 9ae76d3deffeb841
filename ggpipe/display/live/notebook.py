"""A panel below a cell of a Jupyter notebook: HTML that is updated, without widgets."""

from __future__ import annotations

import importlib
import io
import sys
from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.segment import Segment, Segments

from ggpipe.display.live.panel import PanelSize
from ggpipe.display.live.stream import ScreenRow

SPACE = PanelSize(100, 20)
_PRE = '<pre style="margin: 0; line-height: normal; overflow-x: auto; white-space: pre">{code}</pre>'


def in_notebook() -> bool:
    """Whether this process is the kernel of a notebook."""
    ipython: Any = sys.modules.get("IPython")
    shell = ipython.get_ipython() if ipython is not None else None
    return getattr(shell, "kernel", None) is not None


class NotebookPanel:
    """An output of the running cell. Any thread may change it, even after the cell has ended."""

    def __init__(self) -> None:
        ipython: Any = importlib.import_module("IPython.display")  # installed with the kernel
        self._html = ipython.HTML
        self._handle = ipython.display(ipython.HTML(""), display_id=True)

    def show(self, rows: Sequence[ScreenRow]) -> None:
        """Replace the rows that are shown."""
        self._handle.update(self._html(html_of(rows) if rows else ""))


def html_of(rows: Sequence[ScreenRow]) -> str:
    """Rows as HTML."""
    console = Console(
        file=io.StringIO(), record=True, width=SPACE.width, force_terminal=True, color_system="truecolor",
        force_jupyter=False,
    )  # fmt: skip
    for row in rows:
        console.print(Segments([*row, Segment.line()]), end="", soft_wrap=True)
    return console.export_html(inline_styles=True, code_format=_PRE)
