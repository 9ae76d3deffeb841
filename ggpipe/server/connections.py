"""Connections of HTTP: how many there may be, how long each may take, and answers to what is no HTTP."""

from __future__ import annotations

import asyncio
import logging
import sys

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from ggpipe.server.errors import ApiError

_LOG = logging.getLogger("ggpipe.server")
_STATUS_PHRASES = {400: b"Bad Request", 408: b"Request Timeout", 431: b"Request Header Fields Too Large"}


class Connection(H11Protocol):
    """A client's connection. See `protocol`."""

    most_connections: int
    limit_s: float

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self.app_state = {**self.app_state, "abort": transport.abort}
        self._timer: asyncio.TimerHandle | None = None
        self.waits_since = self.loop.time()
        """Since when it is the client's turn."""
        self._watch()
        # asyncio closes one that is aborted only after it has accepted further ones.
        opened = [c for c in self.connections if isinstance(c, Connection) and not c.transport.is_closing()]
        if len(opened) > self.most_connections:
            others = [connection for connection in opened if connection is not self and not connection.is_served]
            oldest = min(others or [self], key=lambda connection: connection.waits_since)
            _LOG.warning("more than %d connections: one without a request is closed", self.most_connections)
            oldest.transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        if self._timer is not None:
            self._timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._watch()

    def on_response_complete(self) -> None:
        self.waits_since = self.loop.time()
        super().on_response_complete()
        self._watch()

    @property
    def is_served(self) -> bool:
        """A request is here, whole, and its answer is not written yet."""
        return self._is_asking and not self.cycle.more_body

    @property
    def _is_asking(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete and not self.cycle.disconnected

    def _watch(self) -> None:
        """Time runs from when it is the client's turn until the next request's head is here, and its answer taken."""
        if self._is_asking:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None
        elif self._timer is None:
            self._timer = self.loop.call_later(self.limit_s, self._is_late)

    def _is_late(self) -> None:
        if self.transport.get_write_buffer_size():
            _LOG.warning("a client did not take its answer in %g s: the connection is closed", self.limit_s)
            self.transport.abort()
        elif self.conn.trailing_data[0]:
            self._refuse(ApiError(408, f"the head of the request did not come within {self.limit_s:g} s"))
        else:
            self.transport.close()

    def send_400_response(self, msg: str) -> None:
        """What came is no HTTP."""
        error = sys.exc_info()[1]
        status = error.error_status_hint if isinstance(error, h11.RemoteProtocolError) else 400
        why = f": {error}" if error is not None else ""
        self._refuse(ApiError(status if status in _STATUS_PHRASES else 400, f"this is no HTTP{why}"))

    def _refuse(self, error: ApiError) -> None:
        """Answer, where no answer has begun, and close."""
        if self._is_asking:  # what answers it finds that the client has left
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.conn.our_state in (h11.IDLE, h11.SEND_RESPONSE):
            body = error.response().body
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            headers.append((b"content-length", b"%d" % len(body)))
            response = h11.Response(status_code=error.status, headers=headers, reason=_STATUS_PHRASES[error.status])
            for event in (response, h11.Data(data=bytes(body)), h11.EndOfMessage()):
                self.transport.write(self.conn.send(event) or b"")
        self.transport.close()


def protocol(most_connections: int, limit_s: float) -> type[asyncio.Protocol]:
    """Of connections, of which there are at most so many: one more takes the place of one whose client was silent for
    longest. A client has so many seconds for the head of a request, and for taking the end of an answer."""
    return type("Limited", (Connection,), {"most_connections": most_connections, "limit_s": limit_s})
