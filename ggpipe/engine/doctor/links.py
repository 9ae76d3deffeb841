"""Measures the links between this machine and others: they connect to it, one at a time.

This also shows whether the ports that the operating system gives to listening programs are open for them.
"""

from __future__ import annotations

import contextlib
import hmac
import secrets
import socket
import statistics
import threading
import time

import msgspec

_ROUNDS = 20
_PING_BYTES = 64
_FIRST_BYTES, _MORE_BYTES = 1 << 18, 1 << 24
_FAST_S = 0.02
"""If the first bytes take less, more are needed for a figure."""
_PATIENCE_S = 5.0


class LinkFacts(msgspec.Struct, frozen=True, kw_only=True):
    """A link between a machine and the one where the doctor runs."""

    round_trip_s: float = 0.0
    """The median."""
    bytes_per_s: float = 0.0
    problem: str = ""


class LinkServer:
    """Answers the machines that measure their links, until closed. A context manager."""

    def __init__(self) -> None:
        """Raises OSError."""
        self.secret = secrets.token_hex(16)
        self._listener = socket.create_server(("", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._serve, name="links", daemon=True).start()

    def __enter__(self) -> LinkServer:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread
        self._listener.close()

    def _serve(self) -> None:
        while True:
            try:
                link, _ = self._listener.accept()
            except OSError:  # closed
                return
            with contextlib.suppress(OSError, ValueError), link:
                link.settimeout(_PATIENCE_S)
                link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if hmac.compare_digest(_received(link, len(self.secret)), self.secret.encode()):
                    self._answer(link)

    @staticmethod
    def _answer(link: socket.socket) -> None:
        for _ in range(_ROUNDS):
            link.sendall(_received(link, _PING_BYTES))
        while size := int.from_bytes(_received(link, 8), "big"):
            if size > _MORE_BYTES:
                return
            _received(link, size)
            link.sendall(b"!")


def measure(address: str, secret: str) -> LinkFacts:
    """Measure the link to a `LinkServer` at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        with socket.create_connection((host, int(port)), _PATIENCE_S) as link:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.sendall(secret.encode())
            times_s = []
            for _ in range(_ROUNDS):
                begun = time.perf_counter()
                link.sendall(bytes(_PING_BYTES))
                _received(link, _PING_BYTES)
                times_s.append(time.perf_counter() - begun)
            link.settimeout(2 * _PATIENCE_S)
            seconds, size = _sent(link, _FIRST_BYTES), _FIRST_BYTES
            if seconds < _FAST_S:
                seconds, size = _sent(link, _MORE_BYTES), _MORE_BYTES
            link.sendall(bytes(8))
            return LinkFacts(round_trip_s=statistics.median(times_s), bytes_per_s=size / max(seconds, 1e-9))
    except OSError as e:
        return LinkFacts(problem=f"cannot connect to {host} ({e.strerror or e})")


def _sent(link: socket.socket, size: int) -> float:
    begun = time.perf_counter()
    link.sendall(size.to_bytes(8, "big"))
    link.sendall(bytes(size))
    _received(link, 1)
    return time.perf_counter() - begun


def _received(link: socket.socket, size: int) -> bytes:
    """Exactly `size` bytes. Raises ConnectionError if the connection ends before."""
    data = bytearray()
    while len(data) < size:
        more = link.recv(min(size - len(data), 1 << 20))
        if not more:
            raise ConnectionError("the connection ended")
        data += more
    return bytes(data)
