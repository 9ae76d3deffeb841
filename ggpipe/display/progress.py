"""Progress of long work, on a terminal: files written, simulations done, a bench's turns."""

from __future__ import annotations

import sys
import time

from rich.progress import (
    BarColumn,
    DownloadColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeRemainingColumn,
)

from ggpipe.display.format import harmless, human_bytes, human_rate
from ggpipe.display.live.terminal import Terminal

_QUIET_S = 1.0


class FileProgress:
    """A bar for files that are written; the finished bar stays. Nothing is drawn when nothing is written."""

    def __init__(self, terminal: Terminal | None, description: str) -> None:
        """Without a terminal there is one line on stderr, when the first bytes are written."""
        self._terminal = terminal
        self._description = description
        self._progress: Progress | None = None
        self._begun = False

    def __call__(self, done_bytes: int, total_bytes: int) -> None:
        """Show the number of bytes written and their total."""
        if not self._begun:
            self._begin(total_bytes)
        if self._progress is not None:
            self._progress.update(self._task, completed=done_bytes)

    def _begin(self, total_bytes: int) -> None:
        self._begun = True
        if self._terminal is None:
            print(f"ggpipe: {self._description} ({human_bytes(total_bytes)})", file=sys.stderr)
            return
        self._terminal.measure()
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn())
        self._progress = Progress(*columns, console=self._terminal.console)
        self._task = self._progress.add_task(harmless(self._description), total=total_bytes)
        self._progress.start()

    def __enter__(self) -> FileProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """End the drawing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class SimulationProgress:
    """The number of simulations done, on stderr where that is a terminal, once the first second is over."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._begun_at = time.monotonic()
        self._shown = False

    def __call__(self, done: int, total: int) -> None:
        """Show the number of simulations done and their total."""
        if self._is_terminal and (self._shown or time.monotonic() > self._begun_at + _QUIET_S):
            self._shown = True
            print(f"\r{done} of {total} simulations", end="", file=sys.stderr, flush=True)

    def __enter__(self) -> SimulationProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the line."""
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._shown = False


class BenchProgress:
    """A bar that is drawn between requests only: while one is measured, the display takes no CPU time from it."""

    def __init__(self, terminal: Terminal | None, n_turns: int) -> None:
        """Without a terminal nothing is drawn."""
        self._n_begun = 0
        self._progress: Progress | None = None
        if terminal is not None:
            terminal.measure()
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=terminal.console, auto_refresh=False, transient=True)
            self._task = self._progress.add_task("", total=n_turns)
            self._progress.start()

    def turn(self, description: str) -> None:
        """A request begins; all before it are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=self._n_begun, description=harmless(description), refresh=True)
        self._n_begun += 1

    def __enter__(self) -> BenchProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None


class BatchProgress:
    """A bar for prompts that are answered, with their tokens a second and the time left."""

    def __init__(self, terminal: Terminal | None, n_prompts: int) -> None:
        """Without a terminal nothing is drawn."""
        self._progress: Progress | None = None
        if terminal is not None:
            terminal.measure()
            columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"), TimeRemainingColumn())
            self._progress = Progress(*columns, console=terminal.console, transient=True, refresh_per_second=4)
            self._task = self._progress.add_task("loading", total=n_prompts)
            self._progress.start()

    def show(self, n_done: int, tokens_per_s: float) -> None:
        """Show the number of prompts that are done."""
        if self._progress is not None:
            self._progress.update(self._task, completed=n_done, description=human_rate(tokens_per_s))

    def __enter__(self) -> BatchProgress:
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
