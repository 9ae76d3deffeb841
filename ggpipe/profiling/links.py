"""Measures the latency and throughput of messages between two ranks."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import numpy as np

from ggpipe.transport.base import Kind, Message, Transport
from ggpipe.transport.profile_messages import LinkMeasured

_SMALL = bytes(512)  # as a result with the best 40 tokens
_LARGE_BYTES = (256 << 10, 4 << 20)
_LARGE_S = 0.3  # a large message may take this long whatever the budget
_PAUSE_S = 1e-3
_SWEPT_BYTES = 1 << 25
_MOST_TRIPS = 50
_READS = 3


class LinkTimer:
    """One rank's end of its links: times round trips to other ranks, and answers theirs. Used by the main thread only.

    A round trip is a RESULT message, and a small RESULT message in return.
    """

    def __init__(self, transport: Transport) -> None:
        self._transport = transport
        self._answer_due_from: int | None = None
        self._send_s: list[float] = []
        self._swept = np.ones(_SWEPT_BYTES, np.uint8)

    def on_message(self, message: Message) -> None:
        """Handle the answer to our own message, or answer another rank's message."""
        if message.kind is not Kind.RESULT:
            return
        if message.source == self._answer_due_from:
            self._answer_due_from = None
        else:
            self._transport.send(message.source, Kind.RESULT, _SMALL)
            if len(message.payload) == len(_SMALL):
                self._sweep()

    def measure(self, peer: int, budget_s: float, wait: Callable[[], object]) -> LinkMeasured:
        """Measure latency, throughput, and the cost of sending and receiving, for about `budget_s` seconds.

        `peer`: the other rank. `wait` waits for a message and passes it to `on_message`. Both ranks wait as they do for
        a hop (`Inbox`), and evict their caches before each message. Latency is half the median round trip. A large
        message is answered by a small one, and its throughput excludes the latency. Sending and receiving small
        messages are timed because they keep the main thread from other work.
        """
        start = time.monotonic()
        self._send_s.clear()
        for _ in range(2):  # the first messages open connections
            self._round_trip(peer, _SMALL, wait)
        small: list[float] = []
        while len(small) < 5 or (len(small) < _MOST_TRIPS and time.monotonic() < start + budget_s / 2):
            small.append(self._round_trip(peer, _SMALL, wait))
        trip_s = statistics.median(small)
        bytes_per_s = 0.0
        for n_bytes in _LARGE_BYTES:
            now, payload = time.monotonic(), bytes(n_bytes)
            if bytes_per_s and n_bytes / bytes_per_s > max(start + budget_s - now, _LARGE_S):
                break
            large = [self._round_trip(peer, payload, wait)]
            while len(large) < 5 and time.monotonic() + large[-1] < start + budget_s:
                large.append(self._round_trip(peer, payload, wait))
            # On a busy machine a small message may take longer than a large one: latency is no more than most of that.
            beyond_s = max(statistics.median(large) - trip_s, min(large) - min(small), min(large) / 10)
            bytes_per_s = n_bytes / beyond_s
        waiting_s = min(4 * trip_s, _LARGE_S)
        read_s = statistics.median(self._read_s(peer, waiting_s, wait) for _ in range(_READS))
        return LinkMeasured(trip_s / 2, bytes_per_s, statistics.median(self._send_s), read_s)

    def _round_trip(self, peer: int, payload: bytes, wait: Callable[[], object]) -> float:
        start_s = time.monotonic()
        self._sweep()
        time.sleep(_PAUSE_S + 2 * (time.monotonic() - start_s))  # the peer may be slower at it
        start = self._send(peer, payload)
        while self._answer_due_from is not None:
            wait()
        return time.perf_counter() - start

    def _read_s(self, peer: int, waiting_s: float, wait: Callable[[], object]) -> float:
        """Seconds to receive an answer that has already arrived."""
        self._send(peer, _SMALL)
        time.sleep(waiting_s)
        start = time.perf_counter()
        while self._answer_due_from is not None:
            wait()
        return time.perf_counter() - start

    def _sweep(self) -> None:
        """Evict everything else from the caches, as a stage's weights do before each hop."""
        self._swept.max()

    def _send(self, peer: int, payload: bytes) -> float:
        """Send a message that the peer answers. Returns the time before sending."""
        self._answer_due_from = peer
        start = time.perf_counter()
        self._transport.send(peer, Kind.RESULT, payload)
        if payload is _SMALL:
            self._send_s.append(time.perf_counter() - start)
        return start
