"""Endpoints that tokenize prompts and conversations, count their tokens, or detokenize."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from ggpipe.apis.chat import ChatBody
from ggpipe.apis.llama_server import DetokenizeBody, TokenizeBody
from ggpipe.apis.messages import CountBody
from ggpipe.apis.responses import ResponsesBody
from ggpipe.server.endpoints.shared import Server
from ggpipe.server.json import JsonResponse

_COUNT = "response.input_tokens"


class Prompts:
    """The endpoints of a server."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def tokenize(self, request: Request) -> Response:
        """`/tokenize`"""
        body = await self._server.body(request, TokenizeBody)
        backend = self._server.backend
        tokenize = backend.tokenize if body.add_special else backend.tokenize_part
        tokens: Sequence[int] = await tokenize(body.content)
        if not body.with_pieces:
            return JsonResponse({"tokens": tokens})
        pieces = await self._server.backend.detokenize(tokens, special=True)
        return JsonResponse(
            {"tokens": [{"id": token, "piece": _piece(piece)} for token, piece in zip(tokens, pieces, strict=True)]}
        )

    async def detokenize(self, request: Request) -> Response:
        """`/detokenize`"""
        body = await self._server.body(request, DetokenizeBody)
        pieces = await self._server.backend.detokenize(body.tokens, special=True)
        return JsonResponse({"content": b"".join(pieces).decode("utf-8", "replace")})

    async def apply_template(self, request: Request) -> Response:
        """`/apply-template`"""
        body = await self._server.body(request, ChatBody)
        (conversation,) = body.prompts
        prompt = await self._server.backend.tokenize_chat(self._server.chat.completed(conversation))
        return JsonResponse({"prompt": prompt.text, **vars(prompt)})

    async def count_tokens(self, request: Request) -> Response:
        """`/v1/messages/count_tokens`"""
        return JsonResponse({"input_tokens": await self._count(request, CountBody)})

    async def chat_input_tokens(self, request: Request) -> Response:
        """`/v1/chat/completions/input_tokens`"""
        return JsonResponse({"object": _COUNT, "input_tokens": await self._count(request, ChatBody)})

    async def response_input_tokens(self, request: Request) -> Response:
        """`/v1/responses/input_tokens`"""
        return JsonResponse({"object": _COUNT, "input_tokens": await self._count(request, ResponsesBody)})

    async def _count(self, request: Request, kind: type[ChatBody | ResponsesBody | CountBody]) -> int:
        """The number of tokens in a body's conversation."""
        (conversation,) = (await self._server.body(request, kind)).prompts
        prompt = await self._server.backend.tokenize_chat(self._server.chat.completed(conversation))
        return len(prompt.tokens)


def _piece(piece: bytes) -> str | list[int]:
    """A token's text, or its bytes if they are not valid UTF-8."""
    try:
        return piece.decode()
    except UnicodeDecodeError:
        return list(piece)
