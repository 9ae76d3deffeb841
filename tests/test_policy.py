"""How many guesses go into a run."""

from __future__ import annotations

import pytest

from ggpipe.core.policy import RunWidth

CHAIN = [0.7**i for i in range(1, 9)]


def learned(times: dict[int, float], rounds: int = 30) -> RunWidth:
    width = RunWidth()
    for _ in range(rounds):
        for n, seconds in times.items():
            width.ended(n, seconds)
    return width


def test_where_arithmetic_is_the_limit_runs_are_short() -> None:
    width = learned({n: 0.02 * n for n in range(1, 9)})
    assert width.best(CHAIN) == 1
    assert width.usual(8) == 1


def test_where_memory_is_the_limit_runs_are_long() -> None:
    width = learned({n: 0.02 * (1 + 0.05 * (n - 1)) for n in range(1, 9)})
    assert width.best(CHAIN) >= 5
    assert width.usual(8) >= 5


def test_what_is_not_tried_is_tried() -> None:
    """Guesses that are nearly sure: each length is thought cheap until it is measured, so all come to be known."""
    width = RunWidth()
    tried = set()
    for _ in range(60):
        width.ended(1, 0.02)  # a root
        n = width.best([0.99**i for i in range(1, 9)])
        tried.add(n)
        width.ended(n, 0.02 * n)
    assert tried >= set(range(2, 9))
    assert width.best(CHAIN) == 1


def test_cheap_rows_are_thought_to_stay_cheap() -> None:
    """One run of two rows that took hardly longer says what longer ones take; a dear one says nothing of them."""
    cheap, dear = learned({1: 0.02, 2: 0.0204}, 1), learned({1: 0.02, 2: 0.04}, 1)
    assert cheap.best(CHAIN) >= 6
    assert dear.best(CHAIN) < 3


def test_an_outlier_is_forgotten() -> None:
    width = learned({1: 0.02, 2: 0.5})
    for _ in range(400):
        width.ended(1, 0.02)
    assert width.best([0.9, 0.81]) == 2


def test_a_draft_that_is_too_sure_of_itself() -> None:
    width = RunWidth()
    for i in range(400):
        width.judged(0.9, right=i % 3 == 0)
    assert width.chance(0.9) == pytest.approx(1 / 3, abs=0.1)
    assert width.chance(0.0) == 0.0


def test_nothing_to_choose_from() -> None:
    assert RunWidth().best([]) == 1


def timed(row_s: float, n_stages: int = 2, first_s: float = 0.05, next_s: float = 0.05) -> RunWidth:
    """Knows that a run takes a second in each stage, and `row_s` more for each row; half of all guesses are right."""
    width = RunWidth()
    for n in range(1, 5):
        for _ in range(50):
            width.ended(n, 1 + row_s * (n - 1), (1 + row_s * (n - 1)) * n_stages)
    for i in range(400):
        width.judged(0.5, i % 2 == 0)
    width.guessed(True, first_s)
    width.guessed(False, next_s)
    return width


def test_a_row_more_is_dearer_where_a_run_passes_many_stages() -> None:
    few, many = timed(0.2, 1), timed(0.2, 32)
    assert few.usual(4) > many.usual(4) == 1


def test_guesses_ride_with_a_root_where_rows_and_waiting_are_cheap() -> None:
    assert timed(0.01).riders((), 3)[0] == 3
    assert timed(0.01, n_stages=32).riders((), 3)[0] < 3, "each row makes 32 stages slower"
    assert timed(0.9).riders((), 3) == (0, 0.0), "a row costs nearly a run"
    assert timed(0.01, first_s=2.0).riders((), 3) == (0, 0.0), "the draft is slow"


def test_only_guesses_that_are_still_to_come_are_waited_for() -> None:
    width = timed(0.01)
    n, wait_s = width.riders((), 3)
    assert n == 3
    assert wait_s == pytest.approx(0.15)
    assert width.riders((0.5, 0.25), 3) == (3, pytest.approx(0.05))
    assert width.riders((0.5, 0.25), 2) == (2, 0.0)
    assert timed(0.01, next_s=9.0, first_s=9.0).riders((0.5,), 3) == (1, 0.0)


def test_a_guess_that_is_hardly_right_does_not_ride() -> None:
    assert timed(0.1).riders((0.01,), 1) == (0, 0.0)


def test_nothing_rides_before_the_draft_was_timed() -> None:
    width = RunWidth()
    assert width.riders((0.9,), 4) == (0, 0.0)
    assert width.seconds(3) == 0


def test_the_reach_follows_how_often_guesses_are_right() -> None:
    def reach(right: float) -> int:
        width = RunWidth()
        for i in range(2000):
            width.judged(0.5, (i * right) % 1 < right)
        return width.reach

    reaches = [reach(right) for right in (0.0, 0.3, 0.7, 0.95, 1.0)]
    assert reaches[0] == 2
    assert reaches == sorted(reaches)
    assert 10 < reaches[2] < 30, "0.7 to the power of 17 is 1 / 500"
    assert reaches[-1] > 500
