"""Answers to clients that may leave: streams of events, and whole ones."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

from starlette.requests import Request
from starlette.responses import StreamingResponse
from starlette.types import Message, Receive, Scope, Send

from ggpipe.core.request import Token
from ggpipe.server.backend import Backend, Generation
from ggpipe.server.errors import ApiError
from ggpipe.server.json import dumps
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.answer import AnswerParser
from ggpipe.text.chat.tools.events import AnswerEvent, Text, joined

_AHEAD = 16
"""Items that may wait of several texts, which are written faster than the client takes them."""

Progress = dict[str, int]
"""`total`: tokens of the prompt. `cache`: those that the prefix cache had. `processed`: those that are in the KV cache,
with `cache`. `time_ms`: since the request was taken. The names are llama-server's."""

_POLL_S = 0.2
"""How often figures are read; the ranks send them about as often."""


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
        async with contextlib.aclosing(_prefill(generation)) as computed:
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


async def _prefill(generation: Generation) -> AsyncGenerator[Progress, None]:
    """Until the first token, or the end: each time that more of the prompt is processed."""
    began, n_shown = time.monotonic(), -1
    first = asyncio.ensure_future(generation.feed.wait_async(0))
    try:
        while True:
            progress = _progress(generation.stats, time.monotonic() - began)
            if progress["processed"] > n_shown:
                n_shown = progress["processed"]
                yield progress
            if (await asyncio.wait((first,), timeout=_POLL_S))[0]:
                return
    finally:
        first.cancel()


def _progress(stats: RequestStats, elapsed_s: float) -> Progress:
    """Of a request without a token yet: its runs are those of its prompt."""
    n_cached, n_prompt = stats.counters.cached_tokens, stats.n_prompt
    n_rows = sum(record.n_rows for record in list(stats.runs) if not record.cancelled)
    n_processed = min(n_cached + n_rows, n_prompt)
    return {"total": n_prompt, "cache": n_cached, "processed": n_processed, "time_ms": round(elapsed_s * 1e3)}


def event(value: Any) -> bytes:
    """An event of a stream."""
    return b"data: " + dumps(value) + b"\n\n"


DONE = b"data: [DONE]\n\n"


_PING = b":\n\n"
"""A comment, which clients skip."""


class EventStream(StreamingResponse):
    """Events as they come, with comments where none do for long. It ends when the client leaves.

    One timer serves all pings of a stream: a timer for each event would take longer than all else that sends the event.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: AsyncGenerator[bytes, None],
        ping_s: float = 0.0,
        while_sent: AbstractContextManager[None] | None = None,
    ) -> None:
        """`ping_s`: a comment is sent so often where nothing else is; 0: never. `while_sent`: entered for as long as
        the stream is sent."""
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
        """Send all of it."""

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


async def with_errors(
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
