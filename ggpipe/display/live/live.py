"""The live display: loading bars, then streamed text with a panel below it.

A thread of its own draws, ten frames a second; `text` only hands text over, so a slow or a stopped terminal
never holds up the pipeline. Lines that are complete are printed once, above the live region, as they are:
the terminal wraps them and its scrollback holds the exact text. The region, which is erased and drawn again
with each frame, holds the unfinished line's last rows and the panel.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from types import TracebackType
from typing import Self

from rich.console import Console, ConsoleOptions, RenderResult
from rich.control import Control
from rich.errors import StyleSyntaxError
from rich.live import Live
from rich.segment import ControlType, Segment
from rich.style import Style

from ggpipe.display.live.panel import DIM, PanelSize, generating_panel, loading_panel
from ggpipe.display.live.stream import ScreenRow, TextStream
from ggpipe.display.live.terminal import Terminal
from ggpipe.stats.activity import taking_part
from ggpipe.stats.occupancy import Occupancy
from ggpipe.stats.records import RankStats, RequestStats

_FRAME_S = 0.1
_LOADING_SHOWN_AFTER_S = 0.3  # a load that is shorter is not shown
_PANEL_SHARE = 0.6  # the panel's largest share of the screen's height


class LiveDisplay:
    """What a terminal shows of a session: `loading`; for each request `request`, `prompt`, `text`..., `stop`.

    The numbers are read at each frame from `ranks` (the session's totals) and the request's stats, which
    others update; `clock` is the one that those were written by. While `is_loading()` the request waits for
    ranks that are loaded again, and their progress is shown below the text. All methods but `stop` return at once, and
    none raises because of what is drawn: when drawing fails, the text goes on without a panel.
    """

    def __init__(
        self,
        terminal: Terminal,
        ranks: Sequence[RankStats],
        is_loading: Callable[[], bool] = lambda: False,
        clock: Callable[[], float] = time.monotonic,
        stream: Callable[[], TextStream] = TextStream,
    ) -> None:
        """`stream`: makes what the text of a request is shown by."""
        self._terminal = terminal
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
        """Why drawing has stopped, if it has."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.stop()

    def loading(self) -> None:
        """Show the progress of the ranks' loading, until `request` or `stop`."""
        self._start()

    def request(self, stats: RequestStats) -> None:
        """Show a request from now on; `stats` is updated by others."""
        self._occupancy = Occupancy()
        self._request = stats
        self._start()

    def prompt(self, text: str) -> None:
        """Show the prompt, dim, in front of the answer."""
        self._any_text = True
        self._stream.feed(text, DIM)

    def text(self, piece: str, style: str | None = None) -> None:
        """Append to the answer. `style`: a Rich style for the origin of the piece, see `origin_style`."""
        self._any_text = True
        self._stream.feed(piece, _style(style))

    def aside(self, piece: str) -> None:
        """Append text that is no part of the answer: as it is, and dim."""
        self._any_text = True
        self._stream.feed(piece, DIM, plain=True)

    def stop(self) -> None:
        """End the live region. The prompt and the text stay on the screen, then a newline."""
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
        if self._thread is not None:
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
        """Run an action that draws; if one fails, now or before, only the text is written."""
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
        stray = self._terminal.own_stderr  # other output on stderr goes above the region
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
        with self._terminal.console as console:  # all of it in one write
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
        """Print complete lines above the region, if there are any, and draw the region."""
        assert self._live is not None
        if self._stream.complete:
            console.print(_Exactly(self._stream.complete), soft_wrap=True, end="")
            self._stream.complete = []
        else:
            self._live.refresh()

    def _close_up(self, console: Console) -> None:
        """After the terminal got narrower: erase rows that it wrapped, which take more rows than Rich erases."""
        if console.width >= self._region.width or not self._terminal.reflows:
            return
        cells = (Segment.get_line_length(row) for row in self._region.rows)
        added = sum((n - 1) // console.width for n in cells if n)
        console.control(Control(*[(ControlType.ERASE_IN_LINE, 2), (ControlType.CURSOR_UP, 1)] * added))


class _Exactly:
    """Segments as they are."""

    def __init__(self, segments: Iterable[Segment]) -> None:
        self._segments = segments

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield from self._segments


class _Region:
    """The rows that the live region shows now."""

    def __init__(self) -> None:
        self.rows: list[ScreenRow] = []
        self.width = 0
        """The screen's when they were drawn."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        for i, row in enumerate(self.rows):
            if i:
                yield Segment.line()
            yield from row


def _style(name: str | None) -> Style | None:
    try:
        return Style.parse(name) if name else None
    except StyleSyntaxError:
        return None
