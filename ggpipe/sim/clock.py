"""Virtual time: actions that are planned for a time, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class VirtualClock:
    """Seconds since the start. Actions of the same time run in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._plans: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Run an action at this time; next when the time has passed."""
        heapq.heappush(self._plans, (max(time_s, self.now), next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Run an action after this delay."""
        heapq.heappush(self._plans, (self.now + delay_s, next(self._numbers), action))

    def step(self) -> bool:
        """Run the next action; False when there is none."""
        if not self._plans:
            return False
        self.now, _, action = heapq.heappop(self._plans)
        action()
        return True
