"""API keys: who may use the server."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from ggpipe.server.errors import ApiError

_PUBLIC = ("/health", "/v1/health")


class Keys:
    """Refuses requests without one of the keys, before anything of their bodies is read."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] in _PUBLIC or self._knows(Headers(scope=scope)):
            await self._app(scope, receive, send)
        else:
            await ApiError(401, "Invalid API Key").response()(scope, receive, send)

    def _knows(self, headers: Headers) -> bool:
        """Takes as long for any key: nothing is to be learned of a key from the time."""
        given = (headers.get("authorization") or headers.get("x-api-key") or "").removeprefix("Bearer ")
        return sum([hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]) > 0
