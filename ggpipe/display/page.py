"""Results on stdout: in colour on a terminal, plain text into files and pipes."""

from __future__ import annotations

import contextlib
import io
import sys

from rich.console import Console, RenderableType

_LOG_WIDTH = 120


def page_console() -> Console:
    """What a page is laid out for."""
    if sys.stdout.isatty():
        return Console(highlight=False)
    return Console(file=io.StringIO(), width=_LOG_WIDTH, color_system=None, force_terminal=False, highlight=False)


def print_page(console: Console, *parts: RenderableType) -> None:
    """Print on stdout what was made for this console. A text that is longer than a line stays one line."""
    for part in parts:
        console.print(part, soft_wrap=isinstance(part, str))
    if isinstance(console.file, io.StringIO):
        with contextlib.suppress(BrokenPipeError):
            sys.stdout.write("\n".join(line.rstrip() for line in console.file.getvalue().splitlines()) + "\n")
            sys.stdout.flush()
