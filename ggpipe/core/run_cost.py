"""How long runs take, by their number of rows: learned for a pipeline, from all requests' runs."""

from __future__ import annotations

import bisect
import collections
from collections.abc import Mapping

_LEARN = 0.2  # weight of the latest run's time,
_LEARN_SHARED = 0.05  # the same where several requests share the pipeline: one slow run should not change their sizes,
_LEARN_OLD = 0.5  # but there a length may not have been tried for a while
_FORGET = 0.01  # of a run length's time, with each run of another length
_FORGET_SHARED = 0.001  # as _FORGET, where several requests share the pipeline: trying a length delays all of them
_UNTRIED = 0.25  # a row more is expected to take this share of the first one's time, or less, until it is tried
_TRIALS = 2  # of a length, before what it takes is known,
_TRIAL_SHARE = 0.002  # of all time is what trials of a length may cost;
_SOONEST, _LATEST = 150, 2000  # it is tried again after so many runs


class RunCost:
    """Running means of run times.

    Rows are cheap where memory is the limit, and cost as much as runs of their own where arithmetic is: so times are
    learned. A length that is not tried yet is expected to be cheap, so it is tried.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        """`is_shared`: the times are to decide on runs of several requests."""
        self._is_shared = is_shared
        self._forget = _FORGET_SHARED if is_shared else _FORGET
        self._seconds: dict[int, float] = {}
        """Time of a run in its slowest stage, by its rows."""
        self._tried: list[int] = []
        """The numbers of rows with a time, ascending."""
        self.length = 1.0
        """A run's time in all stages, as a multiple of that in its slowest."""
        self._text_row_s: dict[int, float] = {}
        """What a prompt's row adds to a run's time in its slowest stage, by the bits of the run's number of rows."""
        self._n_ended = 0
        self._ends: dict[int, collections.deque[int]] = {}
        """By a run's rows: when the last such runs ended, counted in runs."""

    @property
    def is_known(self) -> bool:
        """A run was timed."""
        return bool(self._seconds)

    def ended(self, n_rows: int, slowest_s: float, total_s: float = 0.0) -> None:
        """A run came back; `slowest_s`: its time in its slowest stage, `total_s`: in all stages."""
        self.length += _LEARN * (max(total_s / slowest_s, 1.0) - self.length)
        for n in self._seconds:
            self._seconds[n] += self._forget * (self._expected(n) - self._seconds[n])
        if n_rows not in self._seconds:
            bisect.insort(self._tried, n_rows)
        known = self._seconds.get(n_rows, slowest_s)
        learn = _LEARN
        if self._is_shared:
            learn = _LEARN_OLD if self._is_old(n_rows) else _LEARN_SHARED
        self._seconds[n_rows] = known + learn * (slowest_s - known)
        self._n_ended += 1
        self._ends.setdefault(n_rows, collections.deque(maxlen=_TRIALS)).append(self._n_ended)

    def to_try(self, most: int, n_in_flight: Mapping[int, int], losses: Mapping[int, float]) -> int | None:
        """A number of rows, at most `most`, of which runs should be tried, to learn what they take. Of what lies
        between these numbers is known enough; longer runs are expected to be cheap, and so are tried anyway.
        `n_in_flight`: runs by their rows. `losses`: by rows, the share of time that such runs seem to cost beyond the
        best ones; what is nearly as good is tried often, since times change with what else the machines do."""
        n = 1
        while n <= most and (n_in_flight.get(n, 0) >= _TRIALS or not self._is_old(n, _lasting(losses[n]))):
            n *= 2
        return n if n <= most else None

    def _is_old(self, n_rows: int, lasting: int = _SOONEST) -> bool:
        """It was not tried, or not within so many runs."""
        ends = self._ends.get(n_rows)
        return ends is None or len(ends) < _TRIALS or ends[0] <= self._n_ended - lasting

    def text_ended(self, n_rows: int, n_text: int, slowest_s: float) -> None:
        """A run with `n_text` tokens of prompts and `n_rows` others came back.

        Rows get dearer as the prompt goes on: what one number of rows shows of it goes for all.
        """
        first, n_all = max(n_rows, 1), n_rows + n_text
        if n_all == first:
            return
        row_s = max(slowest_s - self.seconds(first), 0.0) / (n_all - first)
        bits = n_all.bit_length()
        known = self._text_row_s.get(bits, row_s)
        more = _LEARN * (row_s - known)
        if known:
            for other in self._text_row_s:
                self._text_row_s[other] *= 1 + more / known
        self._text_row_s[bits] = known + more

    def text_s(self, n_rows: int, n_text: int) -> float:
        """Time of a run with `n_text` tokens of prompts and `n_rows` others in its slowest stage; 0 before the first
        run."""
        first, n_all = max(n_rows, 1), n_rows + n_text
        return self.seconds(first) + (n_all - first) * (self.text_row_s(n_all) or 0.0)

    def text_row_s(self, n_all: int) -> float | None:
        """What each row of prompts beyond a run's first row adds to its time in its slowest stage, in runs of `n_all`
        rows; None before the first prompt."""
        bits = n_all.bit_length()
        nearest = min(self._text_row_s, key=lambda other: abs(other - bits), default=None)
        return None if nearest is None else self._text_row_s[nearest]

    def seconds(self, n: int) -> float:
        """Time of a run of `n` rows in its slowest stage; 0 before the first run."""
        return self.time(n) if self._seconds else 0.0

    def time(self, n: int) -> float:
        """As `seconds`; before the first run in units of a run of one row."""
        return self._seconds[n] if n in self._seconds else self._expected(n)

    @property
    def _one(self) -> float:
        """The time of a run of one row. When only longer ones were tried, each further row of the shortest of these is
        thought to have taken `_UNTRIED` of it; 1 before the first run."""
        if 1 in self._seconds or not self._tried:
            return self._seconds.get(1, 1.0)
        shortest = self._tried[0]
        return self._seconds[shortest] / (1 + _UNTRIED * (shortest - 1))

    def _expected(self, n: int) -> float:
        """The time of the next shorter run that was tried, and for each row more the share of it that lies between
        that one and the next longer one, or that the shorter one took beyond the shortest of all; at most `_UNTRIED`.
        """
        one = self._one
        at = bisect.bisect_left(self._tried, n)
        m = self._tried[at - 1] if at > 0 else 1
        known = self._seconds.get(m, one)
        at = bisect.bisect_right(self._tried, n, at)
        more = _UNTRIED
        if at < len(self._tried):
            longer = self._tried[at]
            more = (self._seconds[longer] / one - known / one) / (longer - m)
        elif self._tried and m > self._tried[0]:
            more = (known / one - self._seconds[self._tried[0]] / one) / (m - self._tried[0])
        more = min(max(more, 0.0), _UNTRIED)
        return known + more * one * (n - m)


def _lasting(loss: float) -> int:
    """For how many runs a length's time is known, where such runs cost this share of time."""
    return min(max(round(_TRIALS * loss / _TRIAL_SHARE), _SOONEST), _LATEST)
