"""What rows of a run are worth, against what they cost. All times are in the unit of the pipeline's `RunCost`.

rule                what it decides
rounds              in how many runs the accepted tokens of all requests go round
draft_with_root     draft tokens that go in with accepted tokens while the pipeline has room for further runs

The length of a run of draft tokens is up to `run_cost.most_per_second`. An accepted token is worth 1. A draft token is
worth its probability: that of its whole path below the root. A row costs time in the slowest stage, which later runs
wait for, and time in all stages, by which the next correction is late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ggpipe.core.drafters.calibration import Calibration
from ggpipe.core.run_cost import RunCost, most_per_second

_CLEARLY_LESS = 0.98
"""Times the time of a round: so much must a further run save. Fewer runs are less work for the same speed, and measured
times are never quite equal."""
_FEWEST_JUDGED = 8
"""Draft tokens that show a drafter's agreement: it moves by 1/20 of the way with each, see `Calibration`."""


def usual_chain(calibration: Calibration, limit: int, n_roots: int = 1) -> list[float]:
    """Path probabilities of usual draft tokens in a chain after each of `n_roots` roots, the shallowest first. A chain
    is at most `limit` deep, and no deeper than `calibration.reach`."""
    depths = range(1, min(limit, calibration.reach) + 1)
    return [calibration.agreement**depth for depth in depths for _ in range(n_roots)]


@dataclass(frozen=True, slots=True)
class DraftWithRoot:
    """Draft tokens that are to go in with accepted tokens."""

    n: int = 0
    wait_s: float = 0.0
    """Until the last of them is expected to be there."""


def draft_with_root(
    ready: Sequence[float],
    most: int,
    cost: RunCost,
    n_roots: int,
    drafter: Calibration,
    first_s: float,
    next_s: float,
    n_again: int = 0,
    coming: Calibration | None = None,
) -> DraftWithRoot:
    """How many draft tokens, at most `most`, go into a run with `n_roots` accepted tokens while the pipeline has room.

    `ready`: the probabilities of those that are there. `first_s`, `next_s`: the usual time to a first further one and
    between later ones; infinite where none is to be waited for. `n_again`: tokens that are decoded again in this run.
    `drafter`: of all draft tokens; `coming`: of those to be waited for, if they are not all alike.

    A draft token that goes in with its root is verified with it, and not by a later run; that saves its path the
    time of a run in the slowest stage. Against that stands the row, in every stage and for each root, and the wait for
    draft tokens that are still to come. Where the target cannot roll back, a rejected one has the tokens before it in
    the run decoded again.
    """
    if not cost.is_known:
        return DraftWithRoot()
    most = min(most, max(drafter.reach, len(ready)))
    agreement = drafter.agreement
    n_usual = most_per_second(usual_chain(drafter, most), cost)
    slot_s = max(cost.time(n_usual), n_usual * next_s if math.isfinite(next_s) else 0.0)
    # A chain that is right with the chance r a token takes r / (1 - r^n) runs of n tokens to its first rejected one.
    each_s = slot_s * (1 - agreement) / (1 - agreement**n_usual) if agreement < 1 else slot_s / n_usual
    probability, gain_s, wait_s = 1.0, 0.0, 0.0
    best, best_s = DraftWithRoot(), 0.0
    n_rows = n_roots + n_again
    run_s = cost.time(n_rows)
    for n in range(1, most + 1):
        before = probability
        if n <= len(ready):
            probability = ready[n - 1]
        else:
            probability *= coming.agreement if coming is not None else agreement
            wait_s += first_s if n == 1 else next_s
        longer_s = cost.time(n_rows + n)
        gain_s += probability * each_s - n_roots * cost.length * (longer_s - run_s)
        gain_s -= cost.again_s(before - probability, n_rows + n - 1)
        run_s = longer_s
        if gain_s - wait_s > best_s:
            best, best_s = DraftWithRoot(n, wait_s), gain_s - wait_s
    return best


class Rounds:
    """In how many runs the accepted tokens of `n_tokens` requests go round, to bring most tokens a second."""

    def __init__(self, cost: RunCost, n_tokens: int) -> None:
        """`n_tokens`: at least 1."""
        self._n_tokens = n_tokens
        self._times = _round_times(cost, n_tokens)
        self.best, self.round_s = 1, math.inf
        """The number of runs, and the time of the slowest stage in which all tokens go round."""
        for n, round_s in self._times.items():
            if round_s < self.round_s * _CLEARLY_LESS:
                self.best, self.round_s = n, round_s

    @property
    def size(self) -> int:
        """Accepted tokens in a run, at most."""
        return math.ceil(self._n_tokens / self.best)

    def loss(self, size: int) -> float:
        """The share of time that runs of `size` accepted tokens seem to cost beyond the best ones."""
        return self._times[math.ceil(self._n_tokens / size)] / self.round_s - 1


def _round_times(cost: RunCost, n_tokens: int) -> dict[int, float]:
    """The time of the slowest stage in which this many accepted tokens go round, by the number of their runs."""
    times: dict[int, float] = {}
    for n in sorted({math.ceil(n_tokens / size) for size in range(1, n_tokens + 1)}):
        size = math.ceil(n_tokens / n)
        n_shorter = n * size - n_tokens
        all_s = (n - n_shorter) * cost.time(size) + n_shorter * cost.time(max(size - 1, 1))
        times[n] = max(all_s, cost.length * cost.time(size))
    return times


def pays_beside_root(most: int, cost: RunCost, calibration: Calibration) -> bool:
    """A root with a chain of usual draft tokens, at most `most`, brings more accepted tokens a second than alone. So it
    does, too, until enough of them were judged."""
    if calibration.n_judged < _FEWEST_JUDGED or not cost.is_known:
        return True
    gain, rate = 1.0, 1 / cost.time(1)
    for n, probability in enumerate(usual_chain(calibration, most), 1):
        gain += probability
        if gain / cost.time(1 + n) > rate:
            return True
    return False
