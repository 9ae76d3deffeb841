"""What the head learns of a drafter: its agreement with the target, against its own probabilities, and its pace."""

from __future__ import annotations

import math
from bisect import bisect_right

_JUDGE = 0.05  # weight of the latest draft token
_PACE = 0.2  # weight of the latest time
_USUAL = round(1 / _PACE)
_FORGET = 0.98  # factor by which an expected wait shrinks when a root does not wait
_ONCE, _LEAST_AGREEMENT = 1 / 500, 0.01
_TIMED = 4  # draft tokens below a fresh root that show the drafter's pace; later ones may wait for the head
_BORDERS = (0.1, 0.25, 0.5, 0.75, 0.9, 0.97, 0.99)  # of the bins: a drafter's probabilities, about evenly in log-odds
_BIN_KEEPS = 1 - 1 / 64  # weight of a bin's earlier draft tokens when one more is judged
_PRIOR = 8.0  # draft tokens: as much count the drafter's mean in a bin, and the means that are assumed at first


class _Bin:
    """Draft tokens to which a drafter gave similar probabilities; later ones count more."""

    __slots__ = ("named", "right")

    def __init__(self) -> None:
        self.right = 0.0
        """How many were right."""
        self.named = 0.0
        """How many the drafter's probabilities said."""

    def judged(self, prob: float, right: bool) -> None:
        self.right = self.right * _BIN_KEEPS + right
        self.named = self.named * _BIN_KEEPS + prob


class Calibration:
    """Running means for one drafter and one request: overall, and by the probabilities that the drafter gives."""

    def __init__(self) -> None:
        self.agreement = 0.7
        """Share of positions at which the drafter's best token was the target's."""
        self.n_judged = 0
        """Positions that it was learned from."""
        self._named = 0.7
        """Mean probability that the drafter gave them."""
        self._overall = 1.0
        """What the drafter's probabilities are to be multiplied by, as far as the two means say."""
        self._bins = tuple(_Bin() for _ in range(len(_BORDERS) + 1))

    def judged(self, prob: float, right: bool, is_best: bool = True) -> None:
        """A token that the drafter gave `prob` was the target's token, or another one was. `is_best`: the drafter named
        no more probable one at this position."""
        if is_best:
            self.n_judged += 1
            weight = max(_JUDGE, 1 / (self.n_judged + _PRIOR))
            self.agreement += weight * (right - self.agreement)
            self._named += weight * (prob - self._named)
            self._overall = self.agreement / self._named if self._named > 0 else 1.0
        self._bins[bisect_right(_BORDERS, prob)].judged(prob, right)

    def probability(self, prob: float) -> float:
        """How probable it is that a draft token is right to which the drafter gives `prob`.

        A bin whose draft tokens were right half as often as the drafter said halves its probabilities. A bin that has
        seen few of them does as the drafter's means over all of them say. A probability rises no higher than that
        many of them can show (Jeffreys' prior).
        """
        if prob <= 0:
            return 0.0
        bin_, prior = self._bins[bisect_right(_BORDERS, prob)], _PRIOR * prob
        right, named = bin_.right, bin_.named
        calibrated = prob * (right + prior * self._overall) / (named + prior)
        if calibrated <= prob:
            return calibrated
        shown = 1 - 0.5 / ((named if named > right else right) + 1)
        return calibrated if calibrated <= shown else max(prob, shown)

    @property
    def reach(self) -> int:
        """Depth to which a chain of usual draft tokens is worth having: deeper ones are right once in 500 times, so
        that their runs only take energy, and cores from others."""
        agreement = min(max(self.agreement, _LEAST_AGREEMENT), 1 - _LEAST_AGREEMENT)
        return max(math.ceil(math.log(_ONCE) / math.log(agreement)), 2)


class Pace:
    """How long a drafter takes to send draft tokens below a root that it had not drafted.

    Ahead of the target, it shares a machine with runs; in turn with it, it has the machine for itself. So each way has
    a pace of its own (see `batching/turns.py`).
    """

    def __init__(self) -> None:
        self.first_s: float | None = None
        """From sending it the root to its first draft token."""
        self.next_s: float | None = None
        """From each draft token to the next."""
        self._since: float | None = None
        """When the root was sent, or the latest draft tokens below it came; None: not measured now."""
        self._n_below = 0
        self._other: Pace | None = None
        self._n_first = self._n_next = _USUAL
        """Times that were noted since the way was changed to one that was not known; only the latest of many count."""

    @property
    def of_other_way(self) -> Pace:
        """The pace of the way that is not in use; as long as it is not known, that of the other."""
        return self._other or self

    @property
    def usual(self) -> tuple[float, float]:
        """`first_s` and `next_s`: 0 before it drafted, and equal before it drafted two in a row."""
        first_s = self.first_s or 0.0
        return first_s, first_s if self.next_s is None else self.next_s

    def change_way(self) -> None:
        """From now on, it drafts the other way."""
        before = Pace()
        before.first_s, before.next_s = self.first_s, self.next_s
        if self._other is None:
            self._n_first = self._n_next = 0
        else:
            self.first_s, self.next_s = self._other.first_s, self._other.next_s
        self._other, self._since = before, None

    def recall(self, earlier: Pace) -> None:
        """Until more is known, take the pace that it had for an earlier request, in both ways."""
        if self.next_s is None:
            self.first_s, self.next_s = earlier.first_s, earlier.next_s
            if earlier._other is not None:
                self._other = Pace()
                self._other.first_s, self._other.next_s = earlier._other.first_s, earlier._other.next_s

    def root_sent(self, fresh: bool, now: float) -> None:
        """The drafter is sent a new root; `fresh`: it had not drafted it."""
        self._since, self._n_below = (now if fresh else None), 0

    def root_submitted(self, now: float) -> None:
        """The root goes in, where target and drafter take turns: from now on, the root's run delays draft tokens.

        So these do not count. If the root waited for the next one in vain, that is thought to take twice as long as the
        root waited. If it did not wait, the usual time shrinks a little, so that some root waits again and shows it.
        """
        if self._since is None:
            return
        is_first, waited_s = self._n_below == 0, now - self._since
        usual_s = self.usual[0 if is_first else 1]
        self._since = None
        if waited_s >= usual_s:
            if waited_s > 0:
                self.noted(is_first, 2 * waited_s)
        elif is_first:
            self.first_s = usual_s * _FORGET
        elif self.next_s is not None:
            self.next_s = usual_s * _FORGET

    def came(self, n: int, now: float, at_once: bool = False) -> None:
        """Draft tokens below the newest root came, `n` levels of its tree in one message. `at_once`: they were drafted
        together, so the first one takes all the time."""
        if not n or self._since is None:
            return
        if at_once:
            if not self._n_below:
                self.noted(True, now - self._since)
                self.noted(False, 0.0)
            self._n_below, self._since = n, None
            return
        self.noted(self._n_below == 0, (now - self._since) / n)
        self._n_below += n
        self._since = now if self._n_below < _TIMED else None

    def noted(self, first: bool, seconds: float) -> None:
        """Note the time to the first draft token, or from one draft token to the next."""
        known, n = (self.first_s, self._n_first) if first else (self.next_s, self._n_next)
        known = seconds if known is None else known + max(_PACE, 1 / (n + 1)) * (seconds - known)
        if first:
            self.first_s, self._n_first = known, n + 1
        else:
            self.next_s, self._n_next = known, n + 1
