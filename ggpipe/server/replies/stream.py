"""Answers to clients that may leave: streams of events, and whole ones."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from ggpipe.core.request import Token
from ggpipe.server.backend import Backend, Generation
from ggpipe.server.errors import ApiError
from ggpipe.server.json import dumps
from ggpipe.server.replies.progress import Progress, prefill
from ggpipe.text.chat.answer import AnswerParser
from ggpipe.text.chat.tools.events import AnswerEvent, Text, joined

_LOG = logging.getLogger("ggpipe.server")
_AHEAD = 16
"""Items that may wait of several texts, which are written faster than the client takes them."""


@dataclass(frozen=True)
class OutputUpdate:
    """What has come of a text."""

    generation: Generation
    events: Sequence[AnswerEvent]
    tokens: Sequence[Token]
    is_end: bool = False
    progress: Progress | None = None
    """How far the prompt is computed; nothing else has come yet."""


async def follow(
    generations: Sequence[Generation], splits: bool, shows_progress: bool = False, by_token: bool = False
) -> AsyncGenerator[OutputUpdate, None]:
    """What comes of texts, until all have ended. `splits`: reasoning is told apart. `shows_progress`: how far prompts
    are computed is news, too. `by_token`: tokens that are there together come by themselves all the same. Raises
    ApiError."""
    if len(generations) == 1:
        async for news in _follow(generations[0], splits, shows_progress, by_token):
            yield news
        return
    queue: asyncio.Queue[OutputUpdate | Exception] = asyncio.Queue(_AHEAD)

    async def pump(generation: Generation) -> None:
        try:
            async for news in _follow(generation, splits, shows_progress, by_token):
                await queue.put(news)
        except Exception as e:  # a bug, too: else its end would be waited for
            await queue.put(e)

    tasks = [asyncio.create_task(pump(generation)) for generation in generations]
    n_left = len(tasks)
    try:
        while n_left:
            item = await queue.get()
            if isinstance(item, Exception):
                raise item
            n_left -= item.is_end
            yield item
    finally:
        for task in tasks:
            task.cancel()


async def _follow(
    generation: Generation, splits: bool, shows_progress: bool, by_token: bool
) -> AsyncIterator[OutputUpdate]:
    if shows_progress:
        async with contextlib.aclosing(prefill(generation)) as computed:
            async for progress in computed:
                yield OutputUpdate(generation, (), (), progress=progress)
    marks = generation.feed.marks
    parser = AnswerParser(marks, generation.feed.key, splits) if marks is not None else None
    async for news in generation.news():
        for tokens in ([token] for token in news) if by_token else (news,):
            texts = [token.text if marks is None else marks.text_of(token.id, token.text) for token in tokens]
            text = "".join(texts)
            yield OutputUpdate(generation, joined([Text(text)]) if parser is None else parser.feed(text), tokens)
    rest = generation.feed.rest
    events = [Text(rest)] if parser is None else [*parser.feed(rest), *parser.finish()]
    yield OutputUpdate(generation, joined(events), (), is_end=True)


def event(value: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


_PING = b":\n\n"
"""A comment, which clients skip."""


class EventStream(Response):
    """A stream of events about texts, which are cancelled when the client leaves, or does not take them in time.

    One timer for each stream serves both its pings and its time limit: a timer for each event would take longer than
    all else that sends the event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        backend: Backend,
        generations: Sequence[Generation],
        events: AsyncGenerator[bytes, None],
        failure: Callable[[ApiError], bytes],
        ping_s: float,
        limit_s: float,
    ) -> None:
        """`failure`: the event of an error, which ends the stream. `ping_s`: a comment is sent so often where nothing
        else is; 0: never. `limit_s`: how long the client may take for a part of it."""
        super().__init__(headers={"Cache-Control": "no-store", "X-Accel-Buffering": "no"})
        del self.headers["content-length"]
        self._backend = backend
        self._generations = generations
        self._events = _with_errors(events, failure)
        self._ping_s = ping_s or math.inf
        self._limit_s = limit_s
        self._since = time.monotonic()
        """When sending began or ended last."""
        self._is_sending = False
        self._turn = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        with self._backend.answering(self._generations):
            works = (self._write(send), _left(receive), self._watch(scope, send))
            tasks = [asyncio.create_task(work) for work in works]
            try:
                done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

    async def _write(self, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        async with contextlib.aclosing(self._events):
            async for one in self._events:
                await self._send(send, one)
        await self._send(send, b"", more=False)

    async def _send(self, send: Send, data: bytes, more: bool = True) -> None:
        async with self._turn:
            self._since, self._is_sending = time.monotonic(), True
            await send({"type": "http.response.body", "body": data, "more_body": more})
            self._since, self._is_sending = time.monotonic(), False

    async def _watch(self, scope: Scope, send: Send) -> None:
        """Send pings, and end where the client takes nothing."""
        while True:
            rest_s = self._since + (self._limit_s if self._is_sending else self._ping_s) - time.monotonic()
            if rest_s > 0:
                await asyncio.sleep(min(rest_s, self._limit_s / 4))
            elif self._is_sending:
                _LOG.warning("a client did not take its stream in %g s: the stream is ended", self._limit_s)
                scope["state"]["abort"]()
                return
            else:
                with contextlib.suppress(TimeoutError):
                    async with asyncio.timeout(self._limit_s):
                        await self._send(send, _PING)


async def _with_errors(
    events: AsyncGenerator[bytes, None], failure: Callable[[ApiError], bytes]
) -> AsyncGenerator[bytes, None]:
    """An error ends the stream as its last event."""
    try:
        async with contextlib.aclosing(events):
            async for one in events:
                yield one
    except ApiError as e:
        yield failure(e)


class ClientLeft(Exception):
    """Nobody takes the answer."""


async def whole(request: Request, backend: Backend, generations: Sequence[Generation]) -> None:
    """Wait until all texts have ended. Raises ApiError, ClientLeft."""
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
