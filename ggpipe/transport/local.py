"""Ranks as threads of one process: for a single machine's tests, and for a pipeline inside the head."""

from __future__ import annotations

import os
import queue
import socket
import threading
from collections.abc import Callable, Sequence
from typing import IO, TypeVar

from ggpipe.transport.base import HEAD, Kind, Message, OverMemory, OverMessages, Payload, Transport

T = TypeVar("T")


class LocalWorld:
    """As many connected transports as there are ranks."""

    def __init__(self, size: int) -> None:
        self.transports = [LocalTransport(self, rank, size) for rank in range(size)]
        self._memory: dict[Sequence[int], tuple[IO[bytes], int]] = {}
        """By group: memory that not all of its ranks have, and the number of those that have it."""
        self._lock = threading.Lock()

    def memory_of(self, group: Sequence[int]) -> IO[bytes]:
        """A file in memory that these ranks share."""
        with self._lock:
            if group not in self._memory:
                self._memory[group] = os.fdopen(os.memfd_create("ggpipe"), "rb"), 0
            file, n_joined = self._memory.pop(group)
            if n_joined + 1 < len(group):
                self._memory[group] = file, n_joined + 1
            return file


class LocalTransport(Transport):
    """A rank's end of a LocalWorld."""

    sends_from_any_thread = True
    must_poll = False

    def __init__(self, world: LocalWorld, rank: int, size: int) -> None:
        self.rank, self.size, self.host, self.ranks_on_host = rank, size, socket.gethostname(), size
        self.ranks_on_cores: float = size
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

    def join_group(self, ranks: Sequence[int], over_memory: OverMemory[T] | None, over_messages: OverMessages[T]) -> T:
        assert over_memory is not None
        file = self._world.memory_of(tuple(ranks))
        return over_memory(file.fileno(), ranks.index(self.rank), len(ranks))

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._wake = wake

    def close(self, wait_limit_s: float | None, on_all_leaving: Callable[[], None] = lambda: None) -> None:
        on_all_leaving()


class JoinedTransport(Transport):
    """The first rank's transport, with an additional last rank that only the first rank can see."""

    def __init__(self, outer: Transport) -> None:
        """`outer`: the first rank's transport to all other processes."""
        assert outer.rank == HEAD
        self.rank, self.size = HEAD, outer.size + 1
        self.host, self.place, self.ranks_on_host = outer.host, outer.place, outer.ranks_on_host
        self.ranks_on_cores = outer.ranks_on_cores
        self.hosts = (*outer.hosts, outer.host)
        self.sends_from_any_thread, self.must_poll = outer.sends_from_any_thread, outer.must_poll
        self._outer = outer
        world = LocalWorld(self.size)
        self._local = world.transports[HEAD]
        self.inner: LocalTransport = world.transports[outer.size]
        """The further rank's own transport."""
        self.inner.host, self.inner.ranks_on_host = outer.host, outer.ranks_on_host + 1
        self.inner.ranks_on_cores = outer.ranks_on_cores + 1
        self.inner.hosts = self.hosts
        self.inner.place = "the draft model"

    def join_group(self, ranks: Sequence[int], over_memory: OverMemory[T] | None, over_messages: OverMessages[T]) -> T:
        return self._outer.join_group(ranks, over_memory, over_messages)

    def send(self, dest: int, kind: Kind, payload: Payload) -> None:
        (self._local if dest == self.inner.rank else self._outer).send(dest, kind, payload)

    def poll(self) -> Message | None:
        return self._local.poll() or self._outer.poll()

    def flush(self, timeout_s: float) -> bool:
        return self._outer.flush(timeout_s)

    def set_waker(self, wake: Callable[[], None]) -> None:
        self._local.set_waker(wake)
        self._outer.set_waker(wake)

    def close(self, wait_limit_s: float | None, on_all_leaving: Callable[[], None] = lambda: None) -> None:
        self._outer.close(wait_limit_s, on_all_leaving)
