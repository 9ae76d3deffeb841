"""A rank's line to the others while a cluster is profiled: what they tell each other, and how fast that is."""

from __future__ import annotations

import collections
import statistics
import time
from collections.abc import Callable, Collection
from typing import Any

from ggpipe.errors import GgpipeError, RankError, RunError
from ggpipe.runtime import startup
from ggpipe.runtime.inbox import Inbox
from ggpipe.runtime.runner import Broke, Loading, Notice
from ggpipe.transport import codec
from ggpipe.transport.base import Kind, Message, Transport

HEAD = 0
"""The rank that says what is measured."""
_TICK_S = 0.1
_SMALL = bytes(512)  # as a result with the best 40 tokens
_LARGE_BYTES = (256 << 10, 4 << 20)
_LARGE_S = 0.3  # a large message may take so long whatever the budget
_PAUSE_S = 2e-3  # a rank that waits for a hop has waited as long as a stage computes
_MOST_TRIPS = 50


class Line:
    """Everything that comes in passes here. Belongs to the main thread.

    A rank that hears a RESULT and did not ask for one answers it at once: that is how links are measured.
    """

    def __init__(self, transport: Transport, attend: Callable[[], None]) -> None:
        """`attend` is called at least every 0.1 s while something is waited for, and raises to give up."""
        self.transport = transport
        self.inbox: Inbox[Notice] = Inbox(transport)
        self.attend = attend
        self._told: collections.deque[dict[str, Any]] = collections.deque()
        self._echo_of: int | None = None

    def tell(self, rank: int, kind: str, /, **fields: Any) -> None:
        """A control message to one rank."""
        self.transport.send(rank, Kind.CONTROL, codec.control_message(kind, **fields))

    def tell_all(self, kind: str, /, **fields: Any) -> None:
        """A control message to all other ranks."""
        for rank in range(self.transport.size):
            if rank != self.transport.rank:
                self.tell(rank, kind, **fields)

    def told(self) -> dict[str, Any]:
        """The next control message."""
        while not self._told:
            self._hear()
        return self._told.popleft()

    def gather(self, kind: str, ranks: Collection[int]) -> list[dict[str, Any]]:
        """A control message of this kind from each of these ranks, in their order."""
        got: dict[int, dict[str, Any]] = {}
        while len(got) < len(ranks):
            content = self.told()
            if content["kind"] != kind or content["rank"] not in ranks:
                raise RunError(f"rank {content.get('rank')} told {content['kind']!r} instead of {kind!r}")
            got[content["rank"]] = content
        return [got[rank] for rank in ranks]

    def notice(self) -> Notice:
        """The next notice of this rank's stage. Raises what the stage, or another rank, failed with."""
        while True:
            heard = self._hear()
            if heard is not None and not isinstance(heard, Message):
                return heard

    def has_told(self, kind: str) -> int:
        """How many control messages of a kind came and were not taken yet."""
        return sum(content["kind"] == kind for content in self._told)

    def forget(self, kind: str) -> None:
        """Take all control messages of a kind."""
        self._told = collections.deque(content for content in self._told if content["kind"] != kind)

    def wait_for_quit(self) -> None:
        """Until the first rank ends it for all. Raises RankError then."""
        while True:
            try:
                self._hear()
            except RankError:
                raise
            except GgpipeError:
                continue

    def measure(self, peer: int, budget_s: float) -> tuple[float, float]:
        """Latency in seconds of a small message to `peer`, and bytes a second of large ones beyond it.

        Both wait as ranks do for a hop (`Inbox`), and had nothing to do for a while before each message. Latency is
        half the median round trip. A large message is answered by a small one.
        """
        start = time.monotonic()
        small = [self._round_trip(peer, _SMALL) for _ in range(2)]  # the first ones find their ways
        small.clear()
        while len(small) < 5 or (len(small) < _MOST_TRIPS and time.monotonic() < start + budget_s / 2):
            small.append(self._round_trip(peer, _SMALL))
        trip_s = statistics.median(small)
        bytes_per_s = 0.0
        for n_bytes in _LARGE_BYTES:
            now, payload = time.monotonic(), bytes(n_bytes)
            if bytes_per_s and n_bytes / bytes_per_s > max(start + budget_s - now, _LARGE_S):
                break
            large = [self._round_trip(peer, payload)]
            while len(large) < 5 and time.monotonic() + large[-1] < start + budget_s:
                large.append(self._round_trip(peer, payload))
            bytes_per_s = n_bytes / max(statistics.median(large) - trip_s, 1e-6)
        return trip_s / 2, bytes_per_s

    def _round_trip(self, peer: int, payload: bytes) -> float:
        time.sleep(_PAUSE_S)
        self._echo_of = peer
        start = time.perf_counter()
        self.transport.send(peer, Kind.RESULT, payload)
        while self._echo_of is not None:
            self._hear()
        return time.perf_counter() - start

    def _hear(self) -> Message | Notice | None:
        """Whatever comes next; None after a tick."""
        event = self.inbox.next(_TICK_S)
        self.attend()
        match event:
            case Broke(error):
                raise error
            case Loading():
                return None
            case Message(source, Kind.RESULT):
                if source == self._echo_of:
                    self._echo_of = None
                else:
                    self.transport.send(source, Kind.RESULT, _SMALL)
            case Message(_, Kind.CONTROL, payload):
                content = codec.read_control(payload)
                if content["kind"] == "failed":
                    raise startup.as_error(content)
                if content["kind"] == "quit":
                    raise RankError("another rank ended the profile")
                self._told.append(content)
        return event
