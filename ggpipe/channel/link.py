"""The channel's transport: frames over TCP, between two processes that share a secret.

The front end listens and starts the ranks. The head takes the address and the secret from its environment, connects,
and sends a greeting: `ggpipe`, the version of the messages, and the secret. A frame is the length of a message in 4
bytes, followed by the message.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import select
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Generic, TypeVar

from ggpipe.channel import messages
from ggpipe.channel.events import Failure, Sendable
from ggpipe.channel.messages import VERSION, FromFrontEnd, FromHead, RanksFailed
from ggpipe.errors import GgpipeError, LaunchError, RunError, UsageError
from ggpipe.launch.environment import CHANNEL_VARIABLES

M = TypeVar("M", FromFrontEnd, FromHead)

MAX_FRAME_BYTES = 64 << 20
_MAGIC, _SECRET_BYTES = b"ggpipe", 32
_GREETING_BYTES = len(_MAGIC) + 2 + _SECRET_BYTES
_GREETING_S = 5.0  # for the greeting of a process that has connected
_CONNECT_S = 20.0
_TICK_S = 0.1
_ADDRESS, _SECRET = CHANNEL_VARIABLES


class Waker:
    """Lets other threads interrupt a wait for messages."""

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._open = True
        self._lock = threading.Lock()

    def wake(self) -> None:
        """Interrupt the wait. May be called from any thread. Several calls without a wait count once."""
        with self._lock:
            if self._open:
                os.eventfd_write(self.fd, 1)

    def take(self) -> bool:
        """Whether `wake` was called since the last `take`."""
        try:
            return os.eventfd_read(self.fd) > 0
        except BlockingIOError:
            return False

    def close(self) -> None:
        """Release the file descriptor. Later calls of `wake` do nothing."""
        with self._lock:
            if self._open:
                self._open = False
                os.close(self.fd)


class ChannelLink(Generic[M]):
    """A connection that receives messages of type M. Any thread may send; only one at a time may receive."""

    def __init__(self, connection: socket.socket, decode: Callable[[bytes], M]) -> None:
        connection.setblocking(False)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        self._connection = connection
        self._decode: Callable[[bytes], M] = decode
        self._received = bytearray()
        self._sending = threading.Lock()
        self.sent_at = time.monotonic()
        """When something was last sent."""

    @property
    def is_local(self) -> bool:
        """Whether the other side is on this machine."""
        return str(self._connection.getpeername()[0]).startswith("127.")

    def send(self, *sent: Sendable, attend: Callable[[], None] = lambda: None) -> bool:
        """Send messages in one piece. Returns False if the other side has disconnected.

        Waits while the other side does not read. `attend` is then called every 0.1 s, and may raise to give up. Raises
        UsageError without sending anything if a message is too large.
        """
        frames = b"".join(map(framed, sent))
        with self._sending:
            return self._send(frames, attend)

    def send_if_free(self, message: Sendable) -> None:
        """Send a message, unless another thread is sending or the other side does not read."""
        if self._sending.acquire(blocking=False):
            try:
                if self._wait(select.POLLOUT, 0):
                    self._send(framed(message), lambda: None)
            finally:
                self._sending.release()

    def _send(self, data: bytes, attend: Callable[[], None]) -> bool:
        self.sent_at = time.monotonic()
        rest = memoryview(data)
        while rest:
            try:
                rest = rest[self._connection.send(rest) :]
            except BlockingIOError:
                if not self._wait(select.POLLOUT, _TICK_S):
                    attend()
            except OSError:
                return False
        return True

    def receive(self, timeout_s: float, waker: Waker | None = None) -> list[M] | None:
        """Messages that have arrived. Empty after `timeout_s` seconds or when woken; None if the other side has
        disconnected. Raises RunError for invalid messages.
        """
        found = self._take()
        deadline = time.monotonic() + timeout_s
        while not found:
            if not self._wait(select.POLLIN, max(deadline - time.monotonic(), 0.0), waker):
                break
            if waker is not None and waker.take():
                break
            try:
                data = self._connection.recv(1 << 18)
            except BlockingIOError:
                continue
            except OSError:
                return None
            if not data:
                return None
            self._received += data
            found = self._take()
        return found

    def _wait(self, events: int, timeout_s: float, waker: Waker | None = None) -> bool:
        """Wait until the connection is readable or writable."""
        poll = select.poll()
        poll.register(self._connection, events)
        if waker is not None:
            poll.register(waker.fd, select.POLLIN)
        return bool(poll.poll(timeout_s * 1000))

    def _take(self) -> list[M]:
        """Decode all complete frames."""
        found, at = [], 0
        while len(self._received) - at >= 4:
            n = int.from_bytes(self._received[at : at + 4], "little")
            if n > MAX_FRAME_BYTES:
                raise RunError(f"received a message of {n} bytes, the maximum is {MAX_FRAME_BYTES}")
            if len(self._received) - at - 4 < n:
                break
            found.append(self._decode(bytes(self._received[at + 4 : at + 4 + n])))
            at += 4 + n
        del self._received[:at]
        return found

    def end(self) -> None:
        """Disconnect after everything that was sent. A thread that is receiving here returns."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Disconnect and release the socket, which no thread may be using. A second call does nothing."""
        self.end()
        self._connection.close()


