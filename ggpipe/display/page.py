"""Results on stdout: in colour on a terminal, plain text into files and pipes."""

from __future__ import annotations

import contextlib
import io
import sys

from rich.console import Console, RenderableType
from rich.text import Text

from ggpipe.display.terminal import is_rank, open_terminal

_LOG_WIDTH = 120


def page_console() -> Console:
    """What a page is laid out for."""
    if not is_rank():
        if sys.stdout.isatty():
            return Console(highlight=False)
    else:
        terminal = open_terminal()
        if terminal is not None and terminal.stdout_shared:
            terminal.measure()
            return terminal.console
    return Console(file=io.StringIO(), width=_LOG_WIDTH, color_system=None, force_terminal=False, highlight=False)


def print_page(console: Console, *parts: RenderableType) -> None:
    """Print on stdout what was made for this console; only `Text` that is longer than a line goes on beyond its end."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, Text), highlight=False)
    if isinstance(console.file, io.StringIO):
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write("\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n")
            sys.stdout.flush()
