"""The native sum over parts of a group, each a process of its own, in memory that they share."""

from __future__ import annotations

import os
import random
import signal
import threading
import time

import numpy as np
import pytest
from support.group_sums import SIZES, Group, add, crc, total_of, values_of

from ggpipe.llama.libllama import native


@pytest.mark.parametrize("n_parts", [2, 3])
def test_all_parts_get_equal_bits_added_up_in_their_order(n_parts: int) -> None:
    def work(sums: native.GroupSum, part: int) -> list[int]:
        checks = []
        for n in SIZES:
            data = values_of(part, n)
            assert not add(sums, data)
            checks.append(crc(data))
        return checks

    expected = [crc(total_of([values_of(part, n) for part in range(n_parts)])) for n in SIZES]
    with Group(n_parts, work) as group:
        assert group.results() == [expected] * n_parts


def test_parts_that_are_late_in_turn_and_all_see_who_wants_to_stop() -> None:
    n_parts, n_sums = 3, 1500
    rng = random.Random(0)
    sizes = [rng.choice((1, 7, 300, 5000, 40_000)) for _ in range(n_sums)]
    stops = [[rng.random() < 0.1 for _ in range(n_parts)] for _ in range(n_sums)]
    values = [{n: values_of(part, n) for n in set(sizes)} for part in range(n_parts)]

    def work(sums: native.GroupSum, part: int) -> list[tuple[int, bool]]:
        mine = random.Random(part)
        results = []
        for n, wants in zip(sizes, stops, strict=True):
            if mine.random() < 0.1:
                time.sleep(mine.random() * 1e-3)
            data = values[part][n].copy()
            stopped = add(sums, data, wants[part])
            results.append((crc(data), stopped))
        return results

    totals = {n: crc(total_of([values[part][n] for part in range(n_parts)])) for n in set(sizes)}
    with Group(n_parts, work) as group:
        results = group.results()
    assert results == [[(totals[n], any(wants)) for n, wants in zip(sizes, stops, strict=True)]] * n_parts


def test_a_sum_of_nothing_still_says_who_wants_to_stop() -> None:
    with Group(2, lambda sums, part: add(sums, values_of(part, 0), part == 1)) as group:
        assert group.results() == [True, True]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
@pytest.mark.parametrize("n", [2048, 100_000])
def test_a_lost_part_holds_nobody_for_longer_than_the_heartbeat(number: int, n: int) -> None:
    def work(sums: native.GroupSum, part: int) -> object:
        assert not add(sums, values_of(part, n))
        if part == 1:
            os.kill(os.getpid(), number)
        if part == 0:  # where the heartbeat finds out
            threading.Timer(0.2, sums.abandon).start()
        stopped = add(sums, values_of(part, n)), add(sums, values_of(part, n))
        sums.send(0, 0)
        return stopped, sums.lost

    with Group(3, work) as group:
        assert [group.parts[part].wait() for part in (0, 2)] == [((True, True), True)] * 2


def test_parts_that_compute_different_graphs_are_lost() -> None:
    with Group(2, lambda sums, part: (add(sums, values_of(part, 10 + part)), sums.lost)) as group:
        assert group.results() == [(True, True)] * 2


def test_slices_arrive_while_their_parts_are_at_the_next_sum() -> None:
    n_rounds, n = 20, 300_000

    def work(sums: native.GroupSum, part: int) -> list[int]:
        checks = []
        for i in range(n_rounds):
            own = values_of(10 * i + part, n)
            if part > 0:
                sums.send(own.ctypes.data, own.nbytes)
            for other in range(1, 3) if part == 0 else ():
                data = np.empty(n, np.float32)
                sums.receive(other, data.ctypes.data, data.nbytes)
                checks.append(crc(data))
            assert not add(sums, own)
        return checks

    expected = [crc(values_of(10 * i + part, n)) for i in range(n_rounds) for part in (1, 2)]
    with Group(3, work) as group:
        assert group.results() == [expected, [], []]


def test_what_a_lost_part_does_not_send_is_zero() -> None:
    def work(sums: native.GroupSum, part: int) -> list[float]:
        data = np.ones(100_000, np.float32)
        threading.Timer(0.1, sums.abandon).start()
        if part == 0:
            sums.receive(1, data.ctypes.data, data.nbytes)
        return [float(data.min()), float(data.max())]

    with Group(2, work) as group:
        assert group.parts[0].wait() == [0.0, 0.0]


def test_a_part_that_waits_needs_no_core() -> None:
    def work(sums: native.GroupSum, part: int) -> float:
        data = values_of(part, 2048)
        add(sums, data)
        if part == 1:
            time.sleep(1)
        before_s = time.thread_time()
        add(sums, data)
        return time.thread_time() - before_s

    with Group(2, work) as group:
        waited_s = group.results()[0]
    assert isinstance(waited_s, float)
    assert waited_s < 0.1


def test_parts_of_no_group() -> None:
    with pytest.raises(ValueError, match="parts of a group"):
        native.shared_sum(0, 2, 2)


def test_memory_that_is_not_there() -> None:
    with pytest.raises(RuntimeError, match="memory that a group shares: Bad file descriptor"):
        native.shared_sum(-1, 0, 2)
