"""Requests to `ggpipe serve`, and what it answers."""

from __future__ import annotations

import contextlib
import http.client
import re
import socket
import ssl
import threading
import urllib.parse
from collections.abc import Iterator
from typing import Any, TypeVar

import msgspec

from ggpipe.api.arguments import REQUEST_ROWS
from ggpipe.errors import GgpipeError, RunError, SettingError, UsageError
from ggpipe.openai.sampling import BODY_NAMES

T = TypeVar("T")

_CONNECT_S = 10
"""How long a connection may take."""
_KEEPALIVE = (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3))
"""Seconds until a silent machine is asked whether it is there, seconds between questions, and their number."""
_EVENT = b"data: {"


class _Why(msgspec.Struct):
    message: str


class _Refused(msgspec.Struct):
    """OpenAI's error object."""

    error: _Why


class Address:
    """Where a server is, and the key that it asks for."""

    def __init__(self, address: str, api_key: str | None) -> None:
        """`address`: `http://127.0.0.1:8080`. Raises UsageError for what is none, and for a key that cannot be."""
        url = address if "://" in address else f"http://{address}"
        try:
            parts = urllib.parse.urlsplit(url)
            host, port = parts.hostname, parts.port
        except ValueError:
            host, port = None, None
        if not host or parts.scheme not in ("http", "https") or parts.query or parts.fragment:
            raise UsageError(f"the address of a server must be as in http://127.0.0.1:8080, got {address!r}")
        if api_key is not None and not (api_key.isascii() and api_key.isprintable()):
            raise SettingError("`api_key` must be of letters, digits and signs that are ASCII")
        self._host, self._port = host, port
        self._ssl = ssl.create_default_context() if parts.scheme == "https" else None  # takes as long as an answer
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self._url = f"{parts.scheme}://{parts.netloc.rpartition('@')[2]}{self.path}"
        self.headers = {"Content-Type": "application/json"}
        if api_key is not None:
            self.headers["Authorization"] = f"Bearer {api_key}"

    def __str__(self) -> str:
        return self._url

    def connection(self) -> http.client.HTTPConnection:
        """One that is not open."""
        if self._ssl is not None:
            return http.client.HTTPSConnection(self._host, self._port, timeout=_CONNECT_S, context=self._ssl)
        return http.client.HTTPConnection(self._host, self._port, timeout=_CONNECT_S)

    def decode(self, data: bytes, kind: type[T]) -> T:
        """JSON that the server sent. Raises RunError."""
        try:
            return msgspec.json.decode(data, type=kind)
        except (msgspec.DecodeError, UnicodeError) as e:
            raise RunError(f"{self} does not answer as `ggpipe serve` of this version does: {e}") from None

    def error(self, status: int, data: bytes) -> GgpipeError:
        """What an answer with such a status says."""
        try:
            why = msgspec.json.decode(data, type=_Refused).error.message
        except (msgspec.DecodeError, UnicodeError):
            why = http.client.responses.get(status, f"status {status}")
        if status == 401:
            return SettingError(f"`api_key`: {self} refuses it: {why}")
        if status in (404, 405):
            return UsageError(f"{self} is no `ggpipe serve`: {why}")
        if not 400 <= status < 500:
            return RunError(f"{self}: {why}")
        keywords = {name: keyword for keyword, name in BODY_NAMES.items()}
        why = re.sub(r"`([\w.]+)`", lambda match: f"`{keywords.get(match[1], match[1])}`", why)
        begins = re.match(r"`(\w+)`", why)
        return SettingError(why) if begins is not None and begins[1] in REQUEST_ROWS else UsageError(why)


class Call:
    """Requests that follow each other, each in a connection of its own."""

    def __init__(self, address: Address) -> None:
        self._address = address
        self._lock = threading.Lock()
        self._socket: socket.socket | None = None
        """That of the connection that is open."""
        self.is_aborted = False

    def abort(self) -> None:
        """End it soon; its thread gets an error. May be called from any thread."""
        with self._lock:
            self.is_aborted = True
            if self._socket is not None:
                with contextlib.suppress(OSError):
                    socket.socket.shutdown(self._socket, socket.SHUT_RDWR)  # of HTTPS as well: it wakes the thread

    def ask(self, method: str, path: str, kind: type[T], body: Any = None) -> T:
        """A whole answer. Raises UsageError for mistakes of the request, else RunError."""
        with self._open(method, path, body) as response:
            return self._address.decode(response.read(), kind)

    def events(self, path: str, kind: type[T], body: Any) -> Iterator[T]:
        """The events of an answer, as they come. Raises as `ask`."""
        with self._open("POST", path, body) as response:
            for line in iter(response.readline, b""):
                if line.startswith(b'data: {"error"'):
                    raise self._address.error(self._address.decode(line[6:], _Failed).error.code, line[6:])
                if line.startswith(_EVENT):
                    yield self._address.decode(line[6:], kind)

    @contextlib.contextmanager
    def _open(self, method: str, path: str, body: Any) -> Iterator[http.client.HTTPResponse]:
        address = self._address
        try:
            data = None if body is None else msgspec.json.encode(body)
        except (TypeError, ValueError, OverflowError) as e:  # UnicodeError is a ValueError
            raise UsageError(f"the request cannot be written as JSON: {e}") from None
        try:
            with contextlib.closing(address.connection()) as connection, self._connected(connection):
                connection.request(method, address.path + path, data, address.headers)
                response = connection.getresponse()
                with response:
                    if response.status != 200:
                        raise address.error(response.status, response.read())
                    yield response
        except (OSError, http.client.HTTPException) as e:
            raise RunError(f"the connection to {address} was lost: {_why(e)}") from None

    @contextlib.contextmanager
    def _connected(self, connection: http.client.HTTPConnection) -> Iterator[None]:
        """While it is open. Answers may take as long as they like, while their machine is there."""
        try:
            connection.connect()
        except OSError as e:
            raise RunError(f"cannot connect to {self._address}: {_why(e)}: is `ggpipe serve` there?") from None
        own = connection.sock
        own.settimeout(None)
        own.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for name, value in _KEEPALIVE:
            if hasattr(socket, name):
                own.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), value)
        with self._lock:
            if self.is_aborted:
                raise ConnectionAbortedError("the request was cancelled")
            self._socket = own
        try:
            yield
        finally:
            with self._lock:
                self._socket = None


def _why(error: OSError | http.client.HTTPException) -> str:
    return (error.strerror if isinstance(error, OSError) else None) or str(error) or type(error).__name__


class _Code(msgspec.Struct):
    code: int


class _Failed(msgspec.Struct):
    """An error as an event of a stream."""

    error: _Code
