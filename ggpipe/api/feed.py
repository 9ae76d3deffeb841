"""What has arrived of a request, passed from the engine's thread to its readers."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import Callable

from ggpipe.core.request import Token
from ggpipe.errors import GgpipeError
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.answer import AnswerFormat


class Feed:
    """Written by the engine's thread, read by any number of other threads and event loops."""

    def __init__(self, on_end: Callable[[], None] = lambda: None) -> None:
        """`on_end` is called in the thread that ends the feed, unless the engine itself has ended."""
        self.stats = RequestStats()
        self.on_end = on_end
        self.tokens: list[Token] = []
        """The tokens so far; only appended to."""
        self.is_accepted = False
        """Whether the engine has accepted the request."""
        self.prompt: tuple[int, ...] = ()
        """Tokens of the prompt, once it is accepted."""
        self.n_saved_bytes = 0
        """See `PrefixDone.n_bytes`."""
        self.embedding: tuple[bytes, ...] = ()
        """See `RequestEnded.embedding`."""
        self.rest = ""
        """Text after the last token's."""
        self.marks: AnswerFormat | None = None
        """How reasoning and tool calls are marked; None unless it answers a conversation."""
        self.key = secrets.token_hex(8)
        """Prefix of the ids of tool calls."""
        self.error: GgpipeError | None = None
        self.has_ended = False
        self._changed = threading.Condition()
        self._waiting: list[Callable[[], None]] = []

    # For the engine's thread

    def accept(self, prompt: tuple[int, ...], marks: AnswerFormat | None) -> None:
        """The engine has accepted the request, whose prompt has these tokens."""
        with self._changed:
            self.is_accepted, self.prompt, self.marks = True, prompt, marks
            self._ring()

    def add(self, token: Token) -> None:
        """The next token has arrived."""
        with self._changed:
            self.tokens.append(token)
            self._ring()

    def end(self, rest: str = "", error: GgpipeError | None = None) -> None:
        """The request has ended. A second call does nothing."""
        with self._changed:
            if not self.has_ended:
                self.has_ended, self.rest, self.error = True, rest, error
                self._ring()

    def _ring(self) -> None:
        self._changed.notify_all()
        for wake in self._waiting:
            wake()
        self._waiting.clear()

    # For readers

    def wait(self, n_tokens: int | None) -> bool:
        """Wait until there are more than `n_tokens` tokens, or the end (None: only for the end).

        Returns whether there are more.
        """
        with self._changed:
            while not self._has(n_tokens):
                self._changed.wait()
        return n_tokens is not None and len(self.tokens) > n_tokens

    def wait_for_end(self, timeout_s: float) -> bool:
        """Wait for the end, at most `timeout_s` seconds. Returns whether it has ended."""
        with self._changed:
            return self._changed.wait_for(lambda: self.has_ended, timeout_s)

    async def wait_async(self, n_tokens: int | None) -> bool:
        """Same as `wait`, for an event loop."""
        await self._wait_until(lambda: self._has(n_tokens))
        return n_tokens is not None and len(self.tokens) > n_tokens

    async def wait_for_answer(self) -> None:
        """Wait until the engine has accepted or refused the request."""
        await self._wait_until(lambda: self.is_accepted or self.has_ended)

    async def _wait_until(self, is_so: Callable[[], bool]) -> None:
        loop = asyncio.get_running_loop()
        while True:
            with self._changed:
                if is_so():
                    return
                changed = loop.create_future()
                self._waiting.append(_waker(loop, changed))
            await changed

    def _has(self, n_tokens: int | None) -> bool:
        return self.has_ended or (n_tokens is not None and len(self.tokens) > n_tokens)


def _waker(loop: asyncio.AbstractEventLoop, changed: asyncio.Future[None]) -> Callable[[], None]:
    def come() -> None:
        if not changed.done():  # cancelled
            changed.set_result(None)

    def wake() -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed, perhaps just now
            loop.call_soon_threadsafe(come)

    return wake
