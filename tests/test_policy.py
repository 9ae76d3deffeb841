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
