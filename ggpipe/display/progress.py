"""Progress of long work: files written, simulations done, turns of a benchmark, prompts answered."""

from __future__ import annotations

import sys
import time
from typing import Self

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ggpipe.display.format import harmless, human_bytes
from ggpipe.display.live.terminal import Terminal

_QUIET_S = 1.0
_LINE_EVERY_S = 10.0


class _Bar:
    """A context in which a bar may be drawn."""

    _progress: Progress | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Stop drawing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class FileProgress(_Bar):
    """A bar for writing files, which stays when they are finished. Nothing is drawn if nothing is written."""

    def __init__(self, terminal: Terminal | None, description: str) -> None:
        """Without a terminal, the first bytes written put a line on stderr, and later ones now and then another."""
        self._terminal = terminal
        self._description = description
        self._has_started = False
        self._line_at = 0.0

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show the number of bytes written and their total."""
        if not self._has_started:
            self._start(total_bytes)
        if self._progress is not None:
            self._progress.update(self._task, completed=done_bytes)
        elif self._terminal is None and time.monotonic() > self._line_at + _LINE_EVERY_S:
            self._line(f"{human_bytes(done_bytes)} of {human_bytes(total_bytes)}")

    def _start(self, total_bytes: int) -> None:
        self._has_started = True
        if self._terminal is None:
            self._line(human_bytes(total_bytes))
            return
        self._terminal.measure()
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        self._progress = Progress(*columns, console=self._terminal.console)
        self._task = self._progress.add_task(harmless(self._description), total=total_bytes)
        self._progress.start()

    def _line(self, bytes_done: str) -> None:
        self._line_at = time.monotonic()
        print(f"ggpipe: {self._description} ({bytes_done})", file=sys.stderr, flush=True)


class CountProgress(_Bar):
    """A bar for work that can be counted; it disappears at the end."""

    def __init__(self, terminal: Terminal | None, total: int, refreshes: bool = True) -> None:
        """Without a terminal, nothing is drawn. `refreshes`: draw four times per second, instead of only in `show`."""
        if terminal is not None:
            terminal.measure()
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            console = terminal.console
            self._progress = Progress(
                *columns, console=console, transient=True, auto_refresh=refreshes, refresh_per_second=4
            )
            self._task = self._progress.add_task("", total=total)
            self._progress.start()

    def show(self, n_done: int, description: str) -> None:
        """Show how much is done, and what comes next."""
        if self._progress is not None:
            is_manual = not self._progress.live.auto_refresh
            self._progress.update(self._task, completed=n_done, description=harmless(description), refresh=is_manual)


class SimulationProgress:
    """The number of simulations done, on stderr: after the first second on a terminal, otherwise as a line now and
    then."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._started_at = self._line_at = time.monotonic()
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        """Show the number of simulations done and their total."""
        if self._is_terminal and (self._shown or time.monotonic() > self._started_at + _QUIET_S):
            self._shown = True
            print(f"\r{done} of {total} simulations", end="", file=sys.stderr, flush=True)
        elif not self._is_terminal and time.monotonic() > self._line_at + _LINE_EVERY_S:
            self._line_at = time.monotonic()
            print(f"ggpipe: {done} of {total} simulations", file=sys.stderr, flush=True)

    def __enter__(self) -> SimulationProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line."""
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._shown = False
