"""Request bodies while they arrive, with limits on their size and time."""

from __future__ import annotations

import asyncio

from starlette.requests import Request

from ggpipe.server.errors import ApiError

_BODIES = 4  # of maximum size, that may arrive at the same time


class BodyReader:
    """Used only in the event loop."""

    def __init__(self, most_mib: int, limit_s: float) -> None:
        """`most_mib`: maximum size of a body. `limit_s`: how long a client may take to send it."""
        self._most_mib = most_mib
        self._limit_s = limit_s
        self._n_bytes = 0
        """Total size of all bodies that are arriving."""

    async def read(self, request: Request) -> bytes:
        """A whole body. Raises ApiError if it is too large, too slow or compressed, or if too many bodies arrive."""
        if request.headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "compressed bodies are not supported: omit `Content-Encoding`")
        most = self._most_mib * 2**20
        data = bytearray()
        try:
            async with asyncio.timeout(self._limit_s):
                async for part in request.stream():
                    data += part
                    self._n_bytes += len(part)
                    if len(data) > most:
                        raise ApiError(413, f"the body is larger than {self._most_mib} MiB")
                    if self._n_bytes > _BODIES * most:
                        raise ApiError(503, "too many large bodies are arriving: try again later")
        except TimeoutError:
            raise ApiError(408, f"the body did not arrive within {self._limit_s:g} s") from None
        finally:
            self._n_bytes -= len(data)
        return bytes(data)
