"""Feeds and questions while event loops close and the engine ends."""

from __future__ import annotations

import asyncio
import concurrent.futures
import threading
from typing import Any

import pytest

from ggpipe.api.engine_thread import EngineThread
from ggpipe.api.feed import Feed
from ggpipe.core.request import Token
from ggpipe.errors import RunError


def test_a_loop_that_is_closed_while_a_token_comes(monkeypatch: pytest.MonkeyPatch) -> None:
    feed, loop = Feed(), asyncio.new_event_loop()

    async def wait() -> None:
        await feed.wait_async(0)

    task = loop.create_task(wait())
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    monkeypatch.setattr(loop, "is_closed", lambda: False)  # as just before it closes
    feed.add(Token(1, "a"))
    assert feed.wait(0)


def test_a_question_that_is_asked_while_the_engine_ends() -> None:
    """The engine has failed, and the thread is about to answer all questions with the error."""

    class Ending:
        """A lock; the engine breaks after it is released."""

        def __enter__(self) -> None: ...

        def __exit__(self, *_: object) -> None:
            thread._error = RunError("broken")

    thread: Any = EngineThread.__new__(EngineThread)
    thread._error, thread._head, thread._lock = None, None, Ending()
    thread._questions, thread._calls, thread._feeds = set(), [], {}
    thread.loaded, thread.ended = Feed(), Feed()
    thread._waker = type("Waker", (), {"wake": lambda _: None, "close": lambda _: None})()
    answer: concurrent.futures.Future[int] = thread.ask(lambda _: 1)
    assert not answer.done()
    thread._lock = threading.Lock()
    thread._fail(thread._error)
    with pytest.raises(RunError, match="broken"):
        answer.result(timeout=0)
    assert thread.ended.has_ended
