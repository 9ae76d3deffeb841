"""API keys."""

from __future__ import annotations

import hmac
from collections.abc import Sequence

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from ggpipe.server.errors import ApiError

_USER = "user"


class Keys:
    """Refuses requests without a valid key, before their bodies are read."""

    def __init__(self, app: ASGIApp, keys: Sequence[str]) -> None:
        self._app = app
        self._keys = [key.encode() for key in keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if numbers := self._numbers(Headers(scope=scope)):
            if len(self._keys) > 1:
                scope.setdefault("state", {})[_USER] = f"key {numbers[0]}"
            await self._app(scope, receive, send)
        else:
            await ApiError(401, "Invalid API Key").response(scope["path"])(scope, receive, send)

    def _numbers(self, headers: Headers) -> list[int]:
        """Indices of the keys that match. Takes the same time for every key, so that timing reveals nothing."""
        given = (headers.get("authorization") or headers.get("x-api-key") or "").removeprefix("Bearer ")
        are_given = [hmac.compare_digest(given.encode("latin-1"), key) for key in self._keys]
        return [number for number, is_given in enumerate(are_given) if is_given]


def user_of(request: Request) -> str:
    """The user that a request counts for: one of several keys, or else the client's address."""
    user: str | None = request.scope.get("state", {}).get(_USER)
    return user or (request.client.host if request.client is not None else "")
