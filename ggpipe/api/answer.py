"""The answer to a prompt, during and after its generation."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Generator
from types import TracebackType
from typing import Any, Self

from ggpipe.api.feed import Feed
from ggpipe.core.request import Finish, Token
from ggpipe.errors import GgpipeError
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.answer import ToolCall, WholeAnswer, whole_answer


def _nothing() -> None:
    pass


class Answer:
    """The tokens of one request as they arrive: `for token in answer`, `async for token in answer`.

    `wait()` and `await answer` wait for the whole answer. The request is cancelled by leaving a loop or a `with` block
    of the answer early, by `cancel`, and by dropping the answer. Methods may be called from any thread.
    """

    def __init__(self, feed: Feed, on_cancel: Callable[[], None], prompt: object) -> None:
        self.prompt = prompt
        """The string, tokens or messages that it answers."""
        self._feed = feed
        self._on_cancel = on_cancel
        """Refers to the engine, which must not end before the answer is complete."""

    @property
    def stats(self) -> RequestStats:
        """What was measured: `ttft_s`, `decode_tps`, `counters.acceptance`, ... Complete when the answer is."""
        return self._feed.stats

    @property
    def embedding(self) -> tuple[bytes, ...]:
        """See `RequestEnded.embedding`; empty until the answer is complete."""
        return self._feed.embedding

    @property
    def tokens(self) -> tuple[Token, ...]:
        """The tokens so far."""
        return tuple(self._feed.tokens)

    @property
    def text(self) -> str:
        """The output so far."""
        return "".join(token.text for token in self.tokens) + self._feed.rest

    @property
    def content(self) -> str:
        """In a conversation, the output without reasoning and tool calls."""
        return self._parts.text

    @property
    def reasoning(self) -> str:
        """In a conversation, the model's reasoning before its answer."""
        return self._parts.reasoning

    @property
    def tool_calls(self) -> tuple[ToolCall, ...]:
        """Tool calls with arguments in JSON. The last call's arguments are incomplete if the output is."""
        return tuple(self._parts.calls)

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message, to continue the conversation: `messages.append(answer.message)`."""
        return self._parts.message

    @property
    def _parts(self) -> WholeAnswer:
        feed = self._feed
        return whole_answer(feed.marks, feed.key, tuple(feed.tokens), feed.rest)

    @property
    def finish(self) -> Finish | None:
        """Why it ended; None during generation and if there is an `error`."""
        return self._feed.stats.finish if self._feed.has_ended and self._feed.error is None else None

    @property
    def error(self) -> GgpipeError | None:
        """Why it failed. Loops and `wait` raise it."""
        return self._feed.error

    @property
    def is_done(self) -> bool:
        """Whether it has ended."""
        return self._feed.has_ended

    def cancel(self) -> None:
        """End it soon, after tokens that were already generated."""
        if not self._feed.has_ended:
            self._on_cancel()
        else:
            self._on_cancel = _nothing

    def wait(self) -> Self:
        """Wait until it is complete. Raises UsageError for a bad prompt, RunError when ranks break."""
        try:
            self._feed.wait(None)
        finally:  # Ctrl-C cancels it
            self.cancel()
        return self._whole()

    def __iter__(self) -> Generator[Token, None, None]:
        """All tokens, from the first. Raises the same errors as `wait`."""
        at = 0
        try:
            while self._feed.wait(at):
                yield self._feed.tokens[at]
                at += 1
        finally:
            self.cancel()
        self._whole()

    async def __aiter__(self) -> AsyncGenerator[Token, None]:
        """All tokens, from the first. Raises the same errors as `wait`."""
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
        state = "failed" if self.error is not None else "done" if self.is_done else "being generated"
        return f"<Answer, {state}: {self.text!r}>"
