"""Whether drafters draft ahead of a request's root or take turns with the target: whichever brings tokens faster.

Ahead, which is usual, draft tokens go in while earlier ones are verified: the pipeline is full, and a drafter always
works. Ranks that share a machine slow each other down that way. In turn, a root waits for its draft tokens and is
verified with them, and nothing else is computed meanwhile. Where rows cost little, that can be faster.

Runs and draft tokens take less time in turn, so each way has run costs (`PipelineState`) and a pace (`Pace`) of its
own. The expected time of a token follows from these and the drafter's agreement. How much longer tokens really take is
learned for each way.
Run costs, paces and what is learned are kept for later requests. Until enough is known about a way, its speed is
assumed: where most stages are on machines with more threads than cores, runs ahead take longer in that proportion, so
requests begin in turn, unless the target has experts, which make rows dear; elsewhere, they begin ahead. That
assumption fades, and what is known about the way that is not in use is slowly forgotten, so it is tried again now and
then, less often with each trial that fails. In turn, the expected number of accepted tokens counts, by the draft
tokens' probabilities, not the actual one: a round takes about as long whatever is accepted, so a few rounds show the
speed.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

from ggpipe.core.batching.rows import usual_chain
from ggpipe.core.drafters.calibration import Calibration, Pace
from ggpipe.core.run_cost import RunCost

_TRUSTED = 4.0
"""Tokens of a way after which its run costs count as much as what is assumed about them. With 8, trials cost 2 % more
in the first 512 tokens of an engine (simulated: two cores, rows free, 80 % right)."""
_TRIAL = 8
"""Tokens for which a way is kept at least: the first run in it overlaps those of the other way."""
_FAILED = 48
"""A way that is left again after fewer tokens was a trial that failed."""
_SOONEST, _LATEST = 16, 1024
"""Tokens from the first failed trial to the next one, and at most: each failed trial doubles them. Starting at 32 costs
4 % in the first 64 tokens of an engine, at 16 at most 2 % (simulated: four cores, 75 % right)."""
_PRIOR = 32.0
"""Tokens of a way after which their time counts as much as the expected one."""
_REMEMBERED = 256.0
"""Tokens of a way that are remembered. Beyond that, earlier ones count half."""
_FORGET = 0.998
"""Share of what is known about a way that remains after each token of the other way, and of the assumption that runs
ahead take longer after each token in turn. With 0.995 there, the first 64 tokens take up to 6 % longer (simulated: two
cores, 90 % right), because ahead is tried too early."""
_STILL_DRAFTED = 0.5
"""Least path probability of draft tokens where none pays in turn: a drafter that drafts a little is still judged."""
_CLEARLY_LESS = 0.97
"""Factor by which the other way must be faster."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Draft tokens that go in with a root where target and drafters take turns."""

    n: int
    token_s: float
    """Expected time of an accepted token."""
    least_path: float = 0.0
    """Path probability below which a draft token takes more time than it saves."""


def usual_turn(cost: RunCost, calibration: Calibration, pace: Pace, most: int) -> Turn:
    """The number of draft tokens of a chain, at most `most`, that brings most accepted tokens per second in turn."""
    return best_turn(cost, usual_chain(calibration, most), pace, 1)


def best_turn(cost: RunCost, chain: Sequence[float], pace: Pace, n_roots: int) -> Turn:
    """The same for each of a run's `n_roots` roots; `token_s` is the time of one root's token. `chain`: path
    probabilities below each root."""
    first_s, next_s = pace.usual
    alone_s = cost.time(n_roots)
    gain, best = 1.0, Turn(0, cost.length * alone_s, _STILL_DRAFTED)
    for n, probability in enumerate(chain, 1):
        gain += probability
        run_s = cost.time(n_roots * (1 + n))
        token_s = (cost.length * run_s + first_s + (n - 1) * next_s) / gain
        if token_s < best.token_s:
            row_s = max(run_s - alone_s, 0.0) / n  # measured times can fall
            best = Turn(n, token_s, (next_s + cost.length * row_s) / token_s)
    return best


def ahead_token_s(cost: RunCost, calibration: Calibration, pace: Pace, most: int) -> float:
    """The least time per token while drafters draft ahead: runs of equal length fill all stages, and each is needed
    with the probability that all tokens of the run before it are right. After a wrong one, drafting starts anew."""
    (first_s, next_s), right = pace.usual, calibration.agreement
    gain, token_s = 0.0, math.inf
    for n, probability in enumerate((1.0, *usual_chain(calibration, most - 1)), 1):
        gain += probability
        all_right = probability * right
        run_s = max(cost.time(n), n * next_s)
        late_s = cost.length * run_s + (first_s + (n - 2) * next_s if n > 1 else 0.0)
        token_s = min(token_s, (late_s * (1 - all_right) + run_s * all_right) / gain)
    return token_s


