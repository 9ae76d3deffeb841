"""How long runs take, by their number of rows: learned for a pipeline, from all requests' runs."""

from __future__ import annotations

import bisect

_LEARN = 0.2  # weight of the latest run's time
_FORGET = 0.01  # of a run length's time, with each run of another length
_UNTRIED = 0.25  # a row more is expected to take this share of the first one's time, or less, until it is tried


class RunCost:
    """Running means of run times.

    Rows are cheap where memory is the limit, and cost as much as runs of their own where arithmetic is: so times are
    learned. A length that is not tried yet is expected to be cheap, so it is tried.
    """

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        """Time of a run in its slowest stage, by its rows."""
        self._tried: list[int] = []
        """The numbers of rows with a time, ascending."""
        self.length = 1.0
        """A run's time in all stages, as a multiple of that in its slowest."""
        self.text_row_s: float | None = None
        """What a prompt's row adds to a run's time in its slowest stage; None before the first prompt."""

    @property
    def is_known(self) -> bool:
        """A run was timed."""
        return bool(self._seconds)

    def ended(self, n_rows: int, slowest_s: float, total_s: float = 0.0) -> None:
        """A run came back; `slowest_s`: its time in its slowest stage, `total_s`: in all stages."""
        self.length += _LEARN * (max(total_s / slowest_s, 1.0) - self.length)
        for n in self._seconds:
            self._seconds[n] += _FORGET * (self._expected(n) - self._seconds[n])
        if n_rows not in self._seconds:
            bisect.insort(self._tried, n_rows)
        known = self._seconds.get(n_rows, slowest_s)
        self._seconds[n_rows] = known + _LEARN * (slowest_s - known)

    def text_ended(self, n_rows: int, n_text: int, slowest_s: float) -> None:
        """A run with `n_text` tokens of prompts and `n_rows` others came back."""
        row_s = max(slowest_s - self.seconds(max(n_rows, 1)), 0.0) / n_text
        known = self.text_row_s if self.text_row_s is not None else row_s
        self.text_row_s = known + _LEARN * (row_s - known)

    def seconds(self, n: int) -> float:
        """Time of a run of `n` rows in its slowest stage; 0 before the first run."""
        return self.time(n) if self._seconds else 0.0

    def time(self, n: int) -> float:
        """As `seconds`; before the first run in units of a run of one row."""
        return self._seconds[n] if n in self._seconds else self._expected(n)

    def _expected(self, n: int) -> float:
        """The time of the next shorter run that was tried, and for each row more the share of it that lies between
        that one and the next longer one, or that the shorter one took beyond one row; at most `_UNTRIED`."""
        one = self._seconds.get(1, 1.0)
        at = bisect.bisect_left(self._tried, n)
        m = self._tried[at - 1] if at > 0 else 1
        known = self._seconds.get(m, one)
        at = bisect.bisect_right(self._tried, n, at)
        more = _UNTRIED
        if at < len(self._tried):
            longer = self._tried[at]
            more = (self._seconds[longer] / one - known / one) / (longer - m)
        elif m > 1:
            more = (known / one - 1) / (m - 1)
        more = min(max(more, 0.0), _UNTRIED)
        return known + more * one * (n - m)
