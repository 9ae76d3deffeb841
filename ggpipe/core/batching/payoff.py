"""Which draft models draft: those with which tokens come faster than without them.

A draft model that is never right, is slow, or takes cores from the target delays tokens. By how much depends on load,
context and text, so it is tried: for a while, a draft model that usually drafts pauses, or one that usually pauses
drafts, and whichever is faster becomes usual. A paused draft model computes nothing.

Times of tokens vary a lot while a draft model drafts, and a good one's first tokens can be slow. Until it has drafted
for a while, it counts as faster than it was, by the standard error of the mean.

An engine's first tokens are not counted: caches are cold, and the draft model is still reading the prompt.

A trial ends as soon as it has lost `_MOST_LOST` tokens. The next one starts when its loss is `_SHARE` of the tokens
that came since, and each trial in a row that changes nothing doubles that time. A drafter that falls behind the speed
that is expected without it is tried sooner. Results are kept for later requests, one record for each number of requests
that are served at the same time, up to the next power of two.

Losses are counted in tokens at the usual speed: a token that comes in twice the usual time loses one.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ggpipe.core.batching.rows import Rounds
from ggpipe.core.run_cost import RunCost

_TRIAL = 32
"""Tokens of a trial."""
_MOST_LOST = _TRIAL / 8
"""Tokens that a trial may lose."""
_SHARE = 0.01
"""Share of all tokens that trials may lose."""
_MOST_DOUBLED = 3
"""Trials in a row that double the time to the next: that bounds how late a drafter's recovery is found."""
_CLEARLY_LESS = 0.98
"""Times the usual time for a token: so much drafting must save. Pausing is less work for the same speed."""


@dataclass(slots=True)
class _Pace:
    """How long a request's token takes, lately."""

    n_tokens: float = 0.0
    seconds: float = 0.0
    _squares: tuple[float, float, float] = (0.0, 0.0, 0.0)
    """Sums over all acceptances: tokens squared, tokens times seconds, seconds squared."""

    def add(self, n_tokens: float, seconds: float) -> None:
        kept = 0.5 if self.n_tokens > 2 * _TRIAL else 1.0
        self.n_tokens = kept * self.n_tokens + n_tokens
        self.seconds = kept * self.seconds + seconds
        nn, ns, ss = self._squares
        self._squares = kept * nn + n_tokens**2, kept * ns + n_tokens * seconds, kept * ss + seconds**2

    @property
    def token_s(self) -> float:
        return self.seconds / self.n_tokens

    @property
    def certainty(self) -> float:
        """From 0 (nothing is known of it) to 1."""
        return min(self.n_tokens / (2 * _TRIAL), 1.0)

    @property
    def possible_s(self) -> float:
        """What a token may really take: of a few tokens, the mean less its standard error."""
        mean, (nn, ns, ss) = self.token_s, self._squares
        error = math.sqrt(max(ss - 2 * mean * ns + mean**2 * nn, 0.0)) / self.n_tokens
        return max(mean - (1 - self.certainty) * error, mean / 2)

    def lost(self, token_s: float) -> float:
        """Number of tokens by which it falls short of the usual speed of one token per `token_s` seconds."""
        return self.seconds / token_s - self.n_tokens


@dataclass(slots=True)
class _Trial:
    drafter: int
    turns_on: bool
    leaves_none: bool
    """No drafter drafts during the trial."""
    before: _Pace = field(default_factory=_Pace)
    """Before it takes effect: the drafter has not sent any draft token yet, or its last ones are still accepted."""
    since: _Pace | None = None
    """After that."""


