"""OpenAI's chats and completions, whole and as streams, with llama-server's further fields."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
from typing import Any, Protocol

from ggpipe._version import __version__
from ggpipe.apis.bodies import GenerationBody
from ggpipe.apis.replies import Choices, finish_reason, timings, usage
from ggpipe.core.request import Token
from ggpipe.server.backend import Generation
from ggpipe.server.errors import ApiError
from ggpipe.server.replies.stream import DONE, event, follow
from ggpipe.text.chat.answer import WholeAnswer

BUILD = f"ggpipe {__version__}"
"""Which server it is."""


class Reply(Protocol):
    """The objects of one response."""

    def stream(self, generations: Sequence[Generation], body: GenerationBody) -> AsyncGenerator[bytes, None]:
        """Events, as outputs are generated. `body` says what is in them besides the output. Raises ApiError."""

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any] | list[dict[str, Any]]:
        """The response, once all outputs have ended."""


class OpenAIReply:
    """A choice for each output."""

    def __init__(self, choices: Choices, splits: bool) -> None:
        """`splits`: reasoning is separated from the answer."""
        self._choices = choices
        self._splits = splits

    async def stream(self, generations: Sequence[Generation], body: GenerationBody) -> AsyncGenerator[bytes, None]:
        """Events, as outputs are generated. Raises ApiError."""
        own = self._choices
        begun: set[int] = set()
        tokens: dict[int, list[Token]] = {generation.index: [] for generation in generations}
        answers = {generation.index: WholeAnswer() for generation in generations}
        names_origins = bool(body.return_origins)
        async for news in follow(generations, self._splits, bool(body.return_progress), by_token=names_origins):
            index, stats = news.generation.index, news.generation.stats
            if index not in begun:
                begun.add(index)
                if own.first is not None:
                    yield event(own.chunk([own.choice(index, own.first)]))
            if news.progress is not None:
                yield event(own.chunk([own.choice(index, own.empty)], prompt_progress=news.progress))
                continue
            tokens[index] += news.tokens
            answers[index].add(news.events)
            for one in news.events:
                if (part := own.part(one)) is None:
                    continue
                choice = {**own.choice(index, part), "logprobs": own.logprobs(index, tokens[index])}
                if names_origins and tokens[index]:
                    choice["origin"] = "drafted" if tokens[index][-1].drafted else "own"
                figures = {"timings": timings(stats)} if body.timings_per_token else {}
                yield event(own.chunk([choice], **figures))
                tokens[index] = []
            if news.is_end:
                last = own.choice(index, own.empty, finish_reason(stats, answers[index]))
                last["logprobs"] = own.logprobs(index, tokens[index])
                yield event(own.chunk([last], timings=timings(stats)))
        if body.includes_usage:
            yield event(own.chunk([], usage=usage(generations), timings=timings(generations[0].stats)))
        yield DONE

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""
        return event(error.body)

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any]:
        """The response, once all outputs have ended."""
        return self._choices.whole(generations, self._splits)
