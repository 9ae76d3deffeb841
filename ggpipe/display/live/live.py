"""The live display: loading bars, then streamed text with a panel below it.

A separate thread draws ten frames per second. `text` only queues the text, so a slow or stopped terminal never delays
the pipeline. Complete lines are printed once, above the live region, without wrapping: the terminal wraps them, and its
scrollback has the exact text. The region, which each frame erases and draws again, has the last rows of the unfinished
line, and the panel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.live import Live
from rich.segment import ControlType, Segment, Segments
from rich.style import Style

from ggpipe.display.live.panel import DIM, PanelSize, generating_panel, loading_panel
from ggpipe.display.live.stream import ScreenRow, TextStream
from ggpipe.display.live.terminal import Terminal
from ggpipe.stats.activity import taking_part
from ggpipe.stats.occupancy import Occupancy
from ggpipe.stats.records import RankStats, RequestStats

_FRAME_S = 0.1
_LOADING_SHOWN_AFTER_S = 0.3  # shorter loading is not shown
_PANEL_SHARE = 0.6  # maximum share of the screen's height


class LiveDisplay:
    """Shows a session on a terminal: `loading`, then for each request `request`, `prompt`, `text`..., `stop`.

    Each frame reads the figures from `ranks` (the session's totals) and from the request's stats, which others update
    by the same `clock`. While `is_loading()`, the request waits for restarted ranks, whose progress is shown below the
    text. All methods except `stop` return at once, and drawing errors are not raised: the text then continues without
    a panel.
    """

    def __init__(
        self,
        terminal: Terminal | None,
        ranks: Sequence[RankStats],
        is_loading: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        stream: Callable[[], TextStream] = TextStream,
    ) -> None:
        """Without a terminal, nothing is shown. `stream`: makes the text stream of each request."""
        self._given_terminal = terminal
        self._ranks = ranks
        self._is_loading = is_loading
        self._clock = clock
        self._new_stream = stream
        self._stream = stream()
        self._request: RequestStats | None = None
        self._any_text = False
        self._occupancy = Occupancy()
        self._region = _Region()
        self._live: Live | None = None
        self._thread: threading.Thread | None = None
        self._stopping = threading.Event()
        self._started = 0.0
        self.error: Exception | None = None
        """Why drawing has failed, if it has."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    @property
    def _terminal(self) -> Terminal:
        assert self._given_terminal is not None  # or nothing would be drawn
        return self._given_terminal

    def loading(self) -> None:
        """Show how far the ranks have loaded, until `request` or `stop`."""
        self._start()

    def request(self, stats: RequestStats) -> None:
        """Show a request from now on. Others update `stats`."""
        self._occupancy = Occupancy()
        self._request = stats
        self._start()

    def prompt(self, text: str) -> None:
        """Show the prompt, dim, before the output."""
        self._feed(text, DIM)

    def text(self, piece: str, style: Style | None = None) -> None:
        """Append output. `style`: for the origin of the piece, see `origin_style`."""
        self._feed(piece, style)

    def aside(self, piece: str) -> None:
        """Append text that is not part of the output, unformatted and dim."""
        self._feed(piece, DIM, plain=True)

    def _feed(self, text: str, style: Style | None, plain: bool = False) -> None:
        if self._given_terminal is not None:
            self._any_text = True
            self._stream.feed(text, style, plain)

    def stop(self) -> None:
        """Remove the live region. The prompt and the output stay on the screen, followed by a newline."""
        if self._thread is None:
            return
        self._stopping.set()
        self._thread.join()
        self._thread = None
        if self._any_text:
            self._stream.end()
        self._guarded(self._finish)
        self._stream, self._region, self._request, self._any_text = self._new_stream(), _Region(), None, False

    def _start(self) -> None:
        if self._thread is not None or self._given_terminal is None:
            return
        self._stopping.clear()
        self._started = self._clock()
        self._guarded(self._open)
        self._thread = threading.Thread(target=self._draw, name="display", daemon=True)
        self._thread.start()

    # In the drawing thread

    def _draw(self) -> None:
        while True:
            self._guarded(self._frame)
            if self._stopping.wait(_FRAME_S):
                return

    def _guarded(self, action: Callable[[], None]) -> None:
        """Run an action that draws. Once one has failed, write only the text."""
        if self.error is None:
            try:
                action()
                return
            except Exception as e:
                self.error = e
        with contextlib.suppress(Exception):
            if self._live is not None:
                live, self._live = self._live, None
                self._region.rows = []
                live.stop()
        with contextlib.suppress(Exception):
            self._stream.take()
            rest, self._stream.complete, self._stream.line = self._stream.rest(), [], []
            self._terminal.console.file.write("".join(segment.text for segment in rest))
            self._terminal.console.file.flush()

    def _open(self) -> None:
        stray = self._terminal.own_stderr  # print other output on stderr above the region
        self._live = Live(
            self._region,
            console=self._terminal.console,
            auto_refresh=False,
            transient=True,
            redirect_stderr=stray,
            redirect_stdout=stray and self._terminal.stdout_shared,
            vertical_overflow="crop",
        )
        self._live.start()

    def _frame(self) -> None:
        now = self._clock()
        if self._request is None and now - self._started < _LOADING_SHOWN_AFTER_S:
            return
        self._terminal.measure()
        self._stream.take()
        with self._terminal.console as console:  # a single write
            self._close_up(console)
            self._region.rows = self._rows(now, console)
            self._region.width = console.width
            self._print(console)

    def _finish(self) -> None:
        assert self._live is not None
        self._terminal.measure()
        self._stream.take()
        with self._terminal.console as console:
            self._close_up(console)
            self._region.rows = []
            self._print(console)
            self._live.stop()
            self._live = None

    def _rows(self, now: float, console: Console) -> list[ScreenRow]:
        width, height = console.size
        space = PanelSize(width, height - 1, console.options.ascii_only, not console.no_color)
        request = self._request
        if request is None:
            return loading_panel(self._ranks, space)
        space = replace(space, height=int(height * _PANEL_SHARE))
        if self._is_loading():
            self._occupancy = Occupancy()
            panel = loading_panel(self._ranks, space)
            return [*self._stream.rows(width, height - 1 - len(panel)), *panel]
        ranks = taking_part(request, self._ranks)
        panel = generating_panel(ranks, self._occupancy.sample(ranks, now), request, now, space)
        return [*self._stream.rows(width, height - 1 - len(panel)), *panel]

    def _print(self, console: Console) -> None:
        """Print complete lines, if any, above the region, and draw the region."""
        assert self._live is not None
        if self._stream.complete:
            console.print(Segments(self._stream.complete), soft_wrap=True, end="")
            self._stream.complete = []
        else:
            self._live.refresh()

    def _close_up(self, console: Console) -> None:
        """Once the terminal has become narrower, erase the additional rows that wrapping has added, unknown to Rich."""
        if console.width >= self._region.width or not self._terminal.reflows:
            return
        cells = (Segment.get_line_length(row) for row in self._region.rows)
        added = sum((n - 1) // console.width for n in cells if n)
        console.control(Control(*[(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * added))


class _Region:
    """The rows that the live region shows now."""

    def __init__(self) -> None:
        self.rows: list[ScreenRow] = []
        self.width = 0
        """Width of the screen when they were drawn."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for i, row in enumerate(self.rows):
            if i:
                yield Segment.line()
            yield from row
