"""The paths of all endpoints, and what is answered where they cannot answer."""

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
from ggpipe.server.prefix import PathPrefix
from ggpipe.server.replies.stream import ClientLeft
from ggpipe.server.static import Folder, Page

_LOG = logging.getLogger("ggpipe.server")

Endpoint = Callable[[Request], Awaitable[Response]]

_NOT_THERE = (
    "/infill", "/rerank", "/reranking", "/v1/rerank", "/v1/reranking", "/lora-adapters", "/v1/audio/transcriptions",
    "/props",
)  # fmt: skip
"""Of llama-server, which clients may ask for."""


def application(server: Server, keys: Sequence[str], is_on_loopback: bool = True) -> Starlette:
    """All endpoints, for an ASGI server. `is_on_loopback`: only this machine reaches it."""
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
    gets["/lora-adapters"] = about.not_there
    posts |= dict.fromkeys(_NOT_THERE, about.not_there)
    guard = [Middleware(Keys, keys=keys)] if keys else []
    routes: list[BaseRoute] = [Route(path, _answering(endpoint), methods=["GET"]) for path, endpoint in public.items()]
    for method, endpoints in (("GET", gets), ("POST", posts)):
        routes += [Route(path, _answering(one), methods=[method], middleware=guard) for path, one in endpoints.items()]
    if config.static_path is not None:
        routes.append(Mount("/", Folder(config.static_path, config.client_limit_s)))
    elif config.webui:
        page = Page()
        routes += [Route(path, page.get, methods=["GET"]) for path in ("/", "/page/{name}")]
    paths, allowed = [*public, *gets, *posts, "/"], config.origins(bool(keys))
    middleware = [Middleware(RequestLog, model=server.model, totals=server.backend.totals, paths=paths)]
    if config.api_prefix:
        middleware.append(Middleware(PathPrefix, prefix=config.api_prefix))
    middleware.append(Middleware(Origins, allowed=allowed, checks_names=is_on_loopback and not keys))
    found = Starlette(
        routes=routes,
        middleware=middleware,
        exception_handlers={HTTPException: _http_error, Exception: _broken},
    )
    found.router.redirect_slashes = False  # to a place that a header of the client names
    return found


def _answering(endpoint: Endpoint) -> Endpoint:
    """Errors as answers."""

    async def answer(request: Request) -> Response:
        try:
            response = await endpoint(request)
        except ApiError as e:
            response = e.response(request.url.path)
        except GgpipeError as e:
            response = ApiError.of(e).response(request.url.path)
        except (ClientLeft, ClientDisconnect):
            response = Response(status_code=CLIENT_LEFT)
        return response

    return answer


async def _http_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = ApiError(error.status_code, error.detail).response(request.url.path)
    response.headers.update(error.headers or {})
    return response


async def _broken(request: Request, error: Exception) -> Response:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    _LOG.error("%s: a bug: %r at %s:%s", request.url.path, error, frame.filename, frame.lineno)
    return ApiError(500, f"the server broke: {type(error).__name__}").response(request.url.path)
