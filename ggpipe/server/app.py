"""The paths of all endpoints, and the answers to errors."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Awaitable, Callable, Sequence

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route
from starlette.types import ASGIApp, Receive, Scope, Send

from ggpipe.errors import GgpipeError
from ggpipe.server.endpoints.about import About
from ggpipe.server.endpoints.embeddings import Embeddings
from ggpipe.server.endpoints.prompts import Prompts
from ggpipe.server.endpoints.shared import Server
from ggpipe.server.endpoints.texts import Texts
from ggpipe.server.errors import CLIENT_LEFT, ApiError
from ggpipe.server.keys import Keys
from ggpipe.server.live import Live
from ggpipe.server.log import RequestLog
from ggpipe.server.origins import Origins
from ggpipe.server.static import FOLDER_HEADERS, PAGE, PAGE_HEADERS, Files
from ggpipe.server.stream import ClientLeft

_LOG = logging.getLogger("ggpipe.server")

Endpoint = Callable[[Request], Awaitable[Response]]

_UNSUPPORTED = (
    "/infill", "/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/lora-adapters", "/v1/audio/transcriptions",
    "/props",
)  # fmt: skip
"""Paths of llama-server that clients may request."""


def application(server: Server, keys: Sequence[str], is_on_loopback: bool = True) -> Starlette:
    """All endpoints, for an ASGI server. `is_on_loopback`: the server is reachable only from this machine."""
    texts, prompts, about, config = Texts(server), Prompts(server), About(server), server.config
    embeddings = Embeddings(server)
    public: dict[str, Endpoint] = {"/health": about.health, "/v1/health": about.health}
    gets: dict[str, Endpoint] = {
        "/v1/models": about.models,
        "/models": about.models,
        "/v1/models/{name:path}": about.one_model,
        "/props": about.props,
        "/metrics": about.metrics,
        "/live": Live(server.backend, server.model).watch,
        "/slots": about.slots,
    }
    posts: dict[str, Endpoint] = {
        "/v1/chat/completions": texts.chat_completions,
        "/chat/completions": texts.chat_completions,
        "/v1/chat/completions/input_tokens": prompts.chat_input_tokens,
        "/chat/completions/input_tokens": prompts.chat_input_tokens,
        "/v1/completions": texts.completions,
        "/v1/responses": texts.responses,
        "/responses": texts.responses,
        "/v1/responses/input_tokens": prompts.response_input_tokens,
        "/responses/input_tokens": prompts.response_input_tokens,
        "/v1/messages": texts.messages,
        "/v1/messages/count_tokens": prompts.count_tokens,
        "/completion": texts.completion,
        "/completions": texts.completion,
        "/v1/embeddings": embeddings.openai,
        "/embeddings": embeddings.native,
        "/embedding": embeddings.native,
        "/tokenize": prompts.tokenize,
        "/detokenize": prompts.detokenize,
        "/apply-template": prompts.apply_template,
        "/slots/{id_slot}": about.slot_action,
    }
    gets["/lora-adapters"] = about.unsupported
    posts |= dict.fromkeys(_UNSUPPORTED, about.unsupported)
    guard = [Middleware(Keys, keys=keys)] if keys else []
    routes: list[BaseRoute] = [Route(path, endpoint, methods=["GET"]) for path, endpoint in public.items()]
    for method, endpoints in (("GET", gets), ("POST", posts)):
        routes += [Route(path, one, methods=[method], middleware=guard) for path, one in endpoints.items()]
    if config.static_path is not None:
        routes.append(Mount("/", Files(config.static_path, FOLDER_HEADERS, has_indexes=True)))
    elif config.webui:
        page = Files(PAGE, PAGE_HEADERS)
        routes += [Route("/", page.index, methods=["GET"]), Mount("/page", page)]
    paths, allowed = [*public, *gets, *posts, "/"], config.origins(bool(keys))
    middleware = [Middleware(RequestLog, model=server.model, totals=server.backend.totals, paths=paths)]
    if config.api_prefix:
        middleware.append(Middleware(PathPrefix, prefix=config.api_prefix))
    middleware.append(Middleware(Origins, allowed=allowed, checks_names=is_on_loopback and not keys))
    found = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers=dict.fromkeys(
            (ApiError, GgpipeError, HTTPException, ClientLeft, ClientDisconnect, Exception), _error_response
        ),
    )
    found.router.redirect_slashes = False  # which would lead to the host in the client's header
    return found


class PathPrefix:
    """Removes a prefix from all paths, for a server that shares its host name with others behind a proxy.

    The log and the endpoints see paths without the prefix. Other paths are not found.
    """

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


async def _error_response(request: Request, error: Exception) -> Response:
    path = request.url.path
    match error:
        case ApiError():
            return error.response(path)
        case GgpipeError():
            return ApiError.of(error).response(path)
        case ClientLeft() | ClientDisconnect():
            return Response(status_code=CLIENT_LEFT)
        case HTTPException():
            response = ApiError(error.status_code, error.detail).response(path)
            response.headers.update(error.headers or {})
            return response
    frame = traceback.extract_tb(error.__traceback__)[-1]
    _LOG.error("%s: a bug: %r at %s:%s", path, error, frame.filename, frame.lineno)
    return ApiError(500, f"internal error: {type(error).__name__}").response(path)
