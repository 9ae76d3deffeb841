"""A prefix of all paths, for a server that shares its name with others behind a proxy."""

from __future__ import annotations

from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ggpipe.server.errors import ApiError


class PathPrefix:
    """Takes the prefix off paths, for all that comes after it and for the log; there is nothing at other paths."""

    def __init__(self, app: ASGIApp, prefix: str) -> None:
        self._app = app
        self._prefix = prefix

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        path: str = scope["path"]
        if path.startswith(f"{self._prefix}/"):
            scope["path"] = path.removeprefix(self._prefix)
            await self._app(scope, receive, send)
        elif path == self._prefix:
            await Response(status_code=308, headers={"Location": f"{self._prefix}/"})(scope, receive, send)
        else:
            await ApiError(404, "Not Found").response(path)(scope, receive, send)
