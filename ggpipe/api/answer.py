"""The answer to a prompt, while it is written and afterwards."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import Any, Self

from ggpipe.api.feed import Feed
from ggpipe.core.request import Finish, Token
from ggpipe.errors import GgpipeError
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.answer import ToolCall, WholeAnswer, whole_answer
from ggpipe.text.chat.tools.events import Text


def _nothing() -> None:
    pass


class Answer:
    """The tokens of one request, as they come: `for token in answer`, `async for token in answer`.

    A loop that is left early cancels the request, as does leaving a `with` block of the answer, `cancel`, and dropping
    the answer. `wait()` and `await answer` take all of it. Methods may be called from any thread.
    """

    def __init__(self, feed: Feed, on_cancel: Callable[[], None], prompt: object) -> None:
        self.prompt = prompt
        """The text, the tokens or the messages that it answers."""
        self._feed = feed
        self._on_cancel = on_cancel
        """It keeps the engine, which would end otherwise where nothing else does, until the answer is whole."""

    @property
    def stats(self) -> RequestStats:
        """What was measured: `ttft_s`, `decode_tps`, `counters.acceptance`, ...; whole when the answer is."""
        return self._feed.stats

    @property
    def embedding(self) -> tuple[bytes, ...]:
        """As `RequestEnded.embedding`, when it is whole."""
        return self._feed.embedding

    @property
    def tokens(self) -> tuple[Token, ...]:
        """Those that have come."""
        return tuple(self._feed.tokens)

    @property
    def text(self) -> str:
        """As much as has come."""
        return "".join(token.text for token in self.tokens) + self._feed.rest

    @property
    def content(self) -> str:
        """The text without reasoning and calls of tools, where it answers a conversation."""
        return self._parts.text

    @property
    def reasoning(self) -> str:
        """What the model thought before it answered a conversation."""
        return self._parts.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """The tools that the model calls, with arguments in JSON. Those of the last one are cut off where the text
        is."""
        return tuple(self._parts.calls)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of the conversation, which goes on behind it: `messages.append(answer.message)`."""
        return self._parts.message

    @property
    def _parts(self) -> WholeAnswer:
        marks = self._feed.marks
        if marks is None:
            return WholeAnswer([Text(self.text)])
        return whole_answer(marks, self._feed.key, [(t.id, t.text) for t in self.tokens], self._feed.rest)

    @property
    def finish(self) -> Finish | None:
        """Why it ended; None while it is written, and where there is an `error`."""
        return self._feed.stats.finish if self._feed.has_ended and self._feed.error is None else None

    @property
    def error(self) -> GgpipeError | None:
        """Why it did not end. Loops and `wait` raise it."""
        return self._feed.error

    @property
    def is_done(self) -> bool:
        """Nothing follows."""
        return self._feed.has_ended

    def cancel(self) -> None:
        """End it soon; tokens that were generated already still come."""
        if not self._feed.has_ended:
            self._on_cancel()
        else:
            self._on_cancel = _nothing

    def wait(self) -> Self:
        """Wait until it is whole. Raises UsageError for a bad prompt, RunError when ranks break."""
        try:
            self._feed.wait(None)
        finally:  # Ctrl-C cancels it
            self.cancel()
        return self._whole()

    def __iter__(self) -> Generator[Token, None, None]:
        """The tokens from the first one on. Raises as `wait`."""
        at = 0
        try:
            while self._feed.wait(at):
                yield self._feed.tokens[at]
                at += 1
        finally:
            self.cancel()
        self._whole()

    async def __aiter__(self) -> AsyncGenerator[Token, None]:
        """The tokens from the first one on. Raises as `wait`."""
        at = 0
        try:
            while await self._feed.wait_async(at):
                yield self._feed.tokens[at]
                at += 1
        finally:
            self.cancel()
        self._whole()

    def __await__(self) -> Generator[Any, None, Self]:
        return self._wait_async().__await__()

    async def _wait_async(self) -> Self:
        try:
            await self._feed.wait_async(None)
        finally:
            self.cancel()
        return self._whole()

    def _whole(self) -> Self:
        if self._feed.error is not None:
            raise self._feed.error
        return self

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.cancel()

    def __del__(self) -> None:
        self.cancel()

    def __repr__(self) -> str:
        state = "failed" if self.error is not None else "done" if self.is_done else "being written"
        return f"<Answer, {state}: {self.text!r}>"
