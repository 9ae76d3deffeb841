"""Links between ranks, and what ggpipe itself adds to computing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

Seconds = Annotated[float, Meta(ge=0)]


@dataclass(frozen=True, slots=True)
class Link:
    """The way from one rank to another."""

    latency_s: float
    """Time from one program to the other, until the receiver polls included."""
    bytes_per_s: float


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
    `runtime/stage_thread` with a draft."""
    poll_s: Seconds = 45e-6
    """CPU time of a poll for messages: mostly going to sleep and waking up again."""
    abort_s: Seconds = 0.3e-3
    """Time until a cancelled decode stops."""
