"""Where a rank's main thread waits: for messages, which must be polled, and for its own threads, which can wake it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable
from typing import Generic, TypeVar

from ggpipe.transport.base import Kind, Message, Transport
from ggpipe.transport.wake_event import WakeEvent

T = TypeVar("T")

# MPI's own waits spin, so we poll. The wait between two polls grows with the time already waited: what it can add to
# a hop stays a small share of what the hop took anyway, and a rank at rest costs next to nothing.
_SHORTEST_S = 20e-6
_IN_FLIGHT_S = 100e-6
_LONGEST_S = 10e-3


def poll_interval(quiet_s: float) -> float:
    """Seconds to the next poll after `quiet_s` seconds without a message.

    1/20 of the time waited, between 20 and 100 µs; beyond 50 ms 1/500 of it, so 2 ms after a second, at most 10 ms.
    """
    if quiet_s < _IN_FLIGHT_S * 500:
        return min(max(quiet_s / 20, _SHORTEST_S), _IN_FLIGHT_S)
    return min(quiet_s / 500, _LONGEST_S)


class Inbox(Generic[T]):
    """Messages from other ranks and notices of type T from this process's threads, in one place for the main thread.

    Whoever is idle polls: the main thread, unless a stage's thread that waits for runs relieves it (`relieved`); then a
    run that arrives is computed at once, without waking another thread first.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._arrived: collections.deque[Message | T] = collections.deque()
        self._wake = WakeEvent()
        self._order = threading.Lock()
        self.take_run: Callable[[Message], None] | None = None
        """Who gets runs instead of `next`'s caller; called from the thread that polls."""
        self.relieved: Callable[[], float | None] = lambda: None
        """Seconds for which the main thread may stop polling, because another thread polls or nothing can come; or
        None."""
        self._quiet_since = time.monotonic()
        self._called = False
        transport.set_waker(self._wake.set)

    def put(self, notice: T) -> None:
        """From any thread."""
        self._arrived.append(notice)
        self._wake.set()

    def wake(self) -> None:
        """End the wait of the main thread, which then polls. From any thread."""
        self._wake.set()

    def call(self) -> None:
        """Have `next` return, with None if nothing else came. From any thread."""
        self._called = True
        self._wake.set()

    def pump(self) -> bool:
        """Poll once and hand on what came, in the order in which it came; False when nothing did. From any thread."""
        with self._order:
            message = self._transport.poll()
            if message is None:
                return False
            if message.kind is Kind.RUN and self.take_run is not None:
                self.take_run(message)
            else:
                self._arrived.append(message)
                self._wake.set()
            return True

    def next(self, timeout_s: float) -> Message | T | None:
        """The next message or notice; None when `timeout_s` seconds passed without one, or after `call`."""
        start = time.monotonic()
        while True:
            came = self.pump()
            now = time.monotonic()
            if self._arrived:
                self._quiet_since = now
                return self._arrived.popleft()
            if came:  # a run, for another thread; more messages may follow
                continue
            waited_s = now - start
            if self._called or waited_s >= timeout_s:
                self._called = False
                return None
            if not self._transport.must_poll:
                self._wake.wait(timeout_s - waited_s)
            elif (relief_s := self.relieved()) is not None:
                self._wake.wait(relief_s)
                self._quiet_since = time.monotonic()
            else:
                self._wake.wait(poll_interval(now - self._quiet_since))
