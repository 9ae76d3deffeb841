"""The panel below the cells of a notebook: the progress of loading, then of requests."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Sequence

from ggpipe.api.feed import Feed
from ggpipe.display.live.notebook import SPACE, NotebookPanel
from ggpipe.display.live.panel import generating_panel, loading_panel
from ggpipe.stats.activity import taking_part
from ggpipe.stats.occupancy import Occupancy
from ggpipe.stats.records import RankStats

_FRAME_S = 0.2

GetRanks = Callable[[], Sequence[RankStats]]


class Panel:
    """Shows the oldest active request of an engine. The last state stays visible."""

    def __init__(self, ranks: GetRanks, make: Callable[[], NotebookPanel] = NotebookPanel) -> None:
        self._ranks = ranks
        self._make = make
        self._lock = threading.Lock()
        self._feeds: list[Feed] = []
        """Active requests, and the one that is shown; the oldest first."""

    def loading(self, loaded: Feed) -> None:
        """Show the progress of loading until this feed ends. Call it in the cell."""
        panel = self._make()

        def draw() -> None:
            while not loaded.wait_for_end(_FRAME_S):
                panel.show(loading_panel(self._ranks(), SPACE))
            panel.show([])

        _start(draw)

    def request(self, feed: Feed) -> None:
        """Show a request when those before it have ended. Call it in the cell."""
        with self._lock:
            self._feeds.append(feed)
            if len(self._feeds) > 1:
                return
        panel = self._make()

        def draw() -> None:
            shown: Feed | None = feed
            while shown is not None:
                try:
                    self._draw(panel, shown)
                except Exception:  # later requests get a new panel
                    with self._lock:
                        self._feeds.clear()
                    raise
                with self._lock:
                    self._feeds = [other for other in self._feeds if not other.has_ended]
                    shown = self._feeds[0] if self._feeds else None

        _start(draw)

    def _draw(self, panel: NotebookPanel, feed: Feed) -> None:
        """Draw a request until it ends."""
        stats, occupancy, has_ended = feed.stats, Occupancy(), False
        while not has_ended:
            has_ended, now = feed.wait_for_end(_FRAME_S), time.monotonic()
            ranks = taking_part(stats, self._ranks())
            panel.show(generating_panel(ranks, occupancy.sample(ranks, now), stats, now, SPACE))


def _start(draw: Callable[[], None]) -> None:
    def run() -> None:
        with contextlib.suppress(Exception):  # the request continues without a panel
            draw()

    threading.Thread(target=run, name="ggpipe panel", daemon=True).start()
