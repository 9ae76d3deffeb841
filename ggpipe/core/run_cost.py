"""How long runs take, by their number of rows: learned for a pipeline, from all requests' runs; and the number of rows
that brings most accepted tokens for its time."""

from __future__ import annotations

import bisect
import collections
import itertools
from collections.abc import Callable, Iterable, Mapping

_LEARN = 0.2
"""Weight of the latest run in means that each run shows: how much longer all stages take than the slowest, and what a
row of a prompt takes."""
_LEARN_TIME = 0.05
"""Weight of the latest time of a run length that is often used: one slow run should not change what is chosen."""
_LEARN_OLD = 0.5
"""The same for a length that was not tried for a while."""
_FORGET = 0.002
"""Of a run length's time, with each run of another length. With 0.01 lengths that are dear were tried so often that 4
requests on 2 stages lost 17 % where a second row costs 1.75 runs (simulated)."""
_FORGET_PROMPT = 0.02
"""Of the time of prompts' rows in runs of other lengths, with each run."""
_UNTRIED = 0.05
"""Of the first row's time: so much a row more is expected to take before any longer run was tried. With 0.25 they
are tried later, and speeds differ by less than 2 % (simulated, 300 tokens)."""
_CLEARLY_MORE = 1.2
"""Times the accepted tokens a second that a longer run must bring beside accepted tokens. Below, runs of unequal length
lose it again: 4 % for 4 requests on 2 stages where a row costs 0.9 of a run (simulated like tests/sim/test_serving).
"""
_FOLLOWING = 0.5
"""Runs that a longer run delays, as a share of those that follow it into the pipeline. With 1, drafts that are right at
90 % and copies are up to 4 % slower; with 0, drafts on 8 stages where a row costs a third of a run are up to 8 %
slower (simulated)."""
_FIRST_ROWS = 4
"""Rows of the longest run before any was timed. With 8, the first 64 tokens take 1 % longer (simulated: 24 pipelines of
one or four stages), and where rows are dear, the first run with draft tokens alone loses 8 tokens."""
_TRIALS = 2
"""Of a length, before its time is known."""
_TRIAL_SHARE = 0.002
"""Share of all time that trials of a length may cost."""
_SOONEST, _LATEST = 150, 2000
"""Bounds for the number of runs after which a length is tried again."""


