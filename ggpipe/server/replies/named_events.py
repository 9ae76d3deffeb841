"""Answers whose streams have events with names: those of `/v1/responses` and of Anthropic's `/v1/messages`."""

from __future__ import annotations

import abc
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Sequence
from typing import Any

from ggpipe.apis.bodies import GenerationBody
from ggpipe.apis.message_writer import MessageWriter
from ggpipe.apis.response_writer import ResponseWriter
from ggpipe.apis.writer import ApiEvent, Writer, Writing
from ggpipe.server.backend import Generation
from ggpipe.server.errors import ApiError
from ggpipe.server.json import dumps
from ggpipe.server.replies.stream import follow


class _NamedReply(abc.ABC):
    """One text as a stream of events, or as a whole object."""

    def __init__(self, writer: Writer, splits: bool) -> None:
        """`splits`: reasoning is told apart."""
        self._writing = Writing(writer)
        self._splits = splits

    async def stream(self, generations: Sequence[Generation], body: GenerationBody) -> AsyncGenerator[bytes, None]:
        """Events, as the text comes. Raises ApiError."""
        (own,) = generations
        async for one in self._events(own, bool(body.return_progress)):
            yield _named(one)

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The answer, once the text has ended."""
        (own,) = generations
        async for _ in self._events(own, shows_progress=False):
            pass
        return self._whole()

    def failure(self, error: ApiError) -> bytes:
        """What ends a stream that failed."""
        return b"".join(map(_named, self._failed(error)))

    async def _events(self, generation: Generation, shows_progress: bool) -> AsyncGenerator[ApiEvent, None]:
        is_begun = False
        async for news in follow([generation], self._splits, shows_progress, by_token=True):
            if not is_begun:
                is_begun = True
                for one in self._begin(generation):
                    yield one
            if news.progress is not None:
                for one in self._progress(vars(news.progress)):
                    yield one
            for one in self._writing.add(news.events, news.tokens):
                yield one
            if news.is_end:
                for one in await self._end(generation):
                    yield one

    # What the APIs do in their own ways

    @abc.abstractmethod
    def _begin(self, generation: Generation) -> Iterable[ApiEvent]:
        """In front of the answer."""

    @abc.abstractmethod
    def _progress(self, progress: dict[str, Any]) -> Iterable[ApiEvent]:
        """How far the prompt is computed."""

    @abc.abstractmethod
    async def _end(self, generation: Generation) -> Iterable[ApiEvent]:
        """Behind the answer."""

    @abc.abstractmethod
    def _failed(self, error: ApiError) -> Iterable[ApiEvent]:
        """In place of an end."""

    @abc.abstractmethod
    def _whole(self) -> dict[str, Any]:
        """The answer that has ended."""


class ResponsesReply(_NamedReply):
    """Of `/v1/responses`."""

    def __init__(self, writer: ResponseWriter, splits: bool) -> None:
        super().__init__(writer, splits)
        self._response = writer

    def _begin(self, generation: Generation) -> Iterable[ApiEvent]:
        return self._response.begin()

    def _progress(self, progress: dict[str, Any]) -> Iterable[ApiEvent]:
        return self._response.progress(progress)

    async def _end(self, generation: Generation) -> Iterable[ApiEvent]:
        return self._response.end(generation.stats, self._writing.n_reasoning)

    def _failed(self, error: ApiError) -> Iterable[ApiEvent]:
        return self._response.fail(error.status, error.message, error.param)

    def _whole(self) -> dict[str, Any]:
        return self._response.response


class MessagesReply(_NamedReply):
    """Of Anthropic's `/v1/messages`."""

    def __init__(
        self,
        writer: MessageWriter,
        splits: bool,
        stop_string: Callable[[Generation], Awaitable[str]],
    ) -> None:
        """`stop_string`: the one that ended a text; empty: none has."""
        super().__init__(writer, splits)
        self._message = writer
        self._stop_string = stop_string

    def _begin(self, generation: Generation) -> Iterable[ApiEvent]:
        return self._message.begin(generation.stats)

    def _progress(self, progress: dict[str, Any]) -> Iterable[ApiEvent]:
        return ()

    async def _end(self, generation: Generation) -> Iterable[ApiEvent]:
        return self._message.end(generation.stats, await self._stop_string(generation) or None)

    def _failed(self, error: ApiError) -> Iterable[ApiEvent]:
        return (error.anthropic_body,)

    def _whole(self) -> dict[str, Any]:
        return self._message.message


def _named(one: ApiEvent) -> bytes:
    kind: str = one["type"]
    return b"event: " + kind.encode() + b"\ndata: " + dumps(one) + b"\n\n"
