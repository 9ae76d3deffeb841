"""A node's cores: what tasks get that want more of them than there are."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggpipe.sim.clock import VirtualClock
from ggpipe.sim.cores import NICE_WEIGHT, Cores, CpuTask, OwnCores, weight_of

Work = tuple[float, float, int, float]
"""Begin, work in s, threads, weight."""


def run(works: list[Work], n: int, crowd: float = 1.0, kind: type[Cores] = Cores) -> list[float]:
    """When each is through."""
    clock = VirtualClock()
    cores = kind(clock, n, crowd)
    ends = [-1.0] * len(works)

    def start(i: int) -> None:
        _, work_s, threads, weight = works[i]

        def done() -> None:
            assert ends[i] < 0
            ends[i] = clock.now

        cores.start(CpuTask(work_s, threads, weight, done))

    for i, (begin, *_) in enumerate(works):
        clock.at(begin, lambda i=i: start(i))  # type: ignore[misc]
    while clock.step():
        pass
    assert min(ends) >= 0
    return ends


def test_a_task_alone_takes_its_time() -> None:
    assert run([(1.0, 2.0, 2, 1.0)], 4) == [3.0]


def test_tasks_in_turn_do_not_slow_each_other() -> None:
    assert run([(0.0, 2.0, 1, 1.0), (2.0, 1.0, 1, 1.0), (5.0, 1.0, 1, 1.0)], 1) == [2.0, 3.0, 6.0]


def test_two_tasks_share_a_core() -> None:
    assert run([(0.0, 2.0, 1, 1.0), (0.0, 1.0, 1, 1.0)], 1) == pytest.approx([3.0, 2.0])
    assert run([(0.0, 2.0, 1, 1.0), (1.0, 2.0, 1, 1.0)], 1) == pytest.approx([3.0, 4.0])


def test_each_thread_takes_a_core() -> None:
    # Three threads want two cores: each thread gets two thirds of one.
    assert run([(0.0, 2.0, 2, 1.0), (0.0, 2.0, 1, 1.0)], 2) == pytest.approx([3.0, 3.0])
    # A thread uses no more than one core.
    assert run([(0.0, 2.0, 1, 1.0)], 8) == [2.0]


def test_polls_take_cores_first() -> None:
    clock = VirtualClock()
    cores, ends = Cores(clock, 2), []
    cores.poll(0.5)
    for _ in range(2):
        cores.start(CpuTask(0.75, 1, 1.0, lambda: ends.append(clock.now)))
    clock.at(0.5, lambda: cores.poll(-0.5))
    while clock.step():
        pass
    assert ends == [pytest.approx(0.5 + 0.75 - 0.375)] * 2
    cores.poll(100.0)
    cores.start(CpuTask(1.0, 1, 1.0, lambda: ends.append(clock.now)))
    while clock.step():
        pass
    assert len(ends) == 3, "they leave something, however many ranks there are"


@pytest.mark.parametrize(("n_cores", "crowd"), [(1, 1.0), (2, 1.0), (2, 0.8), (8, 0.9)])
def test_a_guest_gets_what_was_measured(n_cores: int, crowd: float) -> None:
    clock = VirtualClock()
    cores, ends = Cores(clock, n_cores, crowd), []
    for _ in range(n_cores):
        cores.start(CpuTask(1000.0, 1, 1.0, lambda: None))
    cores.start(CpuTask(1.0, 1, weight_of(0.5, n_cores, crowd), lambda: ends.append(clock.now)))
    while not ends:
        clock.step()
    assert ends == [pytest.approx(2.0, rel=0.1)]


def test_nice_tasks_take_the_rest() -> None:
    first, second = run([(0.0, 1.0, 1, 1.0), (0.0, 1.0, 1, NICE_WEIGHT)], 1)
    assert first == pytest.approx(1 + NICE_WEIGHT)
    assert second == pytest.approx(2.0)
    # There is a core for it: being nice costs nothing.
    assert run([(0.0, 1.0, 1, 1.0), (0.0, 1.0, 1, NICE_WEIGHT)], 2) == pytest.approx([1.0, 1.0])


def test_a_full_task_leaves_the_rest_to_the_others() -> None:
    # Of three cores the first can use one, though its weight would give it more; two tasks share the others.
    ends = run([(0.0, 1.0, 1, 9.0), (0.0, 1.0, 2, 1.0), (0.0, 1.0, 2, 1.0)], 3)
    assert ends[0] == pytest.approx(1.0)
    assert ends[1] == ends[2]
    assert ends[1] == pytest.approx(1 + 0.5 / 0.75)


def test_busy_cores_slow_each_other() -> None:
    assert run([(0.0, 1.0, 1, 1.0), (0.0, 1.0, 1, 1.0)], 2, 0.8) == pytest.approx([1.25, 1.25])
    assert run([(0.0, 1.0, 1, 1.0)], 2, 0.8) == [1.0]
    # The second is alone for its last half.
    ends = run([(0.0, 0.8, 1, 1.0), (0.0, 1.6, 1, 1.0)], 2, 0.8)
    assert ends == pytest.approx([1.0, 1.8])


def test_a_stopped_task_frees_its_cores_and_never_ends() -> None:
    clock = VirtualClock()
    cores = Cores(clock, 1)
    ends: list[str] = []
    first = CpuTask(10.0, 1, 1.0, lambda: ends.append("first"))
    second = CpuTask(1.0, 1, 1.0, lambda: ends.append(f"second at {clock.now}"))
    cores.start(first)
    cores.start(second)
    clock.at(1.0, lambda: cores.stop(first))
    while clock.step():
        pass
    assert ends == ["second at 1.5"]


def test_a_stopped_task_on_a_node_of_its_own() -> None:
    clock = VirtualClock()
    cores = OwnCores(clock, 4)
    ends: list[str] = []
    task = CpuTask(10.0, 4, 1.0, lambda: ends.append("first"))
    cores.start(task)
    clock.at(1.0, lambda: cores.stop(task))
    clock.at(2.0, lambda: cores.start(CpuTask(1.0, 4, 1.0, lambda: ends.append(f"second at {clock.now}"))))
    while clock.step():
        pass
    assert ends == ["second at 3.0"]


def test_actions_of_one_time_run_in_order_of_planning() -> None:
    clock = VirtualClock()
    seen: list[int] = []
    for i in range(5):
        clock.at(1.0, lambda i=i: seen.append(i))  # type: ignore[misc]
    clock.after(0.5, lambda: clock.at(0.0, lambda: seen.append(-1)))  # in the past: at once
    while clock.step():
        pass
    assert seen == [-1, 0, 1, 2, 3, 4]
    assert clock.now == 1.0


TIMES = st.floats(0, 5).map(lambda t: round(t, 2))
WORKS = st.lists(
    st.tuples(TIMES, st.floats(0.01, 3).map(lambda t: round(t, 2)), st.integers(1, 4), st.sampled_from((1.0, 0.1))),
    min_size=1,
    max_size=8,
)


@settings(deadline=None)
@given(WORKS, st.integers(1, 4), st.floats(0.3, 1.0))
def test_nothing_is_faster_than_alone_nor_slower_than_one_after_the_other(
    works: list[Work], n: int, crowd: float
) -> None:
    ends = run(works, n, crowd)
    for (begin, work_s, threads, _), end in zip(works, ends, strict=True):
        assert end >= begin + work_s * max(threads / n, 1) - 1e-9
    serial = max(begin for begin, *_ in works) + sum(work_s * max(t / n, 1) for _, work_s, t, _ in works)
    assert max(ends) <= serial / crowd + 1e-9


@settings(deadline=None)
@given(WORKS, st.integers(1, 4))
def test_work_is_conserved(works: list[Work], n: int) -> None:
    """Tasks that each want all cores keep them busy, so they are through when one after the other would be."""
    works = [(begin, work_s, n, weight) for begin, work_s, _, weight in works]
    busy_until = 0.0
    for begin, work_s, *_ in sorted(works):
        busy_until = max(busy_until, begin) + work_s
    assert max(run(works, n)) == pytest.approx(busy_until, abs=1e-9)


@settings(deadline=None)
@given(WORKS, st.integers(1, 4))
def test_own_cores_are_cores_with_one_task_at_a_time(works: list[Work], n: int) -> None:
    at, apart = 0.0, []
    for begin, work_s, threads, weight in works:
        apart.append((at + begin, work_s, min(threads, n), weight))
        at += begin + work_s + 0.001
    assert run(apart, n, kind=OwnCores) == pytest.approx(run(apart, n))


@pytest.mark.parametrize("team", [1, 2])
def test_a_team_progresses_while_all_of_it_has_cores(team: int) -> None:
    clock, ends = VirtualClock(), list[float]()
    cores = Cores(clock, 2)
    for _ in range(3):  # each has two thirds of a core
        cores.start(CpuTask(1.0, 1, 1.0, lambda: ends.append(clock.now), team))
    while clock.step():
        pass
    assert ends == pytest.approx([1.5**team] * 3)