class RunCost:
    """Running means of run times.

    Rows are cheap where memory is the limit, and cost as much as runs of their own where arithmetic is: so times are
    learned. Before a longer run was tried, its rows are expected to be cheap, so one is tried; what it takes predicts
    still longer ones.
    """

    def __init__(self, rolls_back: bool = True) -> None:
        """`rolls_back`: as in `Limits`."""
        self.rolls_back = rolls_back
        self._seconds: dict[int, float] = {}
        """Time of a run in its slowest stage, by its rows."""
        self._tried: list[int] = []
        """The numbers of rows with a time, ascending."""
        self._beside: dict[int, tuple[int | None, int | None]] = {}
        """By number of rows with a time: the next smaller and the next larger ones."""
        self._times: dict[int, float] = {}
        """What `time` returned since the last run ended."""
        self.length = 1.0
        """A run's time in all stages, as a multiple of that in its slowest."""
        self._prompt_row_s: dict[int, float] = {}
        """What a prompt's row adds to a run's time in its slowest stage, by the bits of the run's number of rows."""
        self._n_ended = 0
        self._ends: dict[int, collections.deque[int]] = {}
        """By a run's rows: when the last such runs ended, counted in runs."""

    @property
    def most_rows(self) -> int:
        """Rows of the longest run that may be tried: twice as many as the longest one so far. Until then only a guess
        says what such runs take."""
        return max(2 * self._tried[-1] if self._tried else 0, _FIRST_ROWS)

    @property
    def is_known(self) -> bool:
        """A run was timed."""
        return bool(self._seconds)

    def ended(self, n_rows: int, slowest_s: float, total_s: float = 0.0) -> None:
        """A run came back; `slowest_s`: its time in its slowest stage, `total_s`: in all stages."""
        self.length += (_LEARN if self._n_ended else 1.0) * (max(total_s / slowest_s, 1.0) - self.length)
        for n, (shorter, longer) in self._beside.items():
            self._seconds[n] += _FORGET * (self._between(shorter, n, longer) - self._seconds[n])
        known = self._seconds.get(n_rows, slowest_s)
        if len(self._ends.get(n_rows, ())) < _TRIALS:  # the first may be slow for other reasons
            self._seconds[n_rows] = min(known, slowest_s)
        else:
            learn = _LEARN_OLD if self._is_old(n_rows) else _LEARN_TIME
            self._seconds[n_rows] = known + learn * (slowest_s - known)
        if n_rows not in self._beside:
            bisect.insort(self._tried, n_rows)
            self._beside = {n: self._neighbours(n) for n in self._seconds}
        self._times.clear()
        self._n_ended += 1
        self._ends.setdefault(n_rows, collections.deque(maxlen=_TRIALS)).append(self._n_ended)

    def to_try(self, most: int, n_in_flight: Mapping[int, int], loss: Callable[[int], float]) -> int | None:
        """A number of rows, at most `most`, of which runs should be tried, to learn what they take. Of what lies
        between these numbers is known enough; longer runs are expected to be cheap, and so are tried anyway.
        `n_in_flight`: runs by their rows. `loss`: the share of time that runs of this many rows seem to cost beyond the
        best ones; what is nearly as good is tried often, since times change with what else the machines do."""
        n = 1
        while n <= most and (n_in_flight.get(n, 0) >= _TRIALS or not self._is_old(n, _lasting(loss(n)))):
            n *= 2
        return n if n <= most else None

    def tries_one(self, n_in_flight: int, loss: float) -> bool:
        """A run of a single row should be tried: as long as only longer runs were timed, their further rows seem to be
        free. `n_in_flight`: such runs. `loss`: the share of time that it seems to cost."""
        return self.is_known and n_in_flight < _TRIALS and self._is_old(1, _lasting(loss))

    def _is_old(self, n_rows: int, lasting: int = _SOONEST) -> bool:
        """It was not tried, or not within so many runs."""
        ends = self._ends.get(n_rows)
        return ends is None or len(ends) < _TRIALS or ends[0] <= self._n_ended - lasting

    def prompt_ended(self, n_rows: int, n_prompt_rows: int, slowest_s: float) -> None:
        """A run with `n_prompt_rows` tokens of prompts, draft tokens included, and `n_rows` accepted ones came back.

        Rows get dearer towards the end of a prompt. So what other numbers of rows took is forgotten, bit by bit: those
        that seem dear now are tried again.
        """
        first, n_all = max(n_rows, 1), n_rows + n_prompt_rows
        if n_all == first:
            return
        row_s = max(slowest_s - self.seconds(first), 0.0) / (n_all - first)
        bits = n_all.bit_length()
        self._prompt_row_s.setdefault(bits, row_s)
        for other, known in self._prompt_row_s.items():
            self._prompt_row_s[other] += (_LEARN if other == bits else _FORGET_PROMPT) * (row_s - known)

    def prompt_s(self, n_rows: int, n_prompt_rows: int) -> float:
        """Time in its slowest stage of a run with `n_prompt_rows` tokens of prompts and draft tokens, and `n_rows`
        accepted ones; 0 before the first run."""
        first, n_all = max(n_rows, 1), n_rows + n_prompt_rows
        return self.seconds(first) + (n_all - first) * (self.prompt_row_s(n_all) or 0.0)

    def prompt_row_s(self, n_all: int) -> float | None:
        """What each row of prompts beyond a run's first row adds to its time in its slowest stage, in runs of `n_all`
        rows; None before the first prompt."""
        bits = n_all.bit_length()
        nearest = min(self._prompt_row_s, key=lambda other: abs(other - bits), default=None)
        return None if nearest is None else self._prompt_row_s[nearest]

    def seconds(self, n: int) -> float:
        """Time of a run of `n` rows in its slowest stage; 0 before the first run."""
        return self.time(n) if self._seconds else 0.0

    def time(self, n: int) -> float:
        """As `seconds`; before the first run in units of a run of one row."""
        if (seconds := self._times.get(n)) is None:
            seconds = self._times[n] = self._seconds[n] if n in self._seconds else self._expected(n)
        return seconds

    def again_s(self, rejected: float, n_again: int) -> float:
        """Expected delay of the next correction, in all stages, if its run decodes `n_again` tokens again with the
        probability `rejected`. 0 where the target can roll back (see `state_rollback`)."""
        if self.rolls_back or rejected <= 0:
            return 0.0
        return rejected * self.length * max(self.time(1 + n_again) - self.time(1), 0.0)

    @property
    def _one(self) -> float:
        """The time of a run of one row. When only longer ones were tried, each further row of the shortest of these is
        thought to have taken `_UNTRIED` of it; 1 before the first run."""
        if 1 in self._seconds or not self._tried:
            return self._seconds.get(1, 1.0)
        shortest = self._tried[0]
        return self._seconds[shortest] / (1 + _UNTRIED * (shortest - 1))

    def _expected(self, n: int) -> float:
        """The time of a run that lies between two lengths: the shorter one's, or the longer one's in proportion to its
        rows, whichever is more, since rows are free until arithmetic is the limit. A run that is longer than all takes
        as much more for each row as the longest did beyond the shortest, or `_UNTRIED` where there is one length."""
        shorter, longer = self._neighbours(n)
        return self._between(shorter, n, longer)

    def _neighbours(self, n: int) -> tuple[int | None, int | None]:
        """The tried lengths next to this one."""
        first, last = bisect.bisect_left(self._tried, n), bisect.bisect_right(self._tried, n)
        return self._tried[first - 1] if first > 0 else None, self._tried[last] if last < len(self._tried) else None

    def _between(self, shorter: int | None, n: int, longer: int | None) -> float:
        """See `_expected`."""
        known_s = self._one if shorter is None else self._seconds[shorter]
        if longer is not None:
            return max(known_s, self._seconds[longer] * n / longer)
        row_s = _UNTRIED * self._one
        if shorter is None:
            return known_s + row_s * (n - 1)
        if shorter > (shortest := self._tried[0]):
            row_s = max(known_s - self._seconds[shortest], 0.0) / (shorter - shortest)
        return known_s + row_s * (n - shorter)


