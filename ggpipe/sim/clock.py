"""Virtual time: what is to happen, in order."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable


class Clock:
    """Seconds since the start. Things of the same time happen in the order in which they were planned."""

    def __init__(self) -> None:
        self.now = 0.0
        self._plans: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def at(self, time_s: float, action: Callable[[], None]) -> None:
        """Have this happen then; at once when the time has passed."""
        heapq.heappush(self._plans, (max(time_s, self.now), next(self._numbers), action))

    def after(self, delay_s: float, action: Callable[[], None]) -> None:
        """Have this happen so many seconds from now."""
        heapq.heappush(self._plans, (self.now + delay_s, next(self._numbers), action))

    def step(self) -> bool:
        """Let the next thing happen; False when there is none."""
        if not self._plans:
            return False
        self.now, _, action = heapq.heappop(self._plans)
        action()
        return True
