"""Which draft models draft: trials against simulated speeds."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.core.batching.payoff import Payoff
from ggpipe.core.run_cost import RunCost

Speed = Callable[[Collection[int], int], float]
"""Seconds for a token: by the drafters that draft, and how many tokens came so far."""


class Request:
    """Requests that are served one after the other, with drafters that are only speeds."""

    def __init__(self, speed: Speed, drafters: tuple[int, ...] = (0,), n_requests: int = 1) -> None:
        self.payoff = Payoff()
        self.cost = RunCost()
        self.now = self.best_s = 0.0
        self.n_tokens = 0
        self.active: list[Collection[int]] = []
        """The drafters that drafted, for each token."""
        self._speed, self._drafters, self._n = speed, drafters, n_requests
        alone_s = speed((), 0)
        self.cost.ended(1, alone_s / 2, alone_s)
        self.cost.ended(n_requests, alone_s / 2, alone_s)

    def tokens(self, n: int, request: int = 1) -> None:
        """The next `n` tokens of each request."""
        requests = tuple(range(request, request + self._n))
        for _ in range(n * self._n):
            active = tuple(drafter for drafter in self._drafters if not self.payoff.is_paused(drafter, self._n))
            sets = [(), *((drafter,) for drafter in self._drafters), self._drafters]
            self.best_s += min(self._speed(each, self.n_tokens) for each in sets) / self._n
            self.now += self._speed(active, self.n_tokens) / self._n
            self.active.append(active)
            self.n_tokens += 1
            for drafter in active:
                self.payoff.drafted(drafter)
            self.payoff.accepted(1, self.now, requests, self._drafters, active, self.cost)

    @property
    def share_active(self) -> float:
        """Of the latest half of the tokens, those that came while all drafted."""
        half = self.active[len(self.active) // 2 :]
        return sum(set(active) == set(self._drafters) for active in half) / len(half)


def constant(with_draft_s: float) -> Speed:
    return lambda active, _: with_draft_s if active else 1.0


@pytest.mark.parametrize("n_requests", [1, 3])
@pytest.mark.parametrize("slower", [1.0, 1.05, 1.16, 1.37, 4.0])
def test_a_drafter_that_does_not_pay_pauses(slower: float, n_requests: int) -> None:
    request = Request(constant(slower), n_requests=n_requests)
    request.tokens(3000)
    assert request.share_active < 0.1
    not_counted_s = 16 * (slower - 1)  # of its first tokens
    assert (request.now - not_counted_s) / request.best_s < 1.02


def test_one_that_is_as_fast_as_none_pauses_too() -> None:
    request = Request(constant(0.99))
    request.tokens(3000)
    assert request.share_active < 0.5, "it would only take energy"


@pytest.mark.parametrize("faster", [0.9, 0.7, 0.3, 0.1])
def test_a_drafter_that_pays_drafts(faster: float) -> None:
    request = Request(constant(faster))
    request.tokens(3000)
    assert request.share_active > 0.95
    assert request.now / request.best_s < 1.02


def test_a_drafter_that_clearly_pays_is_not_tried_soon() -> None:
    request = Request(constant(0.3))
    request.tokens(3000)
    assert all(request.active)


def test_what_was_found_is_kept_for_later_requests() -> None:
    request = Request(constant(1.5))
    for number in range(1, 20):
        request.tokens(24, number)
    assert request.now / request.best_s < 1.04
    assert sum(map(bool, request.active)) < 40, "each request begins with what the one before found"


def test_each_load_has_its_own_record() -> None:
    payoff = Request(constant(1.5))
    payoff.tokens(100)
    assert payoff.payoff.is_paused(0, 1)
    assert not payoff.payoff.is_paused(0, 2)


def test_trials_become_rarer_while_they_change_nothing() -> None:
    request = Request(constant(1.5))
    request.tokens(20_000)
    starts = [i for i in range(1, 20_000) if request.active[i] and not request.active[i - 1]]
    gaps = [b - a for a, b in itertools.pairwise(starts)]
    assert gaps == sorted(gaps)
    assert gaps[-1] > 3 * gaps[0]
    assert gaps[-1] == pytest.approx(gaps[-2], rel=0.1), "but not more than bounds allow"


def test_a_drafter_that_recovers_is_found() -> None:
    request = Request(lambda active, n: (1.4 if n < 2000 else 0.6) if active else 1.0)
    request.tokens(8000)
    assert request.share_active > 0.9


def test_a_drafter_that_becomes_slow_pauses() -> None:
    request = Request(lambda active, n: (0.6 if n < 2000 else 1.4) if active else 1.0)
    request.tokens(2000)
    assert all(request.active[-500:])
    request.tokens(200)
    assert sum(map(bool, request.active[-100:])) < 20, "it is found at once"


def test_of_two_drafters_the_one_that_pays_drafts() -> None:
    speeds = {(): 1.0, (0,): 1.3, (1,): 0.6, (0, 1): 0.8}
    request = Request(lambda active, _: speeds[tuple(active)], drafters=(0, 1))
    request.tokens(4000)
    assert request.active[2000:].count((1,)) > 1900


def test_a_drafter_that_sends_nothing_is_given_up() -> None:
    request = Request(constant(1.5))
    request.tokens(100)
    assert request.payoff.is_paused(0, 1)
    now, paused = request.now, []
    for _ in range(6000):
        now += 1.0  # it would not be slower, but nothing of it comes
        request.payoff.accepted(1, now, (1,), (0,), (), request.cost)
        paused.append(request.payoff.is_paused(0, 1))
    assert not all(paused), "it is tried"
    assert sum(paused) > 0.8 * len(paused)


def test_time_between_requests_does_not_count() -> None:
    request = Request(constant(0.5))
    for number in range(1, 50):
        request.now += 1000
        request.tokens(20, number)
    assert all(request.active)


def test_prompts_are_not_measured() -> None:
    request = Request(constant(0.5))
    for _ in range(100):
        request.tokens(5)
        request.now += 100
        request.payoff.accepted(1, request.now, (), (0,), (0,), request.cost)
    assert all(request.active)


@given(
    phases=st.lists(st.tuples(st.floats(0.2, 5.0), st.integers(1, 600)), min_size=1, max_size=8),
    lengths=st.lists(st.integers(1, 400), min_size=1, max_size=10),
)
def test_adversarial_drafters_cost_little(phases: list[tuple[float, int]], lengths: list[int]) -> None:
    """A drafter whose speed changes whenever it likes: each change costs a bounded number of tokens."""
    speeds = [seconds for seconds, n in phases for _ in range(n)]
    request = Request(lambda active, n: speeds[n % len(speeds)] if active else 1.0)
    for number, n in enumerate(lengths, 1):
        request.tokens(n, number)
    alone_s = float(request.n_tokens)
    n_changes = len(phases) * (request.n_tokens // len(speeds) + 1)
    slowest = max(seconds for seconds, _ in phases)
    assert request.now <= alone_s * 1.03 + 16 * slowest * (n_changes + 1)
