"""How long a stage takes for a run: from its node's speed, or from measurements on the node."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from ggpipe.cluster.model_shape import ATTENTION_SPEED
from ggpipe.cluster.profile import Point
from ggpipe.core.row_work import Attention


class Cost(Protocol):
    """Decode time of a run whose cores do no other work."""

    def seconds(self, n_rows: int, n_past: float, n_others: float = 0) -> float:
        """Seconds for `n_rows` tokens after `n_past` tokens. In a run of several requests, `n_past` is their average,
        and `n_others` counts the other KV cells that the run reads."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Roofline:
    """Memory or arithmetic, whichever takes longer (Williams et al., 2009), for weights and for attention; and the time
    of an empty run."""

    weight_bytes: float
    """Bytes of weights, read once in a run."""
    cell_bytes: float
    """Bytes of KV cache for each token of the context, read once in a run."""
    state_bytes: float = 0.0
    """Bytes of a sequence's recurrent states, read and written in a run."""
    attention: tuple[Attention, ...] = ()
    """Operations of attention."""
    token_flop: float
    """Operations for each token of the run."""
    bytes_per_s: float
    flop_per_s: float
    fixed_s: float = 0.0
    expert_bytes: float = 0.0
    """Bytes of weights that are experts'."""
    untouched: float = 0.0
    """Share of the experts that a token does not use."""

    def seconds(self, n_rows: int, n_past: float, n_others: float = 0) -> float:
        """See Cost."""
        weights_s = (self.weight_bytes - self.expert_bytes * self.untouched**n_rows) / self.bytes_per_s
        cells_s = (self.state_bytes + self.cell_bytes * (n_past + n_others + n_rows)) / self.bytes_per_s
        attention_flop = sum(attention.of_run(n_rows, n_past) for attention in self.attention)
        return (
            self.fixed_s
            + max(weights_s, n_rows * self.token_flop / self.flop_per_s)
            + max(cells_s, attention_flop / (ATTENTION_SPEED * self.flop_per_s))
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamedCost:
    """A stage that has no memory for some of its weights. It reads those that each run uses while it computes, and
    experts once it knows which ones it needs."""

    in_memory: Cost
    run_bytes: float
    """Bytes of weights that each run reads."""
    expert_bytes: float
    """Bytes of experts that are not in memory."""
    untouched: float
    """Share of the experts that a token does not use."""
    bytes_per_s: float

    def seconds(self, n_rows: int, n_past: float, n_others: float = 0) -> float:
        """See Cost."""
        computing_s = self.in_memory.seconds(n_rows, n_past, n_others)
        experts_s = self.expert_bytes * (1 - self.untouched**n_rows) / self.bytes_per_s
        return max(computing_s, self.run_bytes / self.bytes_per_s) + experts_s


class MeasuredCost:
    """Linear between measured points, and beyond them."""

    def __init__(self, points: Sequence[Point], scale: float = 1.0, fixed_s: float = 0.0, cell_s: float = 0.0) -> None:
        """`scale`: the stage's time relative to the measured one's, without `fixed_s`. `cell_s`: what each further KV
        cell takes where all points are of one context."""
        self._cell_s = cell_s
        by_past: dict[int, dict[int, float]] = {}
        for point in points:
            seconds = fixed_s + (point.seconds - fixed_s) * scale
            by_past.setdefault(point.n_past, {})[point.rows] = seconds
        if not by_past:
            raise ValueError("a cost needs at least one point")
        self._lines = [(past, _Line(sorted(by_past[past].items()))) for past in sorted(by_past)]

    def seconds(self, n_rows: int, n_past: float, n_others: float = 0) -> float:
        """See Cost."""
        lines = self._lines
        if len(lines) == 1:
            past, line = lines[0]
            return line.at(n_rows) + max(n_past + n_others - past, 0) * self._cell_s
        i = min(max(bisect.bisect_left(lines, n_past, key=lambda line: line[0]), 1), len(lines) - 1)
        (a, low), (b, high) = lines[i - 1 : i + 1]
        rows = min(n_rows, low.last, high.last)
        rise = max(high.at(rows) - low.at(rows), 0.0) / (b - a) * n_rows / rows
        return max(low.at(n_rows) + rise * (n_past - a), low.at(n_rows) / 2)


class _Line:
    """Linear from point to point; beyond a single point proportional to it."""

    def __init__(self, points: Sequence[tuple[int, float]]) -> None:
        self._x = [x for x, _ in points]
        self._y = [y for _, y in points]
        self.last = self._x[-1]
        self._known: dict[int, float] = {}

    def at(self, x: int) -> float:
        """The value at x; at least half of the first point's."""
        if x not in self._known:
            self._known[x] = self._work_out(x)
        return self._known[x]

    def _work_out(self, x: int) -> float:
        if len(self._x) == 1:
            return self._y[0] * max(x / self._x[0], 1.0)
        i = min(max(bisect.bisect_left(self._x, x), 1), len(self._x) - 1)
        (x0, x1), (y0, y1) = self._x[i - 1 : i + 1], self._y[i - 1 : i + 1]
        return max(y0 + (y1 - y0) * (x - x0) / (x1 - x0), self._y[0] / 2)
