"""Which web pages may use the server.

Browsers send requests for any page, even to loopback addresses. CORS only prevents the page from reading the answer, so
requests from pages that are not allowed are refused before anything is done for them.
"""

from __future__ import annotations

import ipaddress
from collections.abc import Collection
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from ggpipe.options.server import ALL_ORIGINS, LOCAL_ORIGINS
from ggpipe.server.errors import ApiError

_LOCAL = r"https?://(localhost|([a-z0-9_-]+\.)+localhost|127(\.\d{1,3}){3}|\[::1\])(:\d{1,5})?"


class Origins:
    """Refuses requests from pages whose origin is not allowed, and lets browsers pass answers to the others. This
    server's own pages are always allowed."""

    def __init__(self, app: ASGIApp, allowed: Collection[str], checks_names: bool) -> None:
        """`allowed`: as `ServerConfig.cors_origins`. `checks_names`: accept only addresses and names without a dot as
        `Host`, which excludes pages whose domain was pointed at this machine (DNS rebinding)."""
        named = {origin.lower() for origin in allowed} - {LOCAL_ORIGINS}
        self._cors = CORSMiddleware(
            app,
            allow_origins=named,
            allow_origin_regex=_LOCAL if LOCAL_ORIGINS in allowed else None,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            allow_private_network=True,
            expose_headers=("X-Request-Id", "Retry-After"),
        )
        self._checks_names = checks_names and ALL_ORIGINS not in named
        self._names = {_name(origin.partition("://")[2]) for origin in named}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or (why := self._why_not(Headers(scope=scope))) is None:
            await self._cors(scope, receive, send)
        elif scope["method"] == "OPTIONS":  # the browser's question, which is answered no without headers
            await Response()(scope, receive, send)
        else:
            await ApiError(403, why).response(scope["path"])(scope, receive, send)

    def _why_not(self, headers: Headers) -> str | None:
        host, origin = headers.get("host", "").lower(), headers.get("origin")
        if self._checks_names and not self._is_ours(_name(host)):
            return "This server is not known by the name in `Host`: allow pages of that name with --cors-origins"
        is_own = origin is None or origin.lower().partition("://")[2] == host != ""
        if is_own or self._cors.is_allowed_origin(origin or ""):
            return None
        return "Pages of this `Origin` may not use the server: allow them with --cors-origins"

    def _is_ours(self, name: str | None) -> bool:
        if name is None:
            return False
        if "." not in name or name.endswith(".localhost") or name in self._names:
            return True
        try:
            ipaddress.ip_address(name)
        except ValueError:
            return False
        return True


def _name(host: str) -> str | None:
    """A host without its port; None if it is not valid."""
    try:
        return (urlsplit(f"//{host}").hostname or "").rstrip(".")
    except ValueError:
        return None
