"""What rows of a run are worth, against what they cost. All times are in the unit of the pipeline's `RunCost`.

rule                what it decides
rounds              in how many runs the accepted tokens of all requests go round
steady_runs         how long runs are in which several requests draft ahead
draft_with_root     draft tokens that go in with accepted tokens while the pipeline has room for further runs

The length of a run of draft tokens is up to `run_cost.most_per_second`. An accepted token is worth 1. A draft token is
worth its probability: that of its whole path below the root. A row costs time in the slowest stage, which later runs
wait for, and time in all stages, by which the next correction is late.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ggpipe.core.drafters.calibration import Calibration
from ggpipe.core.run_cost import RunCost, most_per_second

_CLEARLY_LESS = 0.98
"""Times the time of a round: so much must a further run save. Fewer runs are less work for the same speed, and measured
times are never quite equal."""
_NEARLY = 0.99
"""Times the highest speed: the shortest runs that are as fast as that are taken."""
_HOPELESS = 0.5
"""Times the speed of runs of one row: where longer ones are that slow, still longer ones are not considered."""
_FEWEST_JUDGED = 8
"""Draft tokens that show a drafter's agreement: as many as what is assumed before counts for, see `Calibration`."""


def usual_chain(calibration: Calibration, limit: int, n_roots: int = 1) -> list[float]:
    """Path probabilities of usual draft tokens in a chain after each of `n_roots` roots, the shallowest first. A chain
    is at most `limit` deep, and no deeper than `calibration.reach`."""
    depths = range(1, min(limit, calibration.reach) + 1)
    return [calibration.agreement**depth for depth in depths for _ in range(n_roots)]


@dataclass(frozen=True, slots=True)
class Coming:
    """Draft tokens of a chain that are still to come."""

    after: float = 1.0
    """The path probability of the token that they follow."""
    agreement: float = 0.0
    """How probable each of them is after the one before it."""
    first_s: float = math.inf
    """The usual time to the first one."""
    next_s: float = math.inf
    """The usual time between later ones."""


_NONE_COMING = Coming()


@dataclass(frozen=True, slots=True)
class DraftWithRoot:
    """Draft tokens that are to go in with accepted tokens."""

    n: int = 0
    wait_s: float = 0.0
    """Until the last of them is expected to be there; 0 when all of them are."""
    saved_s: float = field(default=0.0, compare=False)
    """The time that they save, the wait taken off."""


def draft_with_root(
    ready: Sequence[float],
    most: int,
    cost: RunCost,
    n_roots: int,
    drafter: Calibration,
    coming: Coming = _NONE_COMING,
    n_again: int = 0,
    token_s: float | None = None,
) -> DraftWithRoot:
    """How many draft tokens, at most `most`, go into a run with `n_roots` accepted tokens while the pipeline has room.

    `ready`: the probabilities of those that are there, the best first; those that are to come go in as well, or take
    the places of less probable ones. `drafter`: of all draft tokens. `n_again`: tokens that are decoded again in this
    run. `token_s`: what a token takes where no later run verifies draft tokens.

    A draft token that goes in with its root is verified with it, and not by a later run; that saves its path the
    time of a run in the slowest stage. Against that stands the row, in every stage and for each root, and the wait for
    draft tokens that are still to come. Where the target cannot roll back, a rejected one has the tokens before it in
    the run decoded again.
    """
    if not cost.is_known:
        return DraftWithRoot()
    most = min(most, max(drafter.reach, len(ready)))
    each_s = _in_later_runs(drafter, most, cost, coming.next_s) if token_s is None else token_s
    n_rows = n_roots + n_again

    def gain_s(n: int, before: float, probability: float) -> float:
        """Time that the `n`-th draft token saves; `before`: the probability of the one before it."""
        row_s = cost.time(n_rows + n) - cost.time(n_rows + n - 1)
        return probability * each_s - n_roots * cost.length * row_s - cost.again_s(before - probability, n_rows + n - 1)

    saved_s, before = 0.0, 1.0
    best = DraftWithRoot()
    for n, probability in enumerate(ready[:most], 1):
        saved_s += gain_s(n, before, probability)
        before = probability
        if saved_s > best.saved_s:
            best = DraftWithRoot(n, saved_s=saved_s)
    if coming.next_s == math.inf:
        return best
    n_ready, saved_s = best.n, best.saved_s
    before = probability = coming.after
    wait_s, next_s = 0.0, coming.first_s
    for n_coming in range(1, most + 1):
        probability *= coming.agreement
        wait_s += next_s
        next_s = coming.next_s
        is_full = n_ready + n_coming > most
        more_s = -math.inf if is_full else gain_s(n_ready + n_coming, before, probability)
        if n_ready and (instead_s := (probability - ready[n_ready - 1]) * each_s) > more_s:
            n_ready, more_s = n_ready - 1, instead_s
        elif is_full:
            break
        before, saved_s = probability, saved_s + more_s
        if saved_s - wait_s > best.saved_s:
            best = DraftWithRoot(n_ready + n_coming, wait_s, saved_s - wait_s)
        if probability * each_s < next_s:
            break
    return best


