"""How far the draft guesses, how many guesses go into a run, and how many a fresh root waits for."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from ggpipe.config import SpeculationConfig


class PipeInferPolicy:
    """PipeInfer's thresholds (Butler et al., SC'24): both move with what happened since the last accepted token."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self.n_batches = 0
        """Micro-batches drafted since then."""
        self.n_rejected = 0
        """Attempts since then whose best candidate was not probable enough."""

    def accepted(self) -> None:
        """A token was accepted."""
        self.n_batches = self.n_rejected = 0

    @property
    def cutoff(self) -> float:
        """A branch goes on with its best candidate if that is at least this probable."""
        return self._config.p_accept + self._shift

    @property
    def split(self) -> float:
        """A branch splits for a further candidate that is at least this probable."""
        return self._config.p_split + self._shift

    @property
    def relents(self) -> bool:
        """A further attempt may succeed where this one did not."""
        return self._config.p_decay > 0

    @property
    def _shift(self) -> float:
        return self.n_batches * self._config.p_recovery - self.n_rejected * self._config.p_decay


_LEARN = 0.2  # weight of the latest run's time
_JUDGE = 0.05  # weight of the latest guess
_FORGET = 0.01  # of a run length's time, with each run of another length
_ONCE, _LEAST_RIGHT = 1 / 500, 0.01
_HOPE = 0.25  # a row more is thought to take this share of the first one's time, or less, until it is tried


class RunWidth:
    """How many guesses go into a run: as many as bring the most accepted tokens for the slowest stage's time.

    Rows are cheap where memory is the limit, and cost as much as runs of their own where arithmetic is: so the times of
    runs are learned. What is not tried yet is thought to be cheap, so it is tried. The draft's probabilities are scaled
    by how often it was right of late.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Time of a run by its rows."""
        self._right = self._named = 0.7
        """Running means: of guesses beside the target's token that were right, of what the draft gave them."""
        self._length = 1.0
        """A run's time in all stages, as a multiple of that in its slowest."""
        self._first_s: float | None = None
        self._next_s: float | None = None
        """From a fresh root to the draft's first guess below it, and from each guess to the next."""

    def ended(self, n_rows: int, seconds: float, all_s: float = 0.0) -> None:
        """A run came back; `seconds`: in its slowest stage, `all_s`: in all stages."""
        self._length += _LEARN * (max(all_s / seconds, 1.0) - self._length)
        for n in self._seconds:
            self._seconds[n] += _FORGET * (self._hoped(n) - self._seconds[n])
        known = self._seconds.get(n_rows, seconds)
        self._seconds[n_rows] = known + _LEARN * (seconds - known)

    def guessed(self, first: bool, seconds: float) -> None:
        """A guess came so long after a fresh root (`first`), or after the guess before it."""
        known = self._first_s if first else self._next_s
        known = seconds if known is None else known + _LEARN * (seconds - known)
        if first:
            self._first_s = known
        else:
            self._next_s = known

    def judged(self, prob: float, right: bool) -> None:
        """A guess that the draft gave `prob` turned out right or wrong."""
        self._right += _JUDGE * (right - self._right)
        self._named += _JUDGE * (prob - self._named)

    def chance(self, prob: float) -> float:
        """How probable a guess is that the draft gives `prob`."""
        return min(prob * self._right / self._named, 1.0) if self._named > 0 else self._right

    def best(self, chances: Iterable[float]) -> int:
        """How many of these to take. `chances`: of each whole path, in the order in which they would be taken.

        Each row also makes the run arrive later, by its time in all stages; that counts when the run holds the first
        mistake, which ends its path.
        """
        gain, best, most = 0.0, 1, 0.0
        for n, chance in enumerate(chances, 1):
            gain += chance
            later_s = self._length * max(self._time(n) - self._time(1), 0.0)
            worth = gain / (self._time(n) + (1 - chance) * later_s)
            if worth > most:
                best, most = n, worth
        return best

    def usual(self, limit: int) -> int:
        """As `best`, for a chain of usual guesses, at most `limit`."""
        return self.best(self._right**i for i in range(1, limit + 1))

    def riders(self, ready: Sequence[float], most: int) -> tuple[int, float]:
        """How many guesses, of at most `most`, are to ride in a fresh root's run, and the seconds to wait for them.

        `ready`: the chances of those that are there, each of its whole path. A guess that rides along is answered with
        the root, and not by a run behind it; that saves its path the time of a run in the slowest stage. Against that
        stands the row, in every stage, and the wait for guesses that are still to come, since nothing else is in the
        pipeline.
        """
        if not self._seconds or self._next_s is None or self._first_s is None:
            return 0, 0.0
        n_usual = self.usual(most)
        slot_s = max(self._time(n_usual), n_usual * self._next_s)
        # A chain that is right with the chance r a guess takes r / (1 - r^n) runs of n guesses to its first mistake.
        each_s = slot_s * (1 - self._right) / (1 - self._right**n_usual) if self._right < 1 else slot_s / n_usual
        chance, gain_s, wait_s = 1.0, 0.0, 0.0
        best, best_gain_s, best_wait_s = 0, 0.0, 0.0
        for n in range(1, most + 1):
            chance = ready[n - 1] if n <= len(ready) else chance * self._right
            if n > len(ready):
                wait_s += self._first_s if n == 1 else self._next_s
            row_s = self._length * (self._time(n + 1) - self._time(n))
            gain_s += chance * each_s - row_s
            if gain_s - wait_s > best_gain_s:
                best, best_gain_s, best_wait_s = n, gain_s - wait_s, wait_s
        return best, best_wait_s

    @property
    def reach(self) -> int:
        """How deep a chain of usual guesses is worth having: further ones are right once in so many times that their
        runs only take energy, and cores from others."""
        right = min(max(self._right, _LEAST_RIGHT), 1 - _LEAST_RIGHT)
        return max(math.ceil(math.log(_ONCE) / math.log(right)), 2)

    def seconds(self, n: int) -> float:
        """Time of a run of `n` rows in its slowest stage; 0 before the first run."""
        return self._time(n) if self._seconds else 0.0

    def _time(self, n: int) -> float:
        return self._seconds[n] if n in self._seconds else self._hoped(n)

    def _hoped(self, n: int) -> float:
        """What is known of the next shorter runs, and for each row more what it takes up to the next longer ones, or
        what theirs took, but never much."""
        one = self._seconds.get(1, 1.0)
        m = max((m for m in self._seconds if m < n), default=1)
        known = self._seconds.get(m, one)
        longer = min((k for k in self._seconds if k > n), default=0)
        more = _HOPE
        if longer:
            more = (self._seconds[longer] / one - known / one) / (longer - m)
        elif m > 1:
            more = (known / one - 1) / (m - 1)
        more = min(max(more, 0.0), _HOPE)
        return known + more * one * (n - m)
