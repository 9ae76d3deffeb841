"""The backend of the server, with a fake engine."""

from __future__ import annotations

import asyncio
import concurrent.futures
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from support.requests import asked

from ggpipe.api.engine_thread import RequestOf
from ggpipe.api.feed import Feed
from ggpipe.apis import writer
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.prefixes import SavePrefix
from ggpipe.core.request import Finish, Token, check_prompt
from ggpipe.errors import SettingError, UsageError
from ggpipe.options.chat import ChatSettings
from ggpipe.options.server import ServerConfig
from ggpipe.options.settings import EmbeddingSettings
from ggpipe.server import process
from ggpipe.server.backend import Backend, Generation
from ggpipe.server.endpoints.shared import Serving
from ggpipe.server.errors import ApiError
from ggpipe.server.metrics import registry
from ggpipe.server.reply import follow
from ggpipe.server.saved_slots import SavedSlots
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.answer import AnswerParser

N_CTX = 100


class FakeThread:
    """The thread of a loaded engine, which refuses all questions."""

    ranks: Sequence[object] = ()
    n_active = n_cells = n_restarts = 0
    is_restarting = False

    def __init__(self) -> None:
        self.loaded, self.ended = Feed(), Feed()
        self.loaded.end()

    def ask(self, _: object) -> concurrent.futures.Future[Any]:
        answer: concurrent.futures.Future[Any] = concurrent.futures.Future()
        answer.set_exception(SettingError("temp", "must be a number"))
        return answer

    def submit(self, feed: Feed, request_of: RequestOf) -> None:
        """A request is accepted at once."""
        spec = request_of(SamplingConfig())
        assert isinstance(spec.prompt, tuple)
        tokens = tuple(part for part in spec.prompt if isinstance(part, int))
        try:
            check_prompt(tokens, N_CTX)
        except UsageError as e:
            feed.end(error=e)
            return
        feed.accept(tokens, None)

    def order(self, feed: Feed, make: Callable[[int], SavePrefix]) -> None:
        """A prefix is saved at once."""
        check_prompt(make(1).tokens, N_CTX)
        feed.end()

    def cancel(self, _: Feed) -> None: ...

    def close(self) -> None: ...


def backend(thread: Any = None, **changes: int) -> Backend:
    """Call it in an event loop."""
    sizes = {"n_slots": 2, "n_waiting": 3, **changes}
    own_thread: Any = thread or FakeThread()
    own = Backend(own_thread, lambda usual: usual, -1, SpeculationConfig(mode="iterative"), **sizes)
    own.n_ctx, own._is_loaded = N_CTX, thread is None
    return own


def test_more_texts_than_are_ever_taken_are_refused_for_good() -> None:
    async def begin(n: int) -> int:
        return len(await backend().begin([asked((1, 2), n_predict=4, user="me")] * n))

    assert asyncio.run(begin(5)) == 5
    with pytest.raises(ApiError, match="6 outputs are too many for one request: ask for at most 5") as refused:
        asyncio.run(begin(6))
    assert refused.value.status == 400


def test_embeddings_take_nothing_from_the_rate_of_texts() -> None:
    def text(n: int) -> RequestStats:
        return RequestStats(n_prompt=3, token_times=[float(i) for i in range(n)], finish=Finish.LENGTH, ended=9.0)

    async def rates() -> float:
        own = backend()
        for n in (11, 0, 0, 1, 11):
            own.totals.add(text(n), ())
        found = registry(own).get_sample_value("llamacpp:predicted_tokens_seconds")
        assert found is not None
        return found

    assert asyncio.run(rates()) == 1.0  # 20 tokens after the first ones, in 20 s


def test_a_slot_whose_context_is_full_is_saved(tmp_path: Path) -> None:
    async def save(n_tokens: int) -> int:
        own = backend()
        own.slots.restored(own.slots.all()[0], tuple(range(n_tokens)))
        saved = await SavedSlots(own, tmp_path).do("save", "0", "tale")
        return int(saved["n_saved"])

    assert [asyncio.run(save(n)) for n in (2, N_CTX - 1, N_CTX, N_CTX + 1)] == [1, N_CTX - 2, N_CTX - 2, N_CTX - 2]


@pytest.mark.parametrize("n_texts", [1, 2])
def test_a_bug_ends_a_stream(n_texts: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> AnswerParser:
        raise ArithmeticError

    async def read() -> None:
        monkeypatch.setattr(writer, "joined", broken)
        texts = []
        for i in range(n_texts):
            feed = Feed()
            feed.add(Token(1, "a"))
            thread: Any = FakeThread()
            texts.append(Generation(index=i, prompt=0, spec=asked((1,), n_predict=4), feed=feed, thread=thread))
        async with asyncio.timeout(10):
            async for _ in follow(texts, splits=False):
                pass

    with pytest.raises(ArithmeticError):
        asyncio.run(read())


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as own:
        yield own


def test_a_server_that_cannot_get_ready_ends(listener: socket.socket) -> None:
    thread: Any = FakeThread()
    serving = Serving(
        config=ServerConfig(), chat=ChatSettings(single_turn=True), embeddings=EmbeddingSettings(), model="m", path="m",
        keys=(), make_backend=backend,
    )  # fmt: skip
    with pytest.raises(SettingError, match="temp"):
        process.serve(serving, [listener], thread, lambda: None)
