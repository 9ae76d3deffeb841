"""Endpoints that generate text: OpenAI's, Anthropic's and llama-server's."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from ggpipe.apis.bodies import GenerationBody
from ggpipe.apis.chat import ChatBody, ChatWriter
from ggpipe.apis.completions import CompletionBody, CompletionWriter
from ggpipe.apis.llama_server import NativeBody, NativeWriter
from ggpipe.apis.messages import MessagesBody, MessageWriter
from ggpipe.apis.replies import ChoiceWriter
from ggpipe.apis.responses import ResponsesBody, ResponseWriter
from ggpipe.apis.writer import Writer
from ggpipe.core.request_spec import RequestSpec
from ggpipe.server.endpoints.shared import BUILD, Server
from ggpipe.server.errors import ApiError
from ggpipe.server.json import JsonResponse
from ggpipe.server.keys import user_of
from ggpipe.server.log import note_outputs
from ggpipe.server.reply import Reply
from ggpipe.server.stream import EventStream, whole


class Texts:
    """The endpoints of a server."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._model = server.model

    async def chat_completions(self, request: Request) -> Response:
        """`/v1/chat/completions`"""
        body = await self._server.body(request, ChatBody)
        writer = ChatWriter(body, self._model, self._splits(body), system_fingerprint=BUILD)
        return await self._answer_choices(request, body, writer)

    async def completions(self, request: Request) -> Response:
        """`/v1/completions`"""
        body = await self._server.body(request, CompletionBody)
        return await self._answer_choices(request, body, CompletionWriter(body, self._model, system_fingerprint=BUILD))

    async def completion(self, request: Request) -> Response:
        """`/completion`"""
        body = await self._server.body(request, NativeBody)
        writer = self._native_writer(body, body.response_fields or ())
        return await self._answer(request, body, writer, writer)

    async def responses(self, request: Request) -> Response:
        """`/v1/responses`"""
        body = await self._server.body(request, ResponsesBody)
        return await self._answer(request, body, ResponseWriter(body, self._model, self._splits(body)))

    async def messages(self, request: Request) -> Response:
        """`/v1/messages`"""
        body = await self._server.body(request, MessagesBody)
        return await self._answer(request, body, MessageWriter(self._model, self._splits(body)))

    def _splits(self, body: ChatBody | ResponsesBody | MessagesBody) -> bool:
        """Whether reasoning is separated from the answer."""
        return (body.reasoning_format or self._server.config.reasoning_format) != "none"

    def _native_writer(self, body: GenerationBody, fields: Sequence[str] = ()) -> NativeWriter:
        about = self._server.backend.model
        end_tokens = about.end_tokens if about is not None else ()
        return NativeWriter(body, self._model, self._server.backend.slots.slot_of, fields, end_tokens)

    async def _answer_choices(self, request: Request, body: GenerationBody, writer: ChoiceWriter) -> Response:
        if self._server.verbose if body.verbose is None else body.verbose:
            writer.native = native = self._native_writer(body)
            return await self._answer(request, body, writer, native)
        return await self._answer(request, body, writer)

    async def _answer(
        self, request: Request, body: GenerationBody, writer: Writer, native: NativeWriter | None = None
    ) -> Response:
        """`native`: the writer of llama-server's own reply, which includes the prompt's text."""
        backend = self._server.backend
        if strings := body.biased_strings:
            body.tokenize_biases({one: await backend.tokenize_part(one) for one in strings})
        slot = -1 if body.id_slot is None else body.id_slot
        if not -1 <= slot < backend.n_slots:
            raise ApiError(400, f"`id_slot` must be -1 (any) or a number from 0 to {backend.n_slots - 1}", "id_slot")
        usual = RequestSpec(
            prompt=b"", n_predict=backend.n_predict, speculation=backend.speculation, user=user_of(request)
        )
        specs = body.requests(usual, body.sampling(backend.sampling), self._server.chat.completed)
        generations = await backend.begin(specs, body.n_choices, slot, {"json_schema": body.schema_field})
        note_outputs(request.scope, generations)
        if native is not None and native.shows_prompts:
            native.prompts = await backend.prompt_texts(generations)
        reply = Reply(writer, backend.stop_string)
        if body.stream:
            config, own_s = self._server.config, body.sse_ping_interval
            ping_s = max(config.sse_ping_interval_s if own_s is None else own_s, 0.0)
            events = reply.stream(generations, bool(body.return_progress))
            return EventStream(events, ping_s, backend.answering(generations))
        await whole(request, backend, generations)
        return JsonResponse(await reply.whole(generations))