class _Trials:
    """Trials of the requests under one load."""

    def __init__(self) -> None:
        self.paused: set[int] = set()
        """Drafters that do not draft now, in a trial or usually."""
        self._usual = _Pace()
        self._trial: _Trial | None = None
        self._n_since = 0.0
        """Tokens since the last trial."""
        self._n_left: float = _TRIAL / 2
        """First tokens that are not counted: caches are cold, and the draft model is still reading the prompt."""
        self._behind = 0.0
        """Tokens lost against the speed that is expected without drafters, since they last had no loss."""
        self._longer = 1.0
        """Time of a token without drafters, as a multiple of the time that its runs take."""
        self._losses: dict[int, float] = {}
        """By paused drafter: what the next trial of it is expected to lose."""
        self._n_unchanged: dict[int, int] = {}
        """By drafter: trials in a row that changed nothing, at most `_MOST_DOUBLED`."""

    def accepted(
        self, n: float, seconds: float, drafters: Sequence[int], named_by: Collection[int], alone_s: float
    ) -> None:
        """See `Payoff.accepted`. `alone_s`: time of the runs of a token that no drafter proposed."""
        if (trial := self._trial) is not None:
            self._tried(trial, n, seconds, named_by, alone_s)
            return
        self._n_since += n
        if self._n_left > 0:
            self._n_left -= n
            return
        self._usual.add(n, seconds)
        active = [drafter for drafter in drafters if drafter not in self.paused]
        without_s = alone_s * self._longer
        self._behind = max(self._behind + seconds / without_s - n, 0.0) if active else 0.0
        if self._usual.n_tokens < _TRIAL / 2 and self._behind < _MOST_LOST:
            return
        slower = max(without_s / self._usual.possible_s - 1, 0.0) / max(len(active), 1)
        expected = {drafter: slower * _TRIAL for drafter in active} | {
            drafter: self._losses[drafter] for drafter in drafters if drafter in self.paused
        }
        for drafter, n_unchanged in self._n_unchanged.items():
            if drafter in expected:
                expected[drafter] = max(expected[drafter], 1.0) * 2**n_unchanged
        drafter = min(drafters, key=expected.__getitem__)
        if expected[drafter] <= _SHARE * self._n_since + self._behind:
            if not active:
                self._longer = self._usual.token_s / alone_s
            self._trial = _Trial(drafter, turns_on=drafter in self.paused, leaves_none=active == [drafter])
            self.paused ^= {drafter}

    def drafted(self, drafter: int) -> None:
        """A drafter sent draft tokens."""
        if self._trial is not None and self._trial.turns_on and self._trial.drafter == drafter:
            self._trial.since = self._trial.since or _Pace()

    def _tried(self, trial: _Trial, n: float, seconds: float, named_by: Collection[int], alone_s: float) -> None:
        usual_s = self._usual.token_s
        if trial.since is None:
            trial.before.add(n, seconds)
            if not trial.turns_on and trial.drafter not in named_by:
                trial.since = _Pace()
        else:
            trial.since.add(n, seconds)
        since = trial.since or _Pace()
        lost = max(trial.before.lost(usual_s), 0.0) + since.lost(usual_s)
        if lost < _MOST_LOST and since.n_tokens < _TRIAL and trial.before.n_tokens < 2 * _TRIAL:
            return
        if trial.leaves_none and since.n_tokens:
            self._longer = since.token_s / alone_s
        most_s = usual_s * _CLEARLY_LESS if trial.turns_on else self._usual.possible_s / _CLEARLY_LESS
        if lost < _MOST_LOST and since.n_tokens and since.token_s < most_s:
            lost = min((usual_s / since.token_s - 1) * _TRIAL, _MOST_LOST)
            self._losses[trial.drafter] = lost * self._usual.certainty
            self._n_unchanged[trial.drafter] = 0
            self._usual = since
        else:
            self._losses[trial.drafter] = lost
            self._n_unchanged[trial.drafter] = min(self._n_unchanged.get(trial.drafter, 0) + 1, _MOST_DOUBLED)
            self._usual = _Pace()
            self.paused ^= {trial.drafter}
        self._trial, self._n_since, self._behind = None, 0.0, 0.0


class Payoff:
    """See the module's text. The scheduler keeps it up to date."""

    def __init__(self) -> None:
        self._by_load: dict[int, _Trials] = {}
        """By the bits of the number of requests that are served."""
        self._requests: Sequence[int] = ()
        self._at = 0.0

    def is_paused(self, drafter: int, n_requests: int) -> bool:
        """This drafter is to be paused while `n_requests` requests are served."""
        trials = self._by_load.get(n_requests.bit_length())
        return trials is not None and drafter in trials.paused

    def since(self, requests: Sequence[int]) -> float | None:
        """When tokens were last accepted, if the same requests, all comparable, were served then; else None."""
        return self._at if requests and requests == self._requests else None

    def accepted(
        self,
        n: int,
        now: float,
        requests: Sequence[int],
        drafters: Sequence[int],
        named_by: Collection[int],
        cost: RunCost,
    ) -> None:
        """Tokens were accepted: `n` since the last call for their request.

        `requests`: ids of all that are served; none where they are not to be compared with others, because there is a
        prompt to compute, or one of them does not draft. `drafters`: those with a model. `named_by`: those that had
        named the last token.
        """
        if (since := self.since(requests)) is not None and cost.is_known:
            n_requests = len(requests)
            trials = self._by_load.setdefault(n_requests.bit_length(), _Trials())
            alone_s = Rounds(cost, n_requests).round_s
            trials.accepted(n / n_requests, now - since, drafters, named_by, alone_s)
        self._requests, self._at = requests, now

    def drafted(self, drafter: int) -> None:
        """A drafter sent draft tokens."""
        for trials in self._by_load.values():
            trials.drafted(drafter)
