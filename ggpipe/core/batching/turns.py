"""Whether drafters draft ahead of a request's root, or take turns with the target: whichever brings tokens faster.

Ahead, which is usual, draft tokens go in while earlier ones are verified: the pipeline is full, and a drafter always
works. Where ranks share a machine they slow each other down by that. In turn, a root waits for its draft tokens, is
verified with them, and nothing else is computed meanwhile: where rows cost little, that can be faster.

What a token takes is learned for both. Until enough is known of a way, it counts as fast as it would be if ranks did
not slow each other down, so it is tried; what is known of a way that is not in use is slowly forgotten, so it is tried
again now and then. In turn, tokens are counted as draft tokens' probabilities let expect them: a round takes about the
same time whatever is accepted, so a few of them show the speed.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from ggpipe.core.batching.rows import usual_chain
from ggpipe.core.drafters.calibration import Calibration, Pace
from ggpipe.core.run_cost import RunCost

_PRIOR = 32.0
"""Tokens that what is expected of a way counts for."""
_REMEMBERED = 256.0
"""Tokens of a way that are remembered: then earlier ones count half."""
_FORGET = 0.998
"""Of what is known of a way, for each token that comes in the other one."""
_HOPE = 0.85
"""Times the time that a token is expected to take in turn, as long as that was not tried: run times and the drafter's
pace were learned while all ranks computed."""
_CLEARLY_LESS = 0.97
"""Times what a token takes: so much less it must take in the other way."""


@dataclass(frozen=True, slots=True)
class Turn:
    """Draft tokens that are to go in with a root where target and drafter take turns."""

    n: int
    token_s: float
    """What an accepted token is expected to take then."""
    least_path: float = 0.0
    """Path probability of a draft token below which it takes more time than it saves."""


def usual_turn(cost: RunCost, calibration: Calibration, pace: Pace, most: int) -> Turn:
    """As many draft tokens of a chain, at most `most`, as bring most accepted tokens for the time of their round."""
    first_s, next_s = pace.first_s or 0.0, pace.next_s or 0.0
    gain, best = 1.0, Turn(0, cost.length * cost.time(1), 0.5)
    for n, probability in enumerate(usual_chain(calibration, most), 1):
        gain += probability
        token_s = (cost.length * cost.time(1 + n) + first_s + (n - 1) * next_s) / gain
        if token_s < best.token_s:
            best = Turn(n, token_s, next_s / token_s)
    return best


def ahead_token_s(cost: RunCost, calibration: Calibration, pace: Pace, most: int) -> float:
    """What a token takes at least with runs of draft tokens in all stages: in runs of equal length, of which the next
    is needed with the probability that all tokens of one are right."""
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
    """What tokens took lately in one way."""

    n_tokens: float = 0.0
    seconds: float = 0.0

    def add(self, n_tokens: float, seconds: float) -> None:
        if self.n_tokens > _REMEMBERED:
            self.keep(0.5)
        self.n_tokens += n_tokens
        self.seconds += seconds

    def keep(self, share: float) -> None:
        """Have what is known count for less."""
        self.n_tokens *= share
        self.seconds *= share

    def token_s(self, expected_s: float) -> float:
        """What a token takes, given what is expected of it."""
        return (_PRIOR * expected_s + self.seconds) / (_PRIOR + self.n_tokens)


@dataclass(slots=True)
class Turns:
    """See the module's text."""

    in_turn: bool = False
    """Drafters and target take turns."""
    _ahead: _Way = field(default_factory=_Way)
    _turns: _Way = field(default_factory=_Way)

    def accepted(
        self, n: int, expected: float, seconds: float, cost: RunCost, calibration: Calibration, pace: Pace, most: int
    ) -> None:
        """Tokens of the only request were accepted: `n` of them, of a run that let expect `expected` ones, `seconds`
        after those before. `most`: draft tokens in a run, at most."""
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
