"""Clients that close their half of the connection after a request, and still read the reply.

On the wire, they look like clients that have left. A reply that comes soon is sent to both, as by llama-server.
"""

from __future__ import annotations

from uvicorn.protocols.http.h11_impl import H11Protocol

_GRACE_S = 1.0


class Protocol(H11Protocol):
    """uvicorn's, which would drop such a connection at once."""

    def eof_received(self) -> bool:  # type: ignore[override]  # asyncio takes what it returns
        """The client sends nothing more. Returns whether the connection stays open."""
        is_encrypted = self.transport.get_extra_info("ssl_object") is not None  # then it cannot stay open
        if is_encrypted or self.cycle is None or self.cycle.response_complete:
            return False
        self.loop.call_later(_GRACE_S, self.transport.close)
        return True
