"""How far a bench is, on a terminal."""

from __future__ import annotations

from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from ggpipe.display.terminal import Terminal
from ggpipe.display.wording import harmless


class BenchProgress:
    """A bar that is drawn between requests only: while one is measured, the display takes nothing from it."""

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

    def stop(self) -> None:
        """Take the bar away. A second call does nothing."""
        if self._progress is not None:
            self._progress.stop()
            self._progress = None
