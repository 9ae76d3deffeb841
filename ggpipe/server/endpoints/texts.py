"""Endpoints that write texts: OpenAI's, Anthropic's and llama-server's."""

from __future__ import annotations

from msgspec.structs import replace
from starlette.requests import Request
from starlette.responses import Response

from ggpipe.apis.answers import draws
from ggpipe.apis.bodies import BodyPrompt, ChatBody, CompletionBody, GenerationBody, Mixed
from ggpipe.apis.llama_server import NativeBody
from ggpipe.apis.message_writer import MessageWriter
from ggpipe.apis.messages import MessagesBody
from ggpipe.apis.response_writer import ResponseWriter
from ggpipe.apis.responses import ResponsesBody
from ggpipe.core.prompt import Conversation, RequestPrompt, as_prompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import UsageError
from ggpipe.server.endpoints.shared import Server
from ggpipe.server.errors import ApiError
from ggpipe.server.json import JsonResponse
from ggpipe.server.keys import user_of
from ggpipe.server.log import note_texts
from ggpipe.server.replies.named_events import MessagesReply, ResponsesReply
from ggpipe.server.replies.native import NativeReply
from ggpipe.server.replies.openai import ChatReply, CompletionReply, Reply
from ggpipe.server.replies.stream import EventStream, whole


class Texts:
    """See the module's text."""

    def __init__(self, server: Server) -> None:
        self._server = server

    async def chat_completions(self, request: Request) -> Response:
        """`/v1/chat/completions`"""
        body = await self._server.body(request, ChatBody)
        reply = ChatReply(self._server.model, self._splits(body), body.n_best_probs)
        return await self._answer(request, body, reply)

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`"""
        body = await self._server.body(request, CompletionBody)
        return await self._answer(request, body, CompletionReply(self._server.model, body.n_best_probs))

    async def completion(self, request: Request) -> Response:
        """`/completion`"""
        body = await self._server.body(request, NativeBody)
        backend, is_of_draw = self._server.backend, bool(body.post_sampling_probs)
        fields = body.response_fields or ()
        reply = NativeReply(self._server.model, is_of_draw, backend.slots.slot_of, backend.stop_string, fields)
        return await self._answer(request, body, reply)

    async def responses(self, request: Request) -> Response:
        """`/v1/responses`"""
        body = await self._server.body(request, ResponsesBody)
        return await self._answer(
            request, body, ResponsesReply(ResponseWriter(body, self._server.model), self._splits(body))
        )

    async def messages(self, request: Request) -> Response:
        """`/v1/messages`"""
        body = await self._server.body(request, MessagesBody)
        writer = MessageWriter(self._server.model)
        reply = MessagesReply(writer, self._splits(body), self._server.backend.stop_string)
        return await self._answer(request, body, reply)

    def _splits(self, body: ChatBody | ResponsesBody | MessagesBody) -> bool:
        """Reasoning is told apart."""
        return (body.reasoning_format or self._server.config.reasoning_format) != "none"

    async def _answer(self, request: Request, body: GenerationBody, reply: Reply) -> Response:
        backend = self._server.backend
        body.check()
        slot = -1 if body.id_slot is None else body.id_slot
        if not -1 <= slot < backend.n_slots:
            raise ApiError(400, f"`id_slot` must be -1 (any) or a number from 0 to {backend.n_slots - 1}", "id_slot")
        sampling = draws(backend.sampling(body.sampling), body.n_choices)
        usual = RequestSpec(
            prompt=b"", n_predict=body.most_tokens(backend.n_predict), speculation=backend.speculation,
            cache_prompt=body.cache_prompt is not False, user=user_of(request),
        )  # fmt: skip
        prompts = [self._prompt(prompt) for prompt in body.prompts]
        specs = [replace(usual, prompt=prompt, sampling=drawn) for prompt in prompts for drawn in sampling]
        generations = await backend.begin(specs, body.n_choices, slot)
        note_texts(request.scope, generations)
        if body.stream:
            config, own_s = self._server.config, body.sse_ping_interval
            ping_s = max(config.sse_ping_interval_s if own_s is None else own_s, 0.0)
            events = reply.stream(generations, body)
            return EventStream(backend, generations, events, reply.failure, ping_s, config.client_limit_s)
        await whole(request, backend, generations)
        return JsonResponse(await reply.whole(generations))

    def _prompt(self, prompt: BodyPrompt) -> RequestPrompt:
        """As the engine takes it. Raises ApiError."""
        try:
            match prompt:
                case Conversation():
                    return self._server.chat.completed(prompt)
                case Mixed(parts):
                    return as_prompt(parts)
            return as_prompt(prompt)
        except UsageError as e:
            raise ApiError.of(e) from e
