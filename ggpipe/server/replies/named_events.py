"""Responses whose streams have events with names: those of `/v1/responses` and of Anthropic's `/v1/messages`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from ggpipe.apis.bodies import GenerationBody
from ggpipe.apis.writer import ApiEvent, Writer
from ggpipe.server.backend import Generation
from ggpipe.server.errors import ApiError
from ggpipe.server.json import dumps
from ggpipe.server.replies.stream import follow


class NamedReply:
    """One output as a stream of events, or as a whole object."""

    def __init__(self, writer: Writer, splits: bool, stop_string: Callable[[Generation], Awaitable[str]]) -> None:
        """`splits`: reasoning is separated from the answer. `stop_string`: the one that ended an output, else empty."""
        self._writer = writer
        self._splits = splits
        self._stop_string = stop_string

    async def stream(self, generations: Sequence[Generation], body: GenerationBody) -> AsyncGenerator[bytes, None]:
        """Events, as the output is generated. Raises ApiError."""
        (own,) = generations
        async for one in self._events(own, bool(body.return_progress)):
            yield _named(one)

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The response, once the output has ended."""
        (own,) = generations
        async for _ in self._events(own, shows_progress=False):
            pass
        return self._writer.whole

    def failure(self, error: ApiError) -> bytes:
        """The events that end a stream which failed."""
        return b"".join(map(_named, self._writer.fail(error)))

    async def _events(self, generation: Generation, shows_progress: bool) -> AsyncGenerator[ApiEvent, None]:
        writer, has_begun = self._writer, False
        async for news in follow([generation], self._splits, shows_progress, by_token=True):
            if not has_begun:
                has_begun = True
                for one in writer.begin(generation.stats):
                    yield one
            if news.progress is not None:
                for one in writer.progress(news.progress):
                    yield one
            for one in writer.add(news.events, news.tokens):
                yield one
            if news.is_end:
                for one in writer.end(generation.stats, await self._stop_string(generation)):
                    yield one


def _named(one: ApiEvent) -> bytes:
    kind: str = one["type"]
    return b"event: " + kind.encode() + b"\ndata: " + dumps(one) + b"\n\n"
