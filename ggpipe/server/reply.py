"""Replies, whole or streamed: what arrives of outputs becomes the objects of an API."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from ggpipe.api.feed import Feed
from ggpipe.apis.writer import ApiEvent, OutputParser, Writer
from ggpipe.core.request import Token
from ggpipe.server.backend import Generation
from ggpipe.server.errors import ApiError
from ggpipe.server.json import dumps
from ggpipe.text.chat.tools.events import AnswerEvent

_AHEAD = 16
"""Updates that may wait for the client, if a reply has several outputs."""

_POLL_S = 0.2
"""How often a prompt's progress is read. The ranks send it about as often."""

Progress = dict[str, int]
"""Tokens of the prompt: `total`, `cache` (found in the prefix cache) and `processed` (including `cache`). `time_ms`:
since the request was accepted. The names are llama-server's."""


@dataclass(frozen=True)
class OutputUpdate:
    """What has arrived of an output."""

    generation: Generation
    events: Sequence[AnswerEvent] = ()
    tokens: Sequence[Token] = ()
    is_end: bool = False
    progress: Progress | None = None
    """How much of the prompt has been processed; before anything else."""


class Reply:
    """One reply to a request."""

    def __init__(self, writer: Writer, stop_string: Callable[[Generation], Awaitable[str]]) -> None:
        """`stop_string`: the string that ended an output; empty if none did."""
        self._writer = writer
        self._stop_string = stop_string

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any] | list[dict[str, Any]]:
        """The reply, once all outputs have ended."""
        return self._writer.whole(generations, [await self._ended_by(one) for one in generations])

    async def stream(
        self, generations: Sequence[Generation], shows_progress: bool = False
    ) -> AsyncGenerator[bytes, None]:
        """Server-sent events, while the outputs are generated. An error becomes the last event. `shows_progress`: also
        of the prompts' processing."""
        begun: set[Generation] = set()
        try:
            async for update in follow(generations, self._writer.splits, shows_progress, self._writer.by_token):
                stop_string = await self._ended_by(update.generation) if update.is_end else ""
                for one in self._events(update, stop_string, is_first=update.generation not in begun):
                    yield self._framed(one)
                begun.add(update.generation)
            for one in self._writer.finish(generations):
                yield self._framed(one)
            if self._writer.ends_with_done:
                yield b"data: [DONE]\n\n"
        except ApiError as e:
            for one in self._writer.fail(e):
                yield self._framed(one)

    async def _ended_by(self, generation: Generation) -> str:
        return await self._stop_string(generation) if self._writer.names_stop_string else ""

    def _events(self, update: OutputUpdate, stop_string: str, is_first: bool) -> Iterator[ApiEvent]:
        writer, output = self._writer, update.generation
        if is_first:
            yield from writer.begin(output)
        if update.progress is not None:
            yield from writer.progress(output, update.progress)
        yield from writer.add(output, update.events, update.tokens)
        if update.is_end:
            yield from writer.end(output, stop_string)

    def _framed(self, one: ApiEvent) -> bytes:
        name = b"event: " + one["type"].encode() + b"\n" if self._writer.has_event_names else b""
        return name + b"data: " + dumps(one) + b"\n\n"


async def follow(
    generations: Sequence[Generation], splits: bool, shows_progress: bool = False, by_token: bool = False
) -> AsyncGenerator[OutputUpdate, None]:
    """Updates of all outputs until they have ended. `splits`: reasoning is separated from the answer.
    `shows_progress`: with the progress of prompts. `by_token`: one update per token, even if several arrive together.
    Raises ApiError."""
    if len(generations) == 1:
        async for update in _follow(generations[0], splits, shows_progress, by_token):
            yield update
        return
    queue: asyncio.Queue[OutputUpdate | Exception] = asyncio.Queue(_AHEAD)

    async def pump(generation: Generation) -> None:
        try:
            async for update in _follow(generation, splits, shows_progress, by_token):
                await queue.put(update)
        except Exception as e:  # bugs as well, or the reader would wait forever
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
) -> AsyncGenerator[OutputUpdate, None]:
    if shows_progress:
        async with contextlib.aclosing(_prefill(generation)) as prefill:
            async for progress in prefill:
                yield OutputUpdate(generation, progress=progress)
    parser = OutputParser(generation, splits)
    async for arrived in generation.arrivals():
        for tokens in ([token] for token in arrived) if by_token else (arrived,):
            yield OutputUpdate(generation, parser.feed(tokens), tokens)
    yield OutputUpdate(generation, parser.finish(generation.rest), is_end=True)


async def _prefill(generation: Generation) -> AsyncGenerator[Progress, None]:
    """The progress of a prompt, until the first token or the end. First what was found in the prefix cache, which is
    certain when a run has ended; last the whole prompt."""
    began, n_shown, feed = time.monotonic(), -1, generation.feed
    first = asyncio.ensure_future(feed.wait_async(0))
    try:
        while True:
            if feed.stats.runs or feed.tokens:
                progress = _progress(feed, time.monotonic() - began)
                if n_shown < 0:
                    yield {**progress, "processed": progress["cache"]}
                if progress["processed"] > max(n_shown, progress["cache"]):
                    yield progress
                n_shown = progress["processed"]
            if first.done():
                return
            await asyncio.wait((first,), timeout=_POLL_S)
    finally:
        first.cancel()


def _progress(feed: Feed, elapsed_s: float) -> Progress:
    """For a request whose runs are all of its prompt, unless it has tokens."""
    stats, n_prompt = feed.stats, len(feed.prompt)
    n_cached = stats.counters.cached_tokens
    n_rows = sum(record.n_rows for record in list(stats.runs) if not record.cancelled)
    n_processed = n_prompt if feed.tokens else min(n_cached + n_rows, n_prompt)
    return {"total": n_prompt, "cache": n_cached, "processed": n_processed, "time_ms": round(elapsed_s * 1e3)}
