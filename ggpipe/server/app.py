"""The endpoints."""

from __future__ import annotations

import asyncio
import logging
import time
import traceback
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import prometheus_client
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from ggpipe.chat.reasoning import ReasoningFormat
from ggpipe.errors import GgpipeError
from ggpipe.options.chat import Chat
from ggpipe.options.server import ServerConfig
from ggpipe.server import metrics
from ggpipe.server.backend import Backend, Status
from ggpipe.server.bodies import (
    ChatBody,
    CompletionBody,
    DetokenizeBody,
    GenerationBody,
    NativeBody,
    TokenizeBody,
    decode,
)
from ggpipe.server.errors import ApiError
from ggpipe.server.json import JsonResponse
from ggpipe.server.keys import Keys
from ggpipe.server.openai import BUILD, ChatReply, CompletionReply, NativeReply, Reply, draws, with_names
from ggpipe.server.stream import ClientLeft, EventStream, note, whole

_LOG = logging.getLogger("ggpipe.server")
_CLIENT_LEFT = 499
"""As nginx notes it; nobody reads this answer."""

B = TypeVar("B", bound=msgspec.Struct)
Endpoint = Callable[[Request], Awaitable[Response]]
Prompts = Sequence[tuple[tuple[int, ...], ReasoningFormat | None]]


@dataclass(frozen=True, kw_only=True)
class Server:
    """What all endpoints share."""

    backend: Backend
    config: ServerConfig
    chat: Chat
    model: str
    """What clients call it."""
    path: str
    """Its file."""

    # Texts

    async def chat_completions(self, request: Request) -> Response:
        """`/v1/chat/completions`"""
        body = await self._body(request, ChatBody)
        body.check()
        prompt = await self.backend.tokenize_chat(self._conversation(body))
        splits = (body.reasoning_format or self.config.reasoning_format) != "none"
        return await self._answer(request, body, [(prompt.tokens, prompt.reasoning)], ChatReply(self.model, splits))

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`"""
        body = await self._body(request, CompletionBody)
        body.check()
        if body.echo:
            raise ApiError(400, "`echo`: this server does not repeat prompts; leave it out", "echo")
        prompts: list[tuple[tuple[int, ...], ReasoningFormat | None]] = []
        for prompt in body.prompts:
            tokens = await self.backend.tokenize(prompt) if isinstance(prompt, str) else tuple(prompt)
            prompts.append((tokens, None))
        return await self._answer(request, body, prompts, CompletionReply(self.model, splits=False))

    async def completion(self, request: Request) -> Response:
        """`/completion`"""
        body = await self._body(request, NativeBody)
        body.check()
        if body.n_choices != 1:
            raise ApiError(400, "`n` must be 1 here: /v1/completions writes several texts", "n")
        tokens = await self.backend.tokenize(body.prompt) if isinstance(body.prompt, str) else tuple(body.prompt)
        reply = NativeReply(self.model, bool(body.post_sampling_probs))
        return await self._answer(request, body, [(tokens, None)], reply)

    async def _answer(self, request: Request, body: GenerationBody, prompts: Prompts, reply: Reply) -> Response:
        backend = self.backend
        sampling = draws(backend.sampling(body.sampling), body.n_choices)
        n_predict = body.most_tokens(backend.n_predict)
        generations = backend.begin(prompts, sampling, n_predict, body.cache_prompt is not False)
        if body.stream:
            events = reply.stream(generations, body.includes_usage)
            ping_s = max(self.config.sse_ping_interval_s, 0.0)
            return EventStream(backend, generations, events, ping_s, self.config.timeout_s)
        await whole(request, backend, generations)
        return JsonResponse(await reply.whole(generations))

    def _conversation(self, body: ChatBody) -> Any:
        try:
            found = self.chat.of_messages(body.conversation(), body.tools or ())
        except GgpipeError as e:
            raise ApiError.of(e) from e
        return with_names(found, body.chat_template_kwargs)

    # Prompts

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`"""
        body = await self._body(request, TokenizeBody)
        tokens: Sequence[int] = await self.backend.tokenize(body.content)
        if not body.add_special:
            begun = await self.backend.tokenize("")
            tokens = tokens[len(begun) :] if tuple(tokens[: len(begun)]) == begun else tokens
        if not body.with_pieces:
            return JsonResponse({"tokens": tokens})
        pieces = await self.backend.detokenize(tokens)
        return JsonResponse(
            {"tokens": [{"id": token, "piece": _piece(piece)} for token, piece in zip(tokens, pieces, strict=True)]}
        )

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`"""
        body = await self._body(request, DetokenizeBody)
        pieces = await self.backend.detokenize(body.tokens)
        return JsonResponse({"content": b"".join(pieces).decode("utf-8", "replace")})

    async def apply_template(self, request: Request) -> Response:
        """`/apply-template`"""
        body = await self._body(request, ChatBody)
        prompt = await self.backend.tokenize_chat(self._conversation(body))
        return JsonResponse({"prompt": prompt.text, "tokens": prompt.tokens, "reasoning": prompt.reasoning})

    # The server

    async def health(self, _: Request) -> Response:
        """`/health`"""
        status = self.backend.status
        if status is Status.OK:
            return JsonResponse({"status": status.value})
        what = {
            Status.LOADING: "Loading model",
            Status.RESTARTING: "Starting the ranks again",
            Status.STOPPING: "About to end",
        }
        answer = {"status": status.value, **ApiError(503, what[status]).body}
        if status is not Status.STOPPING:
            answer["progress"] = self.backend.progress
        return JsonResponse(answer, 503)

    async def models(self, _: Request) -> Response:
        """`/v1/models`"""
        about = {"n_ctx": self.backend.n_ctx}
        model = {
            "id": self.model, "object": "model", "created": int(self.backend.began), "owned_by": "ggpipe",
            "meta": about,
        }  # fmt: skip
        return JsonResponse({"object": "list", "data": [model]})

    async def props(self, _: Request) -> Response:
        """`/props`"""
        self.backend.check()
        sampling = self.backend.sampling(lambda usual: usual)
        params = {name: value for name, value in vars(sampling).items() if name not in ("temp", "logit_bias")}
        return JsonResponse(
            {
                "default_generation_settings": {
                    "n_ctx": self.backend.n_ctx,
                    "params": {**params, "temperature": sampling.temp, "n_predict": self.backend.n_predict},
                },
                "total_slots": self.backend.n_slots,
                "model_alias": self.model,
                "model_path": self.path,
                "modalities": {"vision": False, "audio": False},
                "build_info": BUILD,
            }
        )

    async def metrics(self, _: Request) -> Response:
        """`/metrics`"""
        if not self.config.metrics:
            raise ApiError(501, "This server does not support metrics endpoint. Start it with `--metrics`")
        text = prometheus_client.generate_latest(metrics.registry(self.backend))
        return Response(text, media_type=prometheus_client.CONTENT_TYPE_LATEST)

    async def embeddings(self, _: Request) -> Response:
        """`/v1/embeddings`"""
        raise ApiError(501, "This server does not support embeddings: its model is loaded to write texts")

    # Bodies

    async def _body(self, request: Request, kind: type[B]) -> B:
        """Raises ApiError while no requests are taken, and for a body that is none of this kind."""
        self.backend.check()
        most = self.config.max_body_mib * 2**20
        data = bytearray()
        try:
            async with asyncio.timeout(self.config.timeout_s):
                async for part in request.stream():
                    data += part
                    if len(data) > most:
                        raise ApiError(413, f"the body has more than {self.config.max_body_mib} MiB")
        except TimeoutError:
            raise ApiError(408, f"the body did not come within {self.config.timeout_s:g} s") from None
        return decode(kind, bytes(data))


