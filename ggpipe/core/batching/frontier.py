"""Which draft tokens go into a run: as many of the most probable ones as bring the most accepted tokens for its time.

Times come from the pipeline's `RunCost`, probabilities from the drafters' `Calibration`. See `Scheduler` for when runs
go in.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ggpipe.core.drafters.calibration import Calibration, Pace
from ggpipe.core.run_cost import RunCost

_CLEARLY_MORE = 1.2  # times the accepted tokens a second: below, what is lost to runs of unequal length takes it up
_FEWEST_JUDGED = 8  # draft tokens that show a drafter's agreement


def best_rows(chances: Iterable[float], cost: RunCost) -> int:
    """How many draft tokens to take, at least 1. `chances`: of each whole path, in the order in which they are taken.

    Each row also makes the run arrive later, by its time in all stages; that counts when the run holds the first
    rejected token, which ends its path.
    """
    gain, best, most = 0.0, 1, 0.0
    one_s = cost.time(1)
    for n, chance in enumerate(chances, 1):
        gain += chance
        run_s = cost.time(n)
        later_s = cost.length * max(run_s - one_s, 0.0)
        worth = gain / (run_s + (1 - chance) * later_s)
        if worth > most:
            best, most = n, worth
    return best


def usual_rows(limit: int, cost: RunCost, calibration: Calibration) -> int:
    """As `best_rows`, for a chain of usual draft tokens, at most `limit` and at most the calibration's reach."""
    agreement = calibration.agreement
    return best_rows((agreement**i for i in range(1, min(limit, calibration.reach) + 1)), cost)


def rows_beside_roots(n_roots: int, chances: Iterable[float], cost: RunCost) -> int:
    """How many draft tokens go into a run with `n_roots` accepted tokens of several requests, while others wait for the
    pipeline: as many as bring more accepted tokens a second. `chances`: of each whole path, in the order in which they
    are taken."""
    if not cost.is_known:
        return 0
    gain, best = float(n_roots), 0
    most = _CLEARLY_MORE * gain / cost.time(n_roots)
    for n, chance in enumerate(chances, 1):
        gain += chance
        rate = gain / cost.time(n_roots + n)
        if rate > most:
            best, most = n, rate
    return best


def rows_beside_early_roots(n_roots: int, chances: Iterable[float], cost: RunCost) -> int:
    """As `rows_beside_roots`, while the pipeline has room: then draft tokens could go into a run behind the roots' as
    well. What they gain here is the time of a run in the slowest stage; the roots arrive later, by the row's time in
    all stages."""
    if not cost.is_known:
        return 0
    worth, most, best = 0.0, 0.0, 0
    for n, chance in enumerate(chances, 1):
        more_s = cost.time(n_roots + n) - cost.time(n_roots + n - 1)
        worth += chance * cost.time(1) - n_roots * cost.length * more_s
        if worth > most:
            best, most = n, worth
    return best


def usual_rows_beside_roots(n_roots: int, limit: int, cost: RunCost, calibration: Calibration) -> int:
    """As `rows_beside_roots`, for chains of usual draft tokens behind each root, at most `limit` long."""
    agreement, depths = calibration.agreement, min(limit, calibration.reach)
    chances = [agreement**depth for depth in range(1, depths + 1) for _ in range(n_roots)]
    return rows_beside_roots(n_roots, chances, cost)


def pays_beside_root(most: int, cost: RunCost, calibration: Calibration) -> bool:
    """A root with a chain of usual draft tokens, at most `most`, brings more accepted tokens a second than alone. So it
    does, too, until enough of them were judged."""
    if calibration.n_judged < _FEWEST_JUDGED:
        return True
    gain, rate = 1.0, 1 / cost.time(1)
    for n in range(1, min(most, calibration.reach) + 1):
        gain += calibration.agreement**n
        if gain / cost.time(1 + n) > rate:
            return True
    return False


def rows_beside_root(
    ready: Sequence[float], most: int, cost: RunCost, calibration: Calibration, pace: Pace
) -> tuple[int, float]:
    """How many draft tokens, at most `most`, are to go into a fresh root's run, and the seconds to wait for them.

    `ready`: the chances of those that are there, each of its whole path. A draft token in the root's run is answered
    with the root, and not by a run behind it; that saves its path the time of a run in the slowest stage. Against that
    stands the row, in every stage, and the wait for draft tokens that are still to come, since nothing else is in the
    pipeline.
    """
    if not cost.is_known or pace.next_s is None or pace.first_s is None:
        return 0, 0.0
    most = min(most, max(calibration.reach, len(ready)))
    n_usual = usual_rows(most, cost, calibration)
    slot_s = max(cost.time(n_usual), n_usual * pace.next_s)
    # A chain that is right with the chance r a token takes r / (1 - r^n) runs of n tokens to its first rejected one.
    agreement = calibration.agreement
    each_s = slot_s * (1 - agreement) / (1 - agreement**n_usual) if agreement < 1 else slot_s / n_usual
    chance, gain_s, wait_s = 1.0, 0.0, 0.0
    best, best_gain_s, best_wait_s = 0, 0.0, 0.0
    run_s = cost.time(1)
    for n in range(1, most + 1):
        chance = ready[n - 1] if n <= len(ready) else chance * agreement
        if n > len(ready):
            wait_s += pace.first_s if n == 1 else pace.next_s
        longer_s = cost.time(n + 1)
        gain_s += chance * each_s - cost.length * (longer_s - run_s)
        run_s = longer_s
        if gain_s - wait_s > best_gain_s:
            best, best_gain_s, best_wait_s = n, gain_s - wait_s, wait_s
    return best, best_wait_s
