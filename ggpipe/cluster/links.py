"""Links between ranks, sums over them, and what ggpipe itself adds to computing."""

from __future__ import annotations

import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0)]
SUM_HEAD_BYTES = 16
"""Of each message of a sum, before its values."""


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one rank to another."""

    latency_s: float
    """Time from one program to the other, until the receiver polls included."""
    bytes_per_s: float


@dataclass(frozen=True, slots=True)
class SumTimes:
    """How long two parts of a group take to exchange and add up values, without waiting for the slower part."""

    points: tuple[tuple[float, float], ...]
    """(bytes that each part sends, seconds), at least two, by rising bytes. Linear between them, and beyond."""
    halves: tuple[tuple[float, float], ...] = ()
    """The same for values that travel as 16-bit floats; empty: as `points`."""

    @classmethod
    def of_link(cls, link: Link) -> SumTimes:
        """The latency of one message, and the time that its bytes take."""
        return cls(((0.0, link.latency_s), (1e6, link.latency_s + 1e6 / link.bytes_per_s)))

    def seconds(self, n_bytes: float, as_halves: bool = False) -> float:
        """The time of a sum of which each part sends so many bytes; never less than the fastest that was measured."""
        points: Sequence[tuple[float, float]] = (as_halves and self.halves) or self.points
        i = min(max(bisect.bisect_left(points, n_bytes, key=lambda point: point[0]), 1), len(points) - 1)
        (x0, y0), (x1, y1) = points[i - 1 : i + 1]
        return max(y0 + (y1 - y0) * (n_bytes - x0) / (x1 - x0), min(y0, y1))


LOCAL_SUMS = SumTimes.of_link(Link(5e-6, 5e9))
"""Sums over memory that the ranks of a machine share, where nothing was measured: as two virtual cores of 2024 do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Overheads:
    """Time that ggpipe itself takes besides decoding.

    `ggpipe profile` measures all of it but `poll_delay_s`. The defaults are for clusters that are described by hand,
    and for what a profile of a single rank cannot have: messages. They were measured on two virtual cores of 2024.
    """

    run_s: Seconds = 0.08e-3
    """Time of a stage for a run outside the decode: taking it up, packing what goes on."""
    hand_s: Seconds = 0.1e-3
    """Time until another thread of the process is awake."""
    cold_s: Seconds = 0.1e-3
    """Extra time of a decode after a rest of two milliseconds or more: core and caches have served others."""
    marker_s: Seconds = 0.1e-3
    """Time of a stage for a run that was cancelled or that only carries KV operations."""
    event_s: Seconds = 0.16e-3
    """Time of the head or the draft's head for an event: deciding, sampling, handing on."""
    read_s: Seconds = 0.15e-3
    """Extra time of an event for each message from another rank."""
    send_s: Seconds = 50e-6
    """Extra time of an event for each message to another rank."""
    poll_delay_s: Seconds = 0.15e-3
    """Time until a rank that computes polls for messages, on average: half of the time between two polls of
    `engine/stage_thread` with a draft."""
    poll_s: Seconds = 45e-6
    """CPU time of a poll for messages: mostly going to sleep and waking up again."""
    abort_s: Seconds = 0.3e-3
    """Time until a cancelled decode stops."""
    sum_s: Seconds = 15e-6
    """Time of a group's part for a sum besides the sum itself: its graph stops there, and begins again behind it."""
