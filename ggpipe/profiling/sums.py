"""Measures how long two ranks take to add up values, as the parts of a group do in each layer."""

from __future__ import annotations

import functools
import itertools
import statistics
import time
from collections.abc import Sequence

import numpy as np

from ggpipe.cluster.profile import DecodeSums, SumPoint, SumProfile
from ggpipe.errors import RunError
from ggpipe.llama.group import Membership
from ggpipe.llama.libllama import native
from ggpipe.profiling.stage_timing import TimedStage
from ggpipe.transport.base import Transport
from ggpipe.transport.profile_messages import DecodesMeasured, SumsMeasured

ROWS = (1, 8, 128)
_WARM, _LEAST, _MOST = 2, 5, 60
_ALL_PAIRS = 4  # machines
_SWEPT_BYTES = 1 << 23  # as the weights of a layer, which parts read between two sums


def measure_sums(transport: Transport, ranks: Sequence[int], width: int, budget_s: float) -> SumsMeasured:
    """Seconds of sums of 1, 8 and 128 rows of `width` values. Both ranks call this at the same time.

    Raises MpiError if MPI does not support groups, and RunError if the other rank is lost.
    """
    sums, over_memory = transport.join_group(
        ranks,
        lambda *memory: (native.shared_sum(*memory), True),
        lambda *messages: (native.mpi_sum(*messages, halves=False), False),
    )
    ways = [sums]
    if not over_memory:  # memory takes floats as they are
        ways.append(transport.join_group(ranks, None, functools.partial(native.mpi_sum, halves=True)))
    timers = [[_Timer(way, rows * max(width, 1)) for rows in ROWS] for way in ways]
    until, swept = time.monotonic() + budget_s, np.ones(_SWEPT_BYTES, np.uint8)
    for i in range(_WARM + _MOST):
        is_last = i >= _WARM + _LEAST and time.monotonic() > until
        for timer in itertools.chain.from_iterable(timers):
            swept.max()  # the caches get other content
            ends = timer.measure(is_last)
        if ends:  # one of the ranks says so, and both see it
            break
    times = [tuple(tuple(timer.took_s[_WARM:]) for timer in own) for own in timers]
    return SumsMeasured(times[0], times[1] if len(times) > 1 else ())


class _Timer:
    """Times sums of one size on this rank."""

    def __init__(self, sums: native.GroupSum, n_values: int) -> None:
        self._sums = sums
        self._values, self._one = np.zeros(n_values, np.float32), np.zeros(1, np.float32)
        self.took_s: list[float] = []

    def measure(self, stop: bool) -> bool:
        """Time a sum, after synchronizing the ranks. Returns whether one of them wants to stop."""
        self._sums.sum(self._one.ctypes.data, 1, False)
        start = time.perf_counter()
        stop = self._sums.sum(self._values.ctypes.data, self._values.size, stop)
        self.took_s.append(time.perf_counter() - start)
        if self._sums.lost:
            raise RunError("another rank was lost while sums were measured")
        return stop


def sum_profile(ranks: tuple[int, int], measured: Sequence[SumsMeasured]) -> SumProfile:
    """The measurements of two ranks combined. Each sum counts with the time of the rank that arrived later and did not
    wait."""

    def points(both: Sequence[Sequence[Sequence[float]]]) -> tuple[SumPoint, ...]:
        shortest = (statistics.median(map(min, *calls)) for calls in zip(*both, strict=True))
        return tuple(SumPoint(rows, seconds) for rows, seconds in zip(ROWS, shortest, strict=False))

    return SumProfile(ranks, points([one.f32_s for one in measured]), points([one.f16_s for one in measured]))


def measure_decodes(timed: TimedStage, group: Membership, budget_s: float) -> DecodesMeasured:
    """Seconds of each sum inside decodes of one row. All parts of the group call this at the same time."""
    until = time.monotonic() + budget_s
    group.take_times()
    found = []
    for i in range(_WARM + _MOST):
        timed.run(1)
        found.append(group.take_times())
        if i >= _WARM + _LEAST and group.agree(time.monotonic() > until):
            break
    return DecodesMeasured(tuple(found[_WARM:]))


def decode_sums(measured: Sequence[DecodesMeasured]) -> DecodeSums | None:
    """The mean wait and transfer of a sum; None if there are no sums. `measured`: by the parts of a group.

    The part that arrives last does not wait. A part waits all the time that it has less to do than others, so the
    smallest wait of all parts is that of equal parts.
    """
    waits, transfers = [], []
    for decode in zip(*(one.sums_s for one in measured), strict=True):
        if not decode[0]:
            return None
        last = [min(sums) for sums in zip(*decode, strict=True)]
        waits.append(min(statistics.fmean(took) for took in decode) - statistics.fmean(last))
        transfers.append(statistics.fmean(last))
    return DecodeSums(statistics.median(waits), statistics.median(transfers)) if waits else None


def sum_pairs(hosts: Sequence[str]) -> list[tuple[int, int]]:
    """The pairs of ranks whose sums are measured: two ranks of each machine that has several, and one rank of each
    machine with one of the next machine; with a few machines, of all others. `hosts`: of each rank."""
    ranks_on = by_host(hosts)
    within = [(ranks[0], ranks[1]) for ranks in ranks_on if len(ranks) > 1]
    firsts = [ranks[0] for ranks in ranks_on]
    n_next = len(firsts) if len(firsts) <= _ALL_PAIRS else 2
    between = [(a, b) for i, a in enumerate(firsts) for b in firsts[i + 1 : i + n_next]]
    return within + between


def by_host(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks of each host. `hosts`: of each rank."""
    found: dict[str, list[int]] = {}
    for rank, host in enumerate(hosts):
        found.setdefault(host, []).append(rank)
    return list(found.values())
