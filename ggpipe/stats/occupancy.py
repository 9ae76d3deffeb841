"""The current occupancy of each rank, from successive samples of its totals."""

from __future__ import annotations

import collections
from collections.abc import Sequence

from ggpipe.stats.activity import RankWork, part
from ggpipe.stats.records import RankStats

_WINDOW_S = 1.0
_LONGEST_S = 8.0
_MIN_RUNS = 3


class Occupancy:
    """Busy share of each rank over a sliding window.

    Runs count when they end, so the window must contain several: it is one second long, or until three runs have ended,
    up to eight seconds.
    """

    def __init__(self) -> None:
        self._samples: dict[RankWork, collections.deque[tuple[float, float, int]]] = {}

    def sample(self, ranks: Sequence[RankStats], now: float) -> list[float]:
        """Add a sample of the totals at time `now` (seconds). Returns shares, 0 to 1, in the order of `ranks`."""
        return [self._sample(stats, now) for stats in ranks]

    def _sample(self, stats: RankStats, now: float) -> float:
        samples = self._samples.setdefault(part(stats), collections.deque())
        if samples and stats.busy_s < samples[-1][1]:  # a new request: totals begin at 0 again
            samples.clear()
        samples.append((now, stats.busy_s, stats.runs))
        while len(samples) > 2 and now - samples[1][0] >= _LONGEST_S:
            samples.popleft()
        start = samples[0]
        for sample in reversed(samples):
            if now - sample[0] >= _WINDOW_S and stats.runs - sample[2] >= _MIN_RUNS:
                start = sample
                break
        elapsed = now - start[0]
        return min(max((stats.busy_s - start[1]) / elapsed, 0.0), 1.0) if elapsed > 0 else 0.0
