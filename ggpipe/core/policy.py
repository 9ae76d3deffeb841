"""How far the draft guesses, and how many guesses go into a run."""

from __future__ import annotations

from collections.abc import Iterable

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
_HOPE = 0.25  # a row more is thought to take this share of the first one's time, until it is tried


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

    def ended(self, n_rows: int, seconds: float) -> None:
        """A run came back; `seconds`: in its slowest stage."""
        for n in self._seconds:
            self._seconds[n] += _FORGET * (self._hoped(n) - self._seconds[n])
        known = self._seconds.get(n_rows, seconds)
        self._seconds[n_rows] = known + _LEARN * (seconds - known)

    def judged(self, prob: float, right: bool) -> None:
        """A guess that the draft gave `prob` turned out right or wrong."""
        self._right += _JUDGE * (right - self._right)
        self._named += _JUDGE * (prob - self._named)

    def chance(self, prob: float) -> float:
        """How probable a guess is that the draft gives `prob`."""
        return min(prob * self._right / self._named, 1.0) if self._named > 0 else self._right

    def best(self, chances: Iterable[float]) -> int:
        """How many of these to take. `chances`: of each whole path, in the order in which they would be taken."""
        gain, best, most = 0.0, 1, 0.0
        for n, chance in enumerate(chances, 1):
            gain += chance
            if gain / self._time(n) > most:
                best, most = n, gain / self._time(n)
        return best

    def usual(self, limit: int) -> int:
        """As `best`, for a chain of usual guesses, at most `limit`."""
        return self.best(self._right**i for i in range(1, limit + 1))

    def _time(self, n: int) -> float:
        return self._seconds[n] if n in self._seconds else self._hoped(n)

    def _hoped(self, n: int) -> float:
        """What is known of the next shorter runs, and a little for each row more."""
        one = self._seconds.get(1, 1.0)
        m = max((m for m in self._seconds if m < n), default=1)
        return self._seconds.get(m, one) + _HOPE * one * (n - m)
