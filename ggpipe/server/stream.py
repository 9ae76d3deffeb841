"""Answers to clients that may disconnect: event streams, and waiting for whole outputs."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Sequence
from contextlib import AbstractContextManager

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ggpipe.server.backend import Backend, Generation
from ggpipe.server.errors import ApiError

_PING = b":\n\n"
"""A comment, which clients skip."""


class EventStream(StreamingResponse):
    """Server-sent events, with a comment after each idle interval. It ends when the client disconnects.

    One timer serves all pings of a stream, since a timer per event would take longer than sending the event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        ping_s: float = 0.0,
        while_sent: AbstractContextManager[None] | None = None,
    ) -> None:
        """`ping_s`: idle seconds before a comment; 0: no comments. `while_sent`: entered while the stream is sent."""
        super().__init__(events, headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        self._events = events
        self._ping_s = ping_s
        self._while_sent = contextlib.nullcontext() if while_sent is None else while_sent
        self._sent_s = 0.0
        """When the last part was sent."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._while_sent:
            await super().__call__(scope, receive, send)

    async def stream_response(self, send: Send) -> None:
        """Send all events."""

        async def sending(message: Message) -> None:
            await send(message)
            self._sent_s = time.monotonic()

        pings = asyncio.create_task(self._ping(sending)) if self._ping_s else None
        try:
            async with contextlib.aclosing(self._events):
                await super().stream_response(sending)
        finally:
            if pings is not None:
                pings.cancel()

    async def _ping(self, send: Send) -> None:
        self._sent_s = time.monotonic()
        while True:
            rest_s = self._sent_s + self._ping_s - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(rest_s)
            else:
                await send({"type": "http.response.body", "body": _PING, "more_body": True})


class ClientLeft(Exception):
    """The client has disconnected."""


async def whole(request: Request, backend: Backend, generations: Sequence[Generation]) -> None:
    """Wait until all outputs have ended. Raises ApiError, ClientLeft."""
    with backend.answering(generations):
        left = asyncio.create_task(_left(request.receive))
        ended = asyncio.gather(*(generation.feed.wait_async(None) for generation in generations))
        try:
            await asyncio.wait((left, ended), return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                raise ClientLeft
        finally:
            for waiting in (left, ended):
                waiting.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await waiting
    for generation in generations:
        if generation.feed.error is not None:
            raise ApiError.of(generation.feed.error)


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
