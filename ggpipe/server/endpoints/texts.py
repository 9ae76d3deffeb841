"""Endpoints that write texts: OpenAI's, Anthropic's and llama-server's."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from ggpipe.apis.bodies import GenerationBody
from ggpipe.apis.chat import ChatBody, ChatChoices
from ggpipe.apis.completions import CompletionBody, CompletionChoices
from ggpipe.apis.llama_server import NativeBody, NativeObjects
from ggpipe.apis.messages import MessagesBody, MessageWriter
from ggpipe.apis.responses import ResponsesBody, ResponseWriter
from ggpipe.apis.writer import Writer
from ggpipe.core.request_spec import RequestSpec
from ggpipe.server.endpoints.shared import Server
from ggpipe.server.errors import ApiError
from ggpipe.server.json import JsonResponse
from ggpipe.server.keys import user_of
from ggpipe.server.log import note_texts
from ggpipe.server.replies.named_events import NamedReply
from ggpipe.server.replies.native import NativeReply
from ggpipe.server.replies.openai import BUILD, OpenAIReply, Reply
from ggpipe.server.replies.stream import EventStream, whole, with_errors


class Texts:
    """See the module's text."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def chat_completions(self, request: Request) -> Response:
        """`/v1/chat/completions`"""
        body = await self._server.body(request, ChatBody)
        choices = ChatChoices(self._server.model, body.n_best_probs, system_fingerprint=BUILD)
        return await self._answer(request, body, OpenAIReply(choices, self._splits(body)))

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`"""
        body = await self._server.body(request, CompletionBody)
        choices = CompletionChoices(self._server.model, body.n_best_probs, system_fingerprint=BUILD)
        return await self._answer(request, body, OpenAIReply(choices, splits=False))

    async def completion(self, request: Request) -> Response:
        """`/completion`"""
        body = await self._server.body(request, NativeBody)
        backend, is_of_draw = self._server.backend, bool(body.post_sampling_probs)
        fields = body.response_fields or ()
        objects = NativeObjects(self._server.model, is_of_draw, fields)
        return await self._answer(request, body, NativeReply(objects, backend.slots.slot_of, backend.stop_string))

    async def responses(self, request: Request) -> Response:
        """`/v1/responses`"""
        body = await self._server.body(request, ResponsesBody)
        writer = ResponseWriter(body, self._server.model)
        return await self._answer(request, body, self._named(writer, body))

    async def messages(self, request: Request) -> Response:
        """`/v1/messages`"""
        body = await self._server.body(request, MessagesBody)
        return await self._answer(request, body, self._named(MessageWriter(self._server.model), body))

    def _named(self, writer: Writer, body: ResponsesBody | MessagesBody) -> NamedReply:
        return NamedReply(writer, self._splits(body), self._server.backend.stop_string)

    def _splits(self, body: ChatBody | ResponsesBody | MessagesBody) -> bool:
        """Reasoning is told apart."""
        return (body.reasoning_format or self._server.config.reasoning_format) != "none"

    async def _answer(self, request: Request, body: GenerationBody, reply: Reply) -> Response:
        backend = self._server.backend
        body.check()
        slot = -1 if body.id_slot is None else body.id_slot
        if not -1 <= slot < backend.n_slots:
            raise ApiError(400, f"`id_slot` must be -1 (any) or a number from 0 to {backend.n_slots - 1}", "id_slot")
        usual = RequestSpec(
            prompt=b"", n_predict=backend.n_predict, speculation=backend.speculation, user=user_of(request)
        )
        specs = body.requests(usual, body.sampling(backend.sampling), self._server.chat.completed)
        generations = await backend.begin(specs, body.n_choices, slot)
        note_texts(request.scope, generations)
        if body.stream:
            config, own_s = self._server.config, body.sse_ping_interval
            ping_s = max(config.sse_ping_interval_s if own_s is None else own_s, 0.0)
            events = with_errors(reply.stream(generations, body), reply.failure)
            return EventStream(events, ping_s, backend.answering(generations))
        await whole(request, backend, generations)
        return JsonResponse(await reply.whole(generations))
