"""Where a rank's main thread waits: for messages, which must be polled, and for its own threads, which can wake it."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from typing import Generic, TypeVar

from ggpipe.transport.base import Message, Transport

T = TypeVar("T")

# MPI's own waits spin, so we poll. The wait between two polls grows with the time already waited: what it can add to
# a hop stays a small share of what the hop took anyway, and a rank at rest costs next to nothing.
_SHORTEST_S = 20e-6
_IN_FLIGHT_S = 100e-6
_LONGEST_S = 2e-3


def poll_interval(quiet_s: float) -> float:
    """Seconds to the next poll after `quiet_s` seconds without a message.

    1/20 of the time waited, between 20 and 100 µs; beyond 50 ms 1/500 of it, so 2 ms after a second.
    """
    if quiet_s < _IN_FLIGHT_S * 500:
        return min(max(quiet_s / 20, _SHORTEST_S), _IN_FLIGHT_S)
    return min(quiet_s / 500, _LONGEST_S)


class Inbox(Generic[T]):
    """Messages from other ranks and notices of type T from this process's threads, in one place."""

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._notices: collections.deque[T] = collections.deque()
        # Held while there is nothing new; whoever has something lets go of it. Not a queue.SimpleQueue: in CPython
        # 3.11 its get() can wait forever when a timeout of microseconds runs out at the wrong moment.
        self._nothing_new = threading.Lock()
        self._nothing_new.acquire()
        transport.set_waker(self._wake)

    def put(self, notice: T) -> None:
        """From any thread."""
        self._notices.append(notice)
        self._wake()

    def _wake(self) -> None:
        with contextlib.suppress(RuntimeError):  # somebody else let go of it already
            self._nothing_new.release()

    def next(self, timeout_s: float) -> Message | T | None:
        """The next message or notice; None when `timeout_s` seconds passed without one."""
        start = time.monotonic()
        while True:
            message = self._transport.poll()
            if message is not None:
                return message
            if self._notices:
                return self._notices.popleft()
            quiet = time.monotonic() - start
            if quiet >= timeout_s:
                return None
            wait = poll_interval(quiet) if self._transport.must_poll else timeout_s - quiet
            self._nothing_new.acquire(timeout=wait)