def _lasting(loss: float) -> int:
    """For how many runs a length's time is known, where such runs cost this share of time."""
    return min(max(round(_TRIALS * loss / _TRIAL_SHARE), _SOONEST), _LATEST)


def most_per_second(probabilities: Iterable[float], cost: RunCost, n_roots: int = 0, after: float = 1.0) -> int:
    """How many draft tokens to take into a run with `n_roots` accepted ones, so that it brings most accepted tokens for
    its time. `probabilities`: in the order in which they are taken. Without accepted tokens at least 1.

    Where the run holds accepted tokens, other runs wait for the slowest stage, and its time there is what counts. A run
    without also makes corrections late by its further rows' time in all stages: its own, and those of runs that follow
    it through the pipeline. How probable such a correction is, the path of the last draft token that these runs would
    hold says, from what the first one follows on: `after` is the path probability of that. So copied text has long
    runs. Where the target cannot roll back, tokens before a rejected one in its run are late, too (`RunCost.again_s`).
    """
    gain, best = float(n_roots), 0 if n_roots else 1
    probabilities = list(itertools.islice(probabilities, max(cost.most_rows - n_roots, best)))
    n_following, n_all = int(_FOLLOWING * (cost.length - 1)), len(probabilities)
    most = _CLEARLY_MORE * gain / cost.time(n_roots) if n_roots else 0.0
    time, length, one_s = cost.time, cost.length, cost.time(1)  # this loop runs for each row of each run
    rolls_back, again_s, before = cost.rolls_back, 0.0, 1.0
    least = probabilities[-1] / after if probabilities else 1.0
    for n, probability in enumerate(probabilities, 1):
        gain += probability
        if not rolls_back:
            again_s += cost.again_s(before - probability, n_roots + n - 1)
            before = probability
        run_s, late_s = time(n_roots + n), again_s
        if not n_roots and run_s > one_s:
            last = n + n_following
            kept = probabilities[last - 1] / after if last <= n_all else least ** (last / n_all)
            late_s += length * (run_s - one_s) * (1 - kept)
        if (rate := gain / (run_s + late_s)) > most:
            best, most = n, rate
    return best
