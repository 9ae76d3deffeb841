"""Splits of a model's layers over a sequence of places that are worth a simulation.

A split has two times: that of all stages together, which a single run takes, and that of its slowest stage, which is
the interval between the results of a full pipeline. Between the two extremes, all layers on the fastest places and
equally slow stages, this finds the splits that no other beats in both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Times = NDArray[np.float64]
"""[a, b]: seconds that a place takes for layers [a, b); infinite where a >= b, or where the layers do not fit."""

_ALIKE = 1e-3
_BOUNDS = (1.0, 1.03, 1.08, 1.15, 1.3, 1.6, 2.0, 3.0, math.inf)


def good_splits(places: Sequence[Times], may_skip: Sequence[bool]) -> list[tuple[int, ...]]:
    """The splits that are worth a simulation, as the number of layers at each place; empty if the layers do not fit.

    `may_skip`: whether each place may get no layers. The first split has the fastest slowest stage, the last one the
    shortest time of all stages together.
    """
    least = _least_bound(places, may_skip)
    if math.isinf(least):
        return []
    found = [shortest(places, may_skip, least * factor * (1 + 1e-9)) for factor in _BOUNDS]
    found.append(shortest(places, may_skip, math.inf, 1e-9))
    return list(dict.fromkeys(split for split in found if split is not None))


def shortest(
    places: Sequence[Times], may_skip: Sequence[bool], bound_s: float, alike: float = _ALIKE
) -> tuple[int, ...] | None:
    """The split with the shortest time of all stages together, among those whose stages each take at most `bound_s`;
    None if there is none. Among splits whose times differ by less than the share `alike`, it is the most even one.
    """
    n_layer = len(places[0]) - 1
    best = np.full(n_layer + 1, np.inf)
    best[0] = 0.0
    taken: list[NDArray[np.int64]] = []
    finite = [times[np.isfinite(times)] for times in places]
    scale_s = min(bound_s, max((float(some.max()) for some in finite if some.size), default=1.0))
    for times, skip in zip(places, may_skip, strict=True):
        allowed = np.where(times <= bound_s, times, np.inf)
        sums = best[:, None] + allowed + alike * allowed**2 / scale_s
        starts, ends = sums.argmin(0), sums.min(0)
        if skip:
            kept = best <= ends
            starts, ends = np.where(kept, np.arange(n_layer + 1), starts), np.where(kept, best, ends)
        taken.append(starts)
        best = ends
    if math.isinf(best[-1]):
        return None
    counts, end = [], n_layer
    for starts in reversed(taken):
        counts.append(end - int(starts[end]))
        end = int(starts[end])
    return tuple(reversed(counts))


def _least_bound(places: Sequence[Times], may_skip: Sequence[bool]) -> float:
    """The least time that a split's slowest stage can take."""
    best = np.full(len(places[0]), np.inf)
    best[0] = 0.0
    for times, skip in zip(places, may_skip, strict=True):
        ends = np.maximum(best[:, None], times).min(0)
        best = np.minimum(best, ends) if skip else ends
    return float(best[-1])
