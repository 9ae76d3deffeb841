"""Whether drafters draft ahead of a request's root or take turns with the target: whichever brings tokens faster.

Ahead, which is usual, draft tokens go in while earlier ones are verified: the pipeline is full, and a drafter always
works. Ranks that share a machine slow each other down that way. In turn, a root waits for its draft tokens and is
verified with them, and nothing else is computed meanwhile. Where rows cost little, that can be faster.

The time per token is learned for both ways. Until enough is known about a way, it is assumed to be as fast as if ranks
did not slow each other down, so it gets tried. What is known about the way that is not in use is slowly forgotten, so
it is tried again now and then. In turn, the expected number of accepted tokens counts, by the draft tokens'
probabilities, not the actual one: a round takes about as long whatever is accepted, so a few rounds show the speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ggpipe.core.batching.rows import usual_chain
from ggpipe.core.drafters.calibration import Calibration, Pace
from ggpipe.core.run_cost import RunCost

_PRIOR = 32.0
"""Weight of the expected time per token, in tokens."""
_REMEMBERED = 256.0
"""Tokens of a way that are remembered. Beyond that, earlier ones count half."""
_FORGET = 0.998
"""Share of what is known about a way that remains after each token of the other way."""
_HOPE = 0.85
"""Factor on the expected time of a token in turn while drafters draft ahead: run times and the drafter's pace are then
learned while all ranks compute."""
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
    first_s, next_s = pace.first_s or 0.0, pace.next_s or 0.0
    gain, best = 1.0, Turn(0, cost.length * cost.time(1), _STILL_DRAFTED)
    for n, probability in enumerate(usual_chain(calibration, most), 1):
        gain += probability
        token_s = (cost.length * cost.time(1 + n) + first_s + (n - 1) * next_s) / gain
        if token_s < best.token_s:
            best = Turn(n, token_s, next_s / token_s)
    return best


def ahead_token_s(cost: RunCost, calibration: Calibration, pace: Pace, most: int) -> float:
    """The least time per token while drafters draft ahead: runs of equal length fill all stages, and each is needed
    with the probability that all tokens of the run before it are right."""
    next_s, right = pace.next_s or 0.0, calibration.agreement
    gain, token_s = 0.0, math.inf
    for n, probability in enumerate((1.0, *usual_chain(calibration, most - 1)), 1):
        gain += probability
        all_right = probability * right
        run_s = max(cost.time(n), n * next_s)
        token_s = min(token_s, run_s * (cost.length * (1 - all_right) + all_right) / gain)
    return token_s


@dataclass(slots=True)
class _Way:
    """Recent tokens of one way, and their time."""

    n_tokens: float = 0.0
    seconds: float = 0.0

    def add(self, n_tokens: float, seconds: float) -> None:
        if self.n_tokens > _REMEMBERED:
            self.keep(0.5)
        self.n_tokens += n_tokens
        self.seconds += seconds

    def keep(self, share: float) -> None:
        """Give what is known less weight."""
        self.n_tokens *= share
        self.seconds *= share

    def token_s(self, expected_s: float) -> float:
        """Time per token, given the expected one."""
        return (_PRIOR * expected_s + self.seconds) / (_PRIOR + self.n_tokens)


@dataclass(slots=True)
class Turns:
    """See the module's text."""

    in_turn: bool = False
    """Drafters and target take turns."""
    _ahead: _Way = field(default_factory=_Way)
    _turns: _Way = field(default_factory=_Way)

    def accepted(
        self,
        cost: RunCost,
        calibration: Calibration,
        pace: Pace,
        most: int,
        *,
        n: int,
        expected: float,
        seconds: float,
    ) -> None:
        """`n` tokens of the only request were accepted where `expected` were expected, `seconds` after the ones before.
        `most`: draft tokens in a run, at most."""
        if pace.next_s is None:
            return  # it has not drafted yet
        used, other = (self._turns, self._ahead) if self.in_turn else (self._ahead, self._turns)
        used.add(expected if self.in_turn else n, seconds)
        other.keep(_FORGET**n)
        ahead_s = self._ahead.token_s(ahead_token_s(cost, calibration, pace, most))
        turn_s = self._turns.token_s(usual_turn(cost, calibration, pace, most).token_s * (1 if self.in_turn else _HOPE))
        if self.in_turn:
            self.in_turn = turn_s * _CLEARLY_LESS <= ahead_s
        else:
            self.in_turn = turn_s < ahead_s * _CLEARLY_LESS