def framed(message: Sendable) -> bytes:
    """A message as a frame. Raises UsageError if it is too large."""
    data = messages.encode(message)
    if len(data) > MAX_FRAME_BYTES:
        raise UsageError(f"the request takes {len(data)} bytes, the maximum is {MAX_FRAME_BYTES}: shorten it")
    return len(data).to_bytes(4, "little") + data


# The front end's side


@dataclass
class _Pending:
    """A process that has connected but not sent its greeting."""

    connection: socket.socket
    place: str
    deadline: float
    greeting: bytes = b""


class Listener:
    """Waits for the head. A context manager that listens until its end."""

    def __init__(self, first_host: str | None = None, on_line: Callable[[str], None] = lambda _: None) -> None:
        """`first_host`: the machine of the first rank; None: this one. `on_line` gets a line about each refused
        connection. Raises LaunchError if no port is available."""
        self.n_cut = 0
        """Connections that ended before their greeting was complete."""
        self._on_line = on_line
        self._secret = secrets.token_bytes(_SECRET_BYTES)
        self._pending: list[_Pending] = []
        address = "127.0.0.1" if first_host is None else address_for(first_host)
        try:
            self._socket = socket.create_server((address, 0))
        except OSError as e:
            raise LaunchError(f"cannot listen on {address} for the first rank: {e.strerror or e}") from e
        self._socket.setblocking(False)
        self._address = "{}:{}".format(*self._socket.getsockname())

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables for the ranks. They contain the secret, so they must not be on a command line."""
        return {_ADDRESS: self._address, _SECRET: self._secret.hex()}

    def accept(self, timeout_s: float) -> ChannelLink[FromHead] | None:
        """The link to the process that knows the secret; None if it did not connect within `timeout_s` seconds.

        Raises LaunchError if that process has another version.
        """
        poll = select.poll()  # not select, which is limited to files below 1024
        for one in (self._socket, *(pending.connection for pending in self._pending)):
            poll.register(one, select.POLLIN)
        ready = {file for file, _ in poll.poll(timeout_s * 1000)}
        for pending in [pending for pending in self._pending if pending.connection.fileno() in ready]:
            try:
                data = pending.connection.recv(_GREETING_BYTES - len(pending.greeting))
            except OSError:
                data = b""
            pending.greeting += data
            if not data:
                self.n_cut += 1
                is_rank = pending.greeting.startswith(_MAGIC)  # the ranks' failure is reported elsewhere
                self._drop(pending, None if is_rank else "it did not send this job's secret")
            elif len(pending.greeting) == _GREETING_BYTES and (link := self._greeted(pending)) is not None:
                return link
        for pending in [pending for pending in self._pending if time.monotonic() > pending.deadline]:
            self._drop(pending, "it did not send this job's secret")
        if self._socket.fileno() in ready:
            with contextlib.suppress(OSError):  # it has disconnected
                connection, (host, *_) = self._socket.accept()
                connection.setblocking(False)
                self._pending.append(_Pending(connection, host, time.monotonic() + _GREETING_S))
        return None

    def _greeted(self, pending: _Pending) -> ChannelLink[FromHead] | None:
        greeting = pending.greeting
        if not secrets.compare_digest(greeting[-_SECRET_BYTES:], self._secret) or not greeting.startswith(_MAGIC):
            self._drop(pending, "it sent a wrong secret")
            return None
        version = int.from_bytes(greeting[len(_MAGIC) : len(_MAGIC) + 2], "little")
        if version != VERSION:
            self._drop(pending, None)
            raise LaunchError(
                f"the first rank ({pending.place}) uses version {version} of the channel, this ggpipe uses "
                f"version {VERSION}: install the same ggpipe everywhere"
            )
        self._pending.remove(pending)
        return ChannelLink(pending.connection, messages.from_head)

    def _drop(self, pending: _Pending, why: str | None) -> None:
        self._pending.remove(pending)
        pending.connection.close()
        if why is not None:
            self._on_line(f"warning: a connection from {pending.place} was refused: {why}")

    def close(self) -> None:
        """Stop listening."""
        self._socket.close()
        for pending in self._pending:
            pending.connection.close()

    def __enter__(self) -> Listener:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def address_for(host: str) -> str:
    """An address of this machine that the host can reach; loopback if it is this machine."""
    loopback = "127.0.0.1"
    for target in (host, "192.0.2.1"):  # the second is reached by the default route
        with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((target, 9))  # sends nothing
            own, other = probe.getsockname()[0], probe.getpeername()[0]
            return loopback if own == other or other.startswith("127.") else str(own)
    return loopback


# The ranks' side


def connect() -> ChannelLink[FromFrontEnd]:
    """The link to the front end, whose address is in the environment. Raises LaunchError if it is unreachable."""
    address, secret = os.environ[_ADDRESS], bytes.fromhex(os.environ[_SECRET])
    host, _, port = address.rpartition(":")
    try:
        connection = socket.create_connection((host, int(port)), timeout=_CONNECT_S)
        connection.sendall(_MAGIC + VERSION.to_bytes(2, "little") + secret)
    except OSError as e:
        raise LaunchError(
            f"{socket.gethostname()} cannot reach the process that started it, at {address} ({e.strerror or e}): "
            "allow TCP connections, or start ggpipe on the first host"
        ) from e
    return ChannelLink(connection, messages.from_front_end)


def report(error: GgpipeError) -> bool:
    """Tell the front end why this rank cannot start. Returns False if it is unreachable."""
    try:
        link = connect()
    except LaunchError:
        return False
    sent = link.send(RanksFailed(Failure.of(error)))
    link.close()
    return sent