@dataclass(slots=True)
class _Way:
    """Recent tokens of one way, and their time."""

    n_tokens: float = 0.0
    n_expected: float = 0.0
    """Tokens that were expected in that time."""

    def add(self, n_tokens: float, n_expected: float) -> None:
        if self.n_tokens > _REMEMBERED:
            self.keep(0.5)
        self.n_tokens += n_tokens
        self.n_expected += n_expected

    def keep(self, share: float) -> None:
        """Give what is known less weight."""
        self.n_tokens *= share
        self.n_expected *= share

    def token_s(self, expected_s: float, assumed_s: float | None = None) -> float:
        """Time per token: `expected_s` by this way's run costs, as far as these are known; else `assumed_s`, or the
        same for None."""
        known = 1.0 if assumed_s is None else self.n_tokens / (_TRUSTED + self.n_tokens)
        slower = (_PRIOR + self.n_expected) / (_PRIOR + self.n_tokens)
        return known * expected_s * slower + (1 - known) * (assumed_s or 0.0)


@dataclass(slots=True)
class Turns:
    """See the module's text."""

    crowding: float = 0.0
    """See `Limits`."""
    sparsity: float = 1.0
    """See `RowWork`."""
    in_turn: bool = field(init=False)
    """Drafters and target take turns."""
    _slower: float = field(init=False)
    """How many times as long runs ahead are assumed to take as those in turn."""
    _ahead: _Way = field(default_factory=_Way)
    _turns: _Way = field(default_factory=_Way)
    _n_since: int = _FAILED
    """Tokens since the way was changed. The first change is no failed trial."""
    _least: int = _TRIAL
    """Tokens for which this way is kept at least."""
    _least_after_trial: int = _SOONEST
    """The same, for the way that is taken again when the next trial has failed."""

    def __post_init__(self) -> None:
        self.in_turn = self.crowding > 1 and self.sparsity <= 1
        self._slower = max(self.crowding, 1.0)

    def accepted(
        self,
        ahead: RunCost,
        in_turn: RunCost,
        calibration: Calibration,
        pace: Pace,
        most: int,
        *,
        n: int,
        expected: float,
        seconds: float,
    ) -> None:
        """`n` tokens of the only request were accepted where `expected` were expected, `seconds` after the ones before.
        `ahead`, `in_turn`: what runs take in either way. `most`: draft tokens in a run, at most."""
        if pace.next_s is None or not (ahead.is_known or in_turn.is_known):
            return  # it has not drafted yet
        ahead, in_turn = ahead if ahead.is_known else in_turn, in_turn if in_turn.is_known else ahead
        ahead_pace, turn_pace = (pace.of_other_way, pace) if self.in_turn else (pace, pace.of_other_way)
        ahead_s = ahead_token_s(ahead, calibration, ahead_pace, most)
        turn = usual_turn(in_turn, calibration, turn_pace, most)
        self._n_since += n
        if self._n_since > n:  # else they still come from runs of the other way
            used, other = (self._turns, self._ahead) if self.in_turn else (self._ahead, self._turns)
            used.add(expected if self.in_turn else n, seconds / (turn.token_s if self.in_turn else ahead_s))
            other.keep(_FORGET**n)
        if self._n_since < self._least:
            return
        if self.in_turn:
            turn_s = self._turns.token_s(turn.token_s)
            self._slower += (1 - _FORGET**n) * (1 - self._slower)
            assumed_s = ahead_token_s(in_turn, calibration, turn_pace, most) * self._slower
            ahead_s = self._ahead.token_s(ahead_s, assumed_s)
            changes = not turn.n or ahead_s < turn_s * _CLEARLY_LESS
        else:
            ahead_s = self._ahead.token_s(ahead_s)
            assumed_s = usual_turn(ahead, calibration, ahead_pace, most).token_s / self._slower
            changes = turn.n > 0 and self._turns.token_s(turn.token_s, assumed_s) < ahead_s * _CLEARLY_LESS
        if changes:
            if self._n_since < _FAILED:
                self._least = self._least_after_trial
                self._least_after_trial = min(2 * self._least_after_trial, _LATEST)
            else:
                self._least = _TRIAL
            self.in_turn, self._n_since = not self.in_turn, 0
