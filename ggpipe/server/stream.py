"""Answers to clients that may leave: streams of events, and whole ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from dataclasses import dataclass
from typing import Any

from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import SendTimeoutError
from starlette.requests import Request
from starlette.types import Receive, Scope, Send

from ggpipe.chat.reasoning import Piece, ReasoningParser
from ggpipe.core.request import Token
from ggpipe.server.backend import Backend, Generation
from ggpipe.server.errors import ApiError
from ggpipe.server.json import dumps

_LOG = logging.getLogger("ggpipe.server")
_AHEAD = 16
"""Items that may wait of several texts, which are written faster than the client takes them."""


@dataclass(frozen=True)
class News:
    """What has come of a text."""

    generation: Generation
    pieces: Sequence[Piece]
    tokens: Sequence[Token]
    is_end: bool = False


async def follow(generations: Sequence[Generation], splits: bool) -> AsyncGenerator[News, None]:
    """What comes of texts, until all have ended. `splits`: reasoning is told apart. Raises ApiError."""
    if len(generations) == 1:
        async for news in _follow(generations[0], splits):
            yield news
        return
    queue: asyncio.Queue[News | ApiError] = asyncio.Queue(_AHEAD)

    async def pump(generation: Generation) -> None:
        try:
            async for news in _follow(generation, splits):
                await queue.put(news)
        except ApiError as e:
            await queue.put(e)

    tasks = [asyncio.create_task(pump(generation)) for generation in generations]
    n_left = len(tasks)
    try:
        while n_left:
            item = await queue.get()
            if isinstance(item, ApiError):
                raise item
            n_left -= item.is_end
            yield item
    finally:
        for task in tasks:
            task.cancel()


async def _follow(generation: Generation, splits: bool) -> AsyncIterator[News]:
    marks = generation.marks
    parser = ReasoningParser(marks) if marks is not None and splits else None
    async for tokens in generation.news():
        texts = [token.text if marks is None else marks.text_of(token.id, token.text) for token in tokens]
        pieces = [Piece("".join(texts), False)] if parser is None else parser.feed("".join(texts))
        yield News(generation, _joined(pieces), tokens)
    rest = generation.feed.rest
    pieces = [Piece(rest, False)] if parser is None else [*parser.feed(rest), *parser.finish()]
    yield News(generation, _joined(pieces), (), is_end=True)


def _joined(pieces: Sequence[Piece]) -> list[Piece]:
    """Those without text left out, and neighbours of a kind as one."""
    found: list[Piece] = []
    for piece in pieces:
        if found and found[-1].is_reasoning == piece.is_reasoning:
            found[-1] = Piece(found[-1].text + piece.text, piece.is_reasoning)
        elif piece.text:
            found.append(piece)
    return found


def event(value: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


class EventStream(EventSourceResponse):
    """A stream of events about texts, which are cancelled when the client leaves, or does not take them in time."""

    def __init__(
        self,
        backend: Backend,
        generations: Sequence[Generation],
        events: AsyncGenerator[bytes, None],
        ping_s: float,
        timeout_s: float,
    ) -> None:
        """`ping_s`: a comment is sent so often where nothing else is; 0: never."""
        self._began = time.monotonic()
        super().__init__(
            _with_errors(events), ping=ping_s, sep="\n", send_timeout=timeout_s,
            ping_message_factory=lambda: ServerSentEvent(comment="", sep="\n"),
        )  # fmt: skip
        self._backend = backend
        self._generations = generations

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._backend.answering(self._generations):
            try:
                await super().__call__(scope, receive, send)
            except SendTimeoutError:
                _LOG.warning("a client did not take its stream in time: the stream is ended")
            finally:
                note(scope["method"], scope["path"], self.status_code, self._began, self._generations)


def note(method: str, path: str, status: int, began: float, generations: Sequence[Generation] = ()) -> None:
    """A line about a request that was answered. `began`: when, as `time.monotonic`."""
    line = f"{method} {path} {status} {time.monotonic() - began:.3f} s"
    if generations:
        n_prompt = sum(generation.stats.n_prompt for generation in generations)
        line += f", tokens: {n_prompt} + {sum(generation.stats.n_generated for generation in generations)}"
    _LOG.info("%s", line)


async def _with_errors(events: AsyncGenerator[bytes, None]) -> AsyncGenerator[bytes, None]:
    """An error ends the stream as its last event."""
    try:
        async with contextlib.aclosing(events):
            async for one in events:
                yield one
    except ApiError as e:
        yield event(e.body)


class ClientLeft(Exception):
    """Nobody takes the answer."""


async def whole(request: Request, backend: Backend, generations: Sequence[Generation]) -> None:
    """Wait until all texts have ended. Raises ApiError, ClientLeft."""
    with backend.answering(generations):
        left = asyncio.create_task(_left(request))
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


async def _left(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass
