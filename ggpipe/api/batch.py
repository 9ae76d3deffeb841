"""Many prompts, several of them at a time."""

from __future__ import annotations

import collections
import threading
from collections.abc import AsyncGenerator, Callable, Generator, Sequence

from ggpipe.api.answer import Answer
from ggpipe.api.feed import Feed

TextOrTokens = str | Sequence[int]
SubmitPrompt = Callable[[TextOrTokens, Feed], None]
CancelFeed = Callable[[Feed], None]


class Batch:
    """Whole answers, in the order of the prompts: `for answer in batch`, `async for answer in batch`.

    Each loop begins with the first prompt. One that is left early cancels what is not answered.
    """

    def __init__(
        self, prompts: Sequence[TextOrTokens], n_at_a_time: int, submit: SubmitPrompt, cancel: CancelFeed
    ) -> None:
        """`n_at_a_time`: requests that the engine has at a time; enough of them wait there to keep it busy."""
        self._prompts = prompts
        self._n_at_a_time = n_at_a_time
        self._submit = submit
        self._cancel = cancel

    def __len__(self) -> int:
        return len(self._prompts)

    def __iter__(self) -> Generator[Answer, None, None]:
        flights = _Flights(self._prompts, self._n_at_a_time, self._submit, self._cancel)
        try:
            while (first := flights.first()) is not None:
                first.wait(None)
                yield flights.take()
        finally:
            flights.cancel()

    async def __aiter__(self) -> AsyncGenerator[Answer, None]:
        flights = _Flights(self._prompts, self._n_at_a_time, self._submit, self._cancel)
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
        """Those that were not taken."""
        self._waiting = collections.deque(self._left)
        """Those that were not submitted."""
        for _ in range(n_at_a_time):
            self._advance()

    def first(self) -> Feed | None:
        """The request whose answer is taken next. It is submitted, even to an engine that has ended."""
        if not self._left:
            return None
        with self._lock:
            waits = bool(self._waiting) and self._waiting[0] is self._left[0]
        if waits:
            self._advance()
        return self._left[0][1]

    def take(self) -> Answer:
        """Its answer, which is whole."""
        prompt, feed = self._left.popleft()
        return Answer(feed, lambda: None, prompt)

    def cancel(self) -> None:
        """Nobody wants the others."""
        with self._lock:
            self._waiting.clear()
        for _, feed in self._left:
            if not feed.has_ended:
                self._cancel(feed)

    def _advance(self) -> None:
        """Submit the next one. Called when one has ended, in the engine's thread."""
        with self._lock:
            if not self._waiting:
                return
            prompt, feed = self._waiting.popleft()
        self._submit(prompt, feed)
