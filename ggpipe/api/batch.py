"""Many prompts, several at a time."""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence

from ggpipe.api.answer import Answer
from ggpipe.api.feed import Feed

TextOrTokens = str | Sequence[int]
SubmitPrompt = Callable[[TextOrTokens, Feed], None]
CancelFeed = Callable[[Feed], None]


class Batch:
    """Complete answers in the order of the prompts: `for answer in batch`, `async for answer in batch`.

    Each loop starts with the first prompt. Leaving a loop early cancels the remaining requests.
    """

    def __init__(
        self, prompts: Sequence[TextOrTokens], n_at_a_time: int, submit: SubmitPrompt, cancel: CancelFeed
    ) -> None:
        """`n_at_a_time`: requests that are submitted at once; some of them wait there, to keep the engine busy."""
        self._prompts = prompts
        self._begin = functools.partial(_Flights, prompts, n_at_a_time, submit, cancel)

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Generator[Answer, None, None]:
        flights = self._begin()
        try:
            while (first := flights.first()) is not None:
                first.wait(None)
                yield flights.take()
        finally:
            flights.cancel()

    async def __aiter__(self) -> AsyncGenerator[Answer, None]:
        flights = self._begin()
        try:
            while (first := flights.first()) is not None:
                await first.wait_async(None)
                yield flights.take()
        finally:
            flights.cancel()


class _Flights:
    """The requests of one loop."""

    def __init__(
        self, prompts: Sequence[TextOrTokens], n_at_a_time: int, submit: SubmitPrompt, cancel: CancelFeed
    ) -> None:
        self._submit, self._cancel = submit, cancel
        self._lock = threading.Lock()
        self._left = collections.deque((prompt, Feed(self._advance)) for prompt in prompts)
        """Requests whose answers have not been taken."""
        self._waiting = collections.deque(self._left)
        """Requests that have not been submitted."""
        for _ in range(n_at_a_time):
            self._advance()

    def first(self) -> Feed | None:
        """The request whose answer is next. It is submitted, even if the engine has ended."""
        if not self._left:
            return None
        with self._lock:
            waits = bool(self._waiting) and self._waiting[0] is self._left[0]
        if waits:
            self._advance()
        return self._left[0][1]

    def take(self) -> Answer:
        """Take the next complete answer."""
        prompt, feed = self._left.popleft()
        return Answer(feed, lambda: None, prompt)

    def cancel(self) -> None:
        """Cancel the remaining requests."""
        with self._lock:
            self._waiting.clear()
        for _, feed in self._left:
            if not feed.has_ended:
                self._cancel(feed)

    def _advance(self) -> None:
        """Submit the next request. Called in the engine's thread when one has ended."""
        with self._lock:
            if not self._waiting:
                return
            prompt, feed = self._waiting.popleft()
        self._submit(prompt, feed)
