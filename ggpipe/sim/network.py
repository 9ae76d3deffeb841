"""The virtual network: links in use, one message of a machine after the other."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ggpipe.sim.clock import VirtualClock
from ggpipe.sim.virtual_cluster import VirtualCluster


@dataclass(slots=True)
class _Route:
    """A link in use."""

    latency_s: float
    byte_s: float
    host: str | None
    """The machine whose network card sends; None within a machine."""
    last_at: float = 0.0


class Network:
    """Delivers messages between ranks. A machine sends one at a time; from rank to rank, messages stay in order."""

    def __init__(self, clock: VirtualClock, cluster: VirtualCluster) -> None:
        self._clock = clock
        self._cluster = cluster
        self._free_at: dict[str, float] = {}
        """When each machine's network card has sent everything."""
        self._routes: dict[tuple[int, int], _Route] = {}

    def send(self, source: int, target: int, n_bytes: int, arrive: Callable[[], None]) -> None:
        """Call `arrive` when the message has arrived or, within a rank, when the other thread is awake."""
        clock = self._clock
        if source == target:
            clock.after(self._cluster.overheads.hand_s, arrive)
            return
        route = self._routes.get((source, target)) or self._build(source, target)
        sent_at = clock.now + n_bytes * route.byte_s
        if route.host is not None:
            sent_at = max(sent_at, self._free_at.get(route.host, 0.0) + n_bytes * route.byte_s)
            self._free_at[route.host] = sent_at
        route.last_at = max(sent_at + route.latency_s, route.last_at)
        clock.at(route.last_at, arrive)

    def _build(self, source: int, target: int) -> _Route:
        link, (a, b) = self._cluster.link(source, target), map(self._cluster.host, (source, target))
        route = self._routes[source, target] = _Route(link.latency_s, 1 / link.bytes_per_s, a if a != b else None)
        return route