def application(server: Server, keys: Sequence[str]) -> Starlette:
    """All endpoints, for an ASGI server."""
    gets: dict[str, Endpoint] = {
        "/health": server.health,
        "/v1/health": server.health,
        "/v1/models": server.models,
        "/models": server.models,
        "/props": server.props,
        "/metrics": server.metrics,
    }
    posts: dict[str, Endpoint] = {
        "/v1/chat/completions": server.chat_completions,
        "/chat/completions": server.chat_completions,
        "/v1/completions": server.completions,
        "/completion": server.completion,
        "/v1/embeddings": server.embeddings,
        "/embeddings": server.embeddings,
        "/tokenize": server.tokenize,
        "/detokenize": server.detokenize,
        "/apply-template": server.apply_template,
    }
    routes = [Route(path, _logged(endpoint), methods=["GET"]) for path, endpoint in gets.items()]
    routes += [Route(path, _logged(endpoint), methods=["POST"]) for path, endpoint in posts.items()]
    return Starlette(
        routes=routes,
        middleware=[Middleware(Keys, keys=keys)] if keys else [],
        exception_handlers={HTTPException: _http_error, Exception: _broken},
    )


def _logged(endpoint: Endpoint) -> Endpoint:
    """One line for each request, and errors as answers."""

    async def answer(request: Request) -> Response:
        began = time.monotonic()
        try:
            response = await endpoint(request)
        except ApiError as e:
            response = e.response()
        except (ClientLeft, ClientDisconnect):
            response = Response(status_code=_CLIENT_LEFT)
        if not isinstance(response, EventStream):  # which notes its end
            note(request.method, request.url.path, response.status_code, began)
        return response

    return answer


async def _http_error(_: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    response = ApiError(error.status_code, error.detail).response()
    response.headers.update(error.headers or {})
    return response


async def _broken(request: Request, error: Exception) -> Response:
    frame = traceback.extract_tb(error.__traceback__)[-1]
    _LOG.error("%s: a bug: %r at %s:%s", request.url.path, error, frame.filename, frame.lineno)
    return ApiError(500, f"the server broke: {type(error).__name__}").response()


def _piece(piece: bytes) -> str | list[int]:
    """A token's text; bytes where it is a part of a character."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
