"""Bodies of requests while they arrive: how large one may be, and all of them together."""

from __future__ import annotations

import asyncio
import zlib

from starlette.requests import Request

from ggpipe.server.errors import ApiError

_WINDOWS = {"gzip": 31, "x-gzip": 31, "deflate": 15}  # as zlib takes them
_BODIES = 4  # of full size, that may arrive at the same time


class BodyReader:
    """Belongs to the event loop."""

    def __init__(self, most_mib: int, limit_s: float) -> None:
        """`most_mib`: of one body. `limit_s`: how long a client may take to send one."""
        self._most_mib = most_mib
        self._limit_s = limit_s
        self._n_bytes = 0
        """Of all that are arriving."""

    async def read(self, request: Request) -> bytes:
        """A whole body. Raises ApiError for one that is too large, comes too slowly or is packed
        in a way that is not known, and where too much arrives."""
        encoding = request.headers.get("content-encoding", "identity").strip().lower()
        if encoding not in (*_WINDOWS, "identity"):
            raise ApiError(415, f"`Content-Encoding` must be gzip or deflate, or left out, got {encoding[:40]}")
        most = self._most_mib * 2**20
        data = bytearray()
        try:
            async with asyncio.timeout(self._limit_s):
                async for part in request.stream():
                    data += part
                    self._n_bytes += len(part)
                    if len(data) > most:
                        raise ApiError(413, f"the body has more than {self._most_mib} MiB")
                    if self._n_bytes > _BODIES * most:
                        raise ApiError(503, "too many large bodies arrive at the same time: try again later")
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self._limit_s:g} s") from None
        finally:
            self._n_bytes -= len(data)
        return bytes(data) if encoding == "identity" else self._unpacked(data, encoding, most)

    def _unpacked(self, data: bytearray, encoding: str, most: int) -> bytes:
        """No more of it than a body may have is ever made."""
        unpacking = zlib.decompressobj(_WINDOWS[encoding])
        try:
            found = unpacking.decompress(data, most + 1)
        except zlib.error as e:
            raise ApiError(400, f"the body is not in {encoding}, as its `Content-Encoding` says: {e}") from None
        if len(found) > most:
            raise ApiError(413, f"the body has more than {self._most_mib} MiB")
        if not unpacking.eof:
            raise ApiError(400, f"the body is cut off: its {encoding} does not end")
        return found
