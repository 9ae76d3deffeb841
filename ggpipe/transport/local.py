"""Ranks as threads of one process: for a single machine's tests, and for a pipeline inside the head."""

from __future__ import annotations

import queue
import socket
from collections.abc import Callable

from ggpipe.transport.base import Kind, Message, Payload, Transport


class LocalWorld:
    """As many connected transports as there are ranks."""

    def __init__(self, size: int) -> None:
        self.transports = [LocalTransport(self, rank, size) for rank in range(size)]


class LocalTransport(Transport):
    """A rank's end of a LocalWorld."""

    sends_from_any_thread = True
    must_poll = False

    def __init__(self, world: LocalWorld, rank: int, size: int) -> None:
        self.rank, self.size, self.host, self.ranks_on_host = rank, size, socket.gethostname(), size
        self.hosts = (self.host,) * size
        self.place = f"rank {rank} ({self.host})"
        self._world = world
        self._inbox: queue.SimpleQueue[Message] = queue.SimpleQueue()
        self._wake: Callable[[], None] = lambda: None

    def send(self, dest: int, kind: Kind, payload: Payload) -> None:
        other = self._world.transports[dest]
        other._inbox.put(Message(self.rank, kind, payload))
        other._wake()

    def poll(self) -> Message | None:
        try:
            return self._inbox.get_nowait()
        except queue.Empty:
            return None

    def flush(self, timeout_s: float) -> bool:
        return True

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def close(self, wait_limit_s: float | None, on_all_leaving: Callable[[], None] = lambda: None) -> None:
        on_all_leaving()