def _in_later_runs(drafter: Calibration, most: int, cost: RunCost, next_s: float) -> float:
    """The slowest stage's time for each token of a chain that later runs verify."""
    agreement = drafter.agreement
    n_usual = most_per_second(usual_chain(drafter, most), cost)
    slot_s = max(cost.time(n_usual), n_usual * next_s if math.isfinite(next_s) else 0.0)
    # A chain that is right with the chance r a token takes r / (1 - r^n) runs of n tokens to its first rejected one.
    return slot_s * (1 - agreement) / (1 - agreement**n_usual) if agreement < 1 else slot_s / n_usual


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


@dataclass(frozen=True, slots=True)
class SteadyRuns:
    """Runs of equal length, one right after another, with accepted and draft tokens of several requests."""

    n_rows: int
    """Rows of each run."""
    n_each: float
    """Rows of each request that are in flight: if it is one or less, accepted tokens only."""
    speed: float
    """Accepted tokens of all requests, in the unit of time."""

    def n_drafted(self, probabilities: Sequence[float], cost: RunCost, n_roots: int) -> int:
        """How many draft tokens go in with `n_roots` accepted ones: those that fill the run, as far as each brings as
        much for its row's time as runs do on average. `probabilities`: in the order in which they are taken."""
        n_most = max(self.n_rows - n_roots, 0)
        for n, probability in enumerate(probabilities[:n_most]):
            if n_roots + n and probability < self.speed * (cost.time(n_roots + n + 1) - cost.time(n_roots + n)):
                return n
        return min(n_most, len(probabilities))


def steady_runs(cost: RunCost, n_requests: int, agreement: float) -> SteadyRuns:
    """The steady runs that bring most accepted tokens a second. `agreement`: how often draft tokens are right, on
    average over all these requests.

    A request has k rows in flight, a chain that is spread evenly over the time T that a run takes in all stages. A
    draft token is right with the chance a. Of 1 / (1 - a) accepted tokens in a row, the last one corrects a draft token
    and comes T after its predecessor, and the others come T / k after theirs: k / (a + k (1 - a)) tokens in the time T.
    """
    speeds: list[float] = []
    for n_rows in range(1, cost.most_rows + 1):
        n_each = n_rows * cost.length / n_requests
        tokens = n_each / (agreement + n_each * (1 - agreement)) if n_each > 1 else n_each
        speeds.append(n_requests * tokens / (cost.length * cost.time(n_rows)))
        if speeds[-1] < _HOPELESS * speeds[0]:
            break
    fastest = max(speeds)
    n_rows = next(n for n, speed in enumerate(speeds, 1) if speed >= _NEARLY * fastest)
    return SteadyRuns(n_rows, n_rows * cost.length / n_requests, fastest)


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
