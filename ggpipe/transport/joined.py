"""One rank more, in a thread of the first rank's process: for a draft model that has no rank of its own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from ggpipe.transport.base import HEAD, Kind, Message, OverMemory, OverMessages, Payload, Transport
from ggpipe.transport.local import LocalTransport, LocalWorld

T = TypeVar("T")


class JoinedTransport(Transport):
    """The first rank's transport, with a rank behind the others that only the first rank knows of."""

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
