"""Links between ranks, sums over them, and the time that ggpipe itself adds to decoding."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0)]
SUM_HEAD_BYTES = 16
"""Size of the header of each message of a sum."""


@dataclass(frozen=True, slots=True)
class Link:
    """A connection from one rank to another."""

    latency_s: float
    """Time from one program to the other, including the time until the receiver polls."""
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Skew:
    """How long a part of a group waits in a sum for the slowest part, although all parts have equally much to do.

    A part arrives when the slowest of its threads is done, so the wait grows with the number of threads. The defaults
    follow published figures: in the tensor-parallel fork github.com/zgiles/llama.cpp (Xeon 8168, 24 threads per part),
    a sum inside a decode takes 170 µs in shared memory and 320 to 400 µs over InfiniBand, of which the messages take 2
    to 12 µs. Between these figures and one thread, whose wait `Overheads.sum_s` contains, a straight line is assumed.
    SGLang, with about 14 µs per sum between sockets, shows that less is possible.
    """

    fixed_s: float | None = None
    """Seconds for any number of threads, as measured or as in a cluster file; None: by threads."""
    thread_s: float = 7e-6
    """Seconds per thread of a part beyond the first."""

    def seconds(self, n_threads: int) -> float:
        """Seconds that a sum waits. `n_threads`: of the part with the most threads."""
        return self.thread_s * max(n_threads - 1, 0) if self.fixed_s is None else self.fixed_s


NETWORK_SKEW = Skew(thread_s=15e-6)
"""Between machines, if it was not measured."""


@dataclass(frozen=True, slots=True)
class SumTimes:
    """How long two parts of a group take to exchange and add up values, without waiting for the slower part."""

    points: tuple[tuple[float, float], ...]
    """(bytes that each part sends, seconds), at least two points, in ascending order of bytes. Times are linear between
    and beyond them."""
    halves: tuple[tuple[float, float], ...] = ()
    """Points for values sent as 16-bit floats; empty: `points` applies."""
    skew: Skew = Skew()
    """How much later the slower part arrives."""

    @classmethod
    def of_link(cls, link: Link, skew: Skew = Skew()) -> SumTimes:
        """Sums that take as long as one message over a link."""
        return cls(((0.0, link.latency_s), (1e6, link.latency_s + 1e6 / link.bytes_per_s)), skew=skew)

    def seconds(self, n_bytes: float, as_halves: bool = False) -> float:
        """Seconds of a sum for which each part sends `n_bytes`, as 16-bit floats with `as_halves`. Extrapolation never
        goes below the smaller of the two nearest points."""
        points: Sequence[tuple[float, float]] = (as_halves and self.halves) or self.points
        i = min(max(bisect.bisect_left(points, n_bytes, key=lambda point: point[0]), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1 : i + 1]
        return max(y0 + (y1 - y0) * (n_bytes - x0) / (x1 - x0), min(y0, y1))


LOCAL_SUMS = SumTimes.of_link(Link(5e-6, 5e9))
"""Sums over shared memory, if they were not measured. The values are from two virtual cores of 2024."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Time that ggpipe itself takes besides decoding.

    `ggpipe profile` measures everything except `poll_delay_s`. The defaults apply to clusters without a profile, and to
    messages in the profile of a single rank. They were measured on two virtual cores of 2024.
    """

    run_s: Seconds = 0.08e-3
    """Time of a stage for a run outside the decode: unpacking it, and packing the result."""
    hand_s: Seconds = 0.1e-3
    """Time until another thread of the process is awake."""
    cold_s: Seconds = 0.1e-3
    """Additional time of a decode after a pause of at least two milliseconds, in which core and caches were used by
    others."""
    marker_s: Seconds = 0.1e-3
    """Time of a stage for a run that was cancelled, or that has only KV operations."""
    event_s: Seconds = 0.16e-3
    """Time of the head, or of the draft's head, for an event: scheduling, sampling, and passing on the result."""
    read_s: Seconds = 0.15e-3
    """Additional time of an event per message from another rank."""
    send_s: Seconds = 50e-6
    """Additional time of an event per message to another rank."""
    poll_delay_s: Seconds = 0.15e-3
    """Mean time until a rank that computes polls for messages: half of the interval between the polls of
    `engine/stage_thread` with a draft."""
    poll_s: Seconds = 45e-6
    """CPU time of a poll for messages, which is mostly going to sleep and waking up again."""
    abort_s: Seconds = 0.3e-3
    """Time until a cancelled decode stops."""
    sum_s: Seconds = 15e-6
    """Time that a group's part needs for a sum besides the sum itself, for interrupting and continuing its graph."""
