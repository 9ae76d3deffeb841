"""llama-server's own replies, to `/completion`."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from typing import Any

from ggpipe.api.feed import Feed
from ggpipe.apis.bodies import GenerationBody
from ggpipe.apis.llama_server import NativeObjects
from ggpipe.apis.replies import timings
from ggpipe.core.request import Token
from ggpipe.server.backend import Generation
from ggpipe.server.errors import ApiError
from ggpipe.server.replies.stream import event, follow


class NativeReply:
    """An object for each output."""

    def __init__(
        self,
        objects: NativeObjects,
        slot_of: Callable[[Feed], int],
        stop_string: Callable[[Generation], Awaitable[str]],
    ) -> None:
        """`slot_of`: the slot of an output. `stop_string`: the one that ended an output, else empty."""
        self._objects = objects
        self._slot_of = slot_of
        self._stop_string = stop_string

    async def stream(self, generations: Sequence[Generation], body: GenerationBody) -> AsyncGenerator[bytes, None]:
        """An event for each token, whether it has text or not, and one for the end."""
        async for news in follow(generations, False, bool(body.return_progress)):
            own = news.generation
            if news.progress is not None:
                yield event({**self._part(own, "", []), "prompt_progress": news.progress})
            for token in news.tokens:
                part = self._part(own, token.text, [token])
                yield event({**part, "timings": timings(own.stats)} if body.timings_per_token else part)
            if news.is_end:
                yield event(await self._last(own, own.feed.rest, []))

    def failure(self, error: ApiError) -> bytes:
        """The event that ends a stream which failed."""
        return event(error.body)

    async def whole(self, generations: Sequence[Generation]) -> dict[str, Any] | list[dict[str, Any]]:
        """The output and how it ended; a list if there are several."""
        found = []
        for own in generations:
            text = "".join(token.text for token in own.tokens) + own.feed.rest
            found.append(await self._last(own, text, own.tokens))
        return found if len(found) > 1 else found[0]

    def _part(self, own: Generation, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return self._objects.part(own, self._slot_of(own.feed), text, tokens)

    async def _last(self, own: Generation, text: str, tokens: Sequence[Token]) -> dict[str, Any]:
        return self._objects.last(own, self._slot_of(own.feed), text, tokens, await self._stop_string(own))
