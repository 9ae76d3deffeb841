"""When a rank counts as silent: on a clock of the test's own."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.transport.heartbeat import Liveness


def run(liveness: Liveness, from_s: float, until_s: float, beating: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
    """Tick until somebody is silent, or until a point in time, while these ranks send beats."""
    now = from_s
    while True:
        liveness.tick(now)
        for rank in beating:
            liveness.beat(rank, now)
        silent = liveness.silent(now)
        if silent or now >= until_s:
            return now, silent
        wait_s = liveness.wait_s(now)
        assert 0 < wait_s <= liveness.interval_s
        now = min(now + wait_s, until_s)


def test_ranks_that_beat_are_never_silent() -> None:
    assert run(Liveness((1, 2), 3, 0), 0, 1000, (1, 2)) == (1000, ())


@pytest.mark.parametrize("timeout_s", [1, 3, 30, 100])
def test_a_rank_is_silent_right_after_the_timeout(timeout_s: float) -> None:
    liveness = Liveness((1, 2), timeout_s, 0)
    at, silent = run(liveness, 0, 1000, (1,))
    assert at == pytest.approx(timeout_s)
    assert silent == (2,)


def test_without_a_timeout_nobody_is_silent() -> None:
    assert run(Liveness((1,), math.inf, 0), 0, 100000, ()) == (100000, ())


def test_a_machines_ranks_are_named_together() -> None:
    liveness = Liveness((1, 2, 3), 30, 0)
    run(liveness, 0, 10, (1, 2, 3))
    liveness.beat(3, 10.9)  # the last one before the cable was cut
    liveness.tick(11)
    assert run(liveness, 11, 1000, (1,))[1] == (2, 3)


def test_a_process_that_was_stopped_itself_blames_nobody() -> None:
    liveness = Liveness((1, 2), 3, 0)
    run(liveness, 0, 10, (1, 2))
    at, silent = run(liveness, 3600, 7200, (1,))  # stopped for an hour; rank 2 never comes back
    assert silent == (2,)
    assert 3602 < at < 3604


def test_others_that_were_stopped_with_us_have_the_whole_timeout_again() -> None:
    liveness = Liveness((1,), 30, 0)
    run(liveness, 0, 28, ())
    liveness.tick(500)
    assert liveness.silent(500) == ()  # 28 s and an interval
    assert run(liveness, 500, 1000, (1,)) == (1000, ())


def test_a_late_tick_is_no_gap() -> None:
    liveness = Liveness((1,), 30, 0)
    now = 0.0
    while not liveness.silent(now):
        now += 1.9 * liveness.interval_s
        liveness.tick(now)
    assert now < 30 + 2 * liveness.interval_s


@given(st.lists(st.tuples(st.floats(0.01, 100), st.booleans()), max_size=50), st.floats(1, 60))
def test_nobody_is_silent_before_the_timeout_of_running_time(steps: list[tuple[float, bool]], timeout_s: float) -> None:
    liveness, now, running_s = Liveness((1,), timeout_s, 0), 0.0, 0.0
    for seconds, beats in steps:
        now += seconds
        running_s += min(seconds, 2 * liveness.interval_s)
        liveness.tick(now)
        if beats:
            liveness.beat(1, now)
            running_s = 0
        if liveness.silent(now):
            assert running_s > 0.99 * timeout_s
            return
