"""The engine as the server's event loop sees it: prompts in, texts out, and what is counted of them."""

from __future__ import annotations

import asyncio
import enum
import functools
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

from ggpipe.api.engine_thread import EngineThread
from ggpipe.api.feed import Feed
from ggpipe.channel.client import EngineClient
from ggpipe.channel.messages import ModelInfo
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.prefixes import PrefixOrder
from ggpipe.core.prompt import Conversation, RequestPrompt
from ggpipe.core.request import Finish, Token
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import GgpipeError
from ggpipe.options.sampling import SamplingOf
from ggpipe.server.errors import ApiError
from ggpipe.server.json import dumps
from ggpipe.server.slots import Slots
from ggpipe.server.totals import Totals
from ggpipe.stats.occupancy import Occupancy
from ggpipe.stats.records import RankStats, RequestStats
from ggpipe.text.chat.answer import WholeAnswer
from ggpipe.text.chat.conversation import ChatPrompt

T = TypeVar("T")

_MOST_PER_CELL, _MOST_BESIDE = 64, 64 * 1024  # bytes of prompts; tokens have about 4
_MEASURE_S = 10.0


class Status(enum.Enum):
    """What the server does."""

    LOADING = "loading"
    OK = "ok"
    RESTARTING = "restarting"
    """Ranks died, and new ones load; streams wait."""
    STOPPING = "stopping"
    """Running requests end, and no new ones begin."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """A text that is written."""

    index: int
    """Its number, in one HTTP request."""
    prompt: int
    """Its prompt's number, in one HTTP request."""
    spec: RequestSpec
    """What the engine is asked."""
    feed: Feed
    end: Callable[[], None]
    """Has the engine cancel it."""

    @property
    def stats(self) -> RequestStats:
        """Whole when it has ended."""
        return self.feed.stats

    @property
    def tokens(self) -> Sequence[Token]:
        """Those that have come."""
        return self.feed.tokens

    def answer(self, splits: bool) -> WholeAnswer:
        """The parts of the output so far. `splits`: reasoning is separated from the answer."""
        return self.feed.answer(splits)

    def cancel(self) -> None:
        """End it soon, if it has not ended."""
        if not self.feed.has_ended:
            self.end()

    async def news(self) -> AsyncGenerator[Sequence[Token], None]:
        """Tokens as they come, those together that are there together. Raises ApiError."""
        at = 0
        while await self.feed.wait_async(at):
            tokens = self.feed.tokens[at:]
            at += len(tokens)
            yield tokens
        if self.feed.error is not None:
            raise ApiError.of(self.feed.error)


class Backend:
    """Belongs to the event loop."""

    def __init__(
        self,
        thread: EngineThread,
        usual: SamplingOf,
        n_predict: int,
        speculation: SpeculationConfig,
        n_slots: int,
        n_waiting: int,
    ) -> None:
        """`usual`, `n_predict`: for what requests do not say. `n_slots` requests are served at a time, `n_waiting` more
        are taken."""
        self.totals = Totals()
        self.n_slots = n_slots
        self.n_predict = n_predict
        self.n_ctx = 0
        """KV cells, for all requests together; 0 before the model is loaded."""
        self.model: ModelInfo | None = None
        """None before it is loaded."""
        self.began = time.time()
        self.occupancy = Occupancy()
        self._measured_at = -math.inf
        self._n_measured: int | None = None
        """How often ranks had been started again when their clocks were compared."""
        self.slots = Slots(n_slots)
        self._thread = thread
        self._usual = usual
        self.sampling = SamplingConfig()
        """For what requests do not say; known when the model is loaded."""
        self.speculation = speculation
        """For all requests."""
        self._n_waiting = n_waiting
        self._is_loaded = False
        self._is_stopping = False
        self._open: set[Generation] = set()
        """Those of answers that were not sent whole."""
        self._n_answers = 0
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    # What it does

    @property
    def status(self) -> Status:
        """Now."""
        if self._is_stopping:
            return Status.STOPPING
        if not self._is_loaded:
            return Status.LOADING
        return Status.RESTARTING if self._thread.is_restarting else Status.OK

    @property
    def progress(self) -> float:
        """Share of the loading that is done, 0 to 1."""
        ranks = list(self._thread.ranks)
        n_bytes = sum(rank.load_bytes for rank in ranks)
        return min(sum(rank.loaded_bytes for rank in ranks) / n_bytes, 1.0) if n_bytes else 0.0

    @property
    def ranks(self) -> Sequence[RankStats]:
        """All ranks in order."""
        return self._thread.ranks

    @property
    def open(self) -> Collection[Generation]:
        """Texts of answers that were not sent whole."""
        return self._open

    @property
    def n_active(self) -> int:
        """Requests of the engine that have not ended, waiting ones too."""
        return self._thread.n_active

    @property
    def n_cells(self) -> int:
        """KV cells in use: of requests, kept prefixes and draft tokens."""
        return self._thread.n_cells

    @property
    def n_restarts(self) -> int:
        """How often ranks were started again."""
        return self._thread.n_restarts

    def measure(self) -> None:
        """Have ranks asked for their memory, unless that was done seconds ago, and once for their clocks."""
        now = time.monotonic()
        if self.status is not Status.OK or now < self._measured_at + _MEASURE_S:
            return
        self._measured_at = now
        if self._n_measured == self.n_restarts:
            self._thread.ask(lambda engine: engine.measure())
        else:
            self._n_measured = self.n_restarts
            self._thread.ask(_measure_all)

    async def load(self, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        """Wait until the model is loaded, and then for `prepare`. Raises what that failed with."""
        await self._thread.loaded.wait_async(None)
        if self._thread.loaded.error is not None:
            raise self._thread.loaded.error
        asked = self._thread.ask(lambda engine: (self._usual(engine.sampling), engine.n_ctx, engine.model))
        found = await asyncio.wrap_future(asked)
        self.sampling, self.n_ctx, self.model = found
        if prepare is not None:
            await prepare()
        self._is_loaded = True

    async def failed(self) -> GgpipeError:
        """Wait until the engine ends, and say why."""
        await self._thread.ended.wait_async(None)
        assert self._thread.ended.error is not None
        return self._thread.ended.error

    async def drain(self, limit_s: float) -> None:
        """Take no new requests, and wait until all are answered. Those that take longer are cut off."""
        self._is_stopping = True
        try:
            async with asyncio.timeout(limit_s):
                await self._is_idle.wait()
        except TimeoutError:
            self.cut_off()
            await self._is_idle.wait()

    def cut_off(self) -> None:
        """End all texts as they are."""
        for generation in self._open:
            generation.cancel()

    # Requests

    def check(self) -> None:
        """Raises ApiError while no requests are taken."""
        match self.status:
            case Status.LOADING:
                raise ApiError(503, "Loading model")
            case Status.STOPPING:
                raise ApiError(503, "the server is about to end")

    async def ask(self, question: Callable[[EngineClient], T]) -> T:
        """What the engine answers. Raises ApiError for mistakes of the input."""
        try:
            return await asyncio.wrap_future(self._thread.ask(question))
        except GgpipeError as e:
            raise ApiError.of(e) from e
        except (UnicodeError, OverflowError, ValueError) as e:  # no UTF-8, a number that is too large
            raise ApiError(400, f"the request cannot be passed on to the model: {e}") from e

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """A prompt's tokens."""
        self._check_size(len(text))
        return await self.ask(lambda engine: engine.tokenize(text))

    async def tokenize_chat(self, conversation: Conversation) -> ChatPrompt:
        """A conversation as the model reads it."""
        self._check_size(size_of(conversation))
        return await self.ask(lambda engine: engine.tokenize_chat(conversation))

    def _check_size(self, n_bytes: int) -> None:
        """All texts wait while the model's vocabulary reads one. Raises ApiError for one that is clearly too long."""
        if n_bytes > _MOST_PER_CELL * self.n_ctx + _MOST_BESIDE:
            raise ApiError.too_long(self.n_ctx)

    async def detokenize(self, tokens: Sequence[int], special: bool = False) -> tuple[bytes, ...]:
        """The text of each token. Special tokens have none, but with `special`."""
        return await self.ask(lambda engine: engine.detokenize(tokens, special))

    async def stop_string(self, generation: Generation) -> str:
        """The stop string that ended a text; empty: none has."""
        if generation.stats.finish is not Finish.STOP_STRING:
            return ""
        pieces = await self.detokenize([token.id for token in generation.feed.tokens])
        text = b"".join(pieces).decode("utf-8", "replace")
        found = [(text.find(stop), stop) for stop in generation.spec.sampling.stop if stop in text]
        return min(found)[1] if found else ""

    async def begin(self, specs: Sequence[RequestSpec], n_choices: int = 1, slot: int = -1) -> list[Generation]:
        """Have requests served, and wait until all are accepted: `n_choices` after each other have one prompt. Raises
        ApiError where too many wait already, and for requests that cannot be served; then none of them is.

        `slot`: the number of the one that is to be used, where it is free; -1: any.

        One that is a user's only one is taken even then, as long as `n_slots` more wait at most.
        """
        self._check_room(len(specs), specs[0].user)
        for spec in specs[::n_choices]:
            self._check_size(size_of(spec.prompt))
        generations = [self._submit(index, index // n_choices, spec) for index, spec in enumerate(specs)]
        with self._counted(generations), self._cancelled_on_error(generations):
            for generation in generations:
                await generation.feed.wait_for_answer()
                if generation.feed.error is not None:
                    raise ApiError.of(generation.feed.error)
        for generation in generations:
            if generation.spec.pooling is None:
                self.slots.begin(generation.feed.prompt, generation.spec, generation.feed, slot)
        return generations

    def _submit(self, index: int, prompt: int, spec: RequestSpec) -> Generation:
        stats = RequestStats()
        feed = Feed(lambda: self.totals.add(stats, self.ranks) if feed.is_accepted else None)
        feed.stats = stats
        self._thread.submit(feed, lambda _: spec)
        end = functools.partial(self._thread.cancel, feed)
        return Generation(index=index, prompt=prompt, spec=spec, feed=feed, end=end)

    @property
    def n_fair(self) -> int:
        """Requests of one client at a time that leave room for others'."""
        return self.n_slots + self._n_waiting // 4

    def _check_room(self, n_new: int, user: str) -> None:
        """Raises ApiError where too many requests wait already."""
        self.check()
        n_most = self.n_slots + self._n_waiting
        if n_new > n_most:
            raise ApiError(400, f"{n_new} texts are too many for one request: ask for {n_most} at most")
        is_only = n_new == 1 and not any(one.spec.user == user and not one.feed.has_ended for one in self._open)
        if self.n_active + n_new > n_most + (self.n_slots if is_only else 0):
            raise ApiError(503, f"{self.n_active} requests are being served or wait: try again later")

    async def order(self, give: Callable[[EngineClient], PrefixOrder]) -> int:
        """Have an order for a prefix carried out; returns the bytes of its files. Raises GgpipeError."""
        feed = Feed()
        self._thread.order(feed, give)
        try:
            await feed.wait_async(None)
        finally:
            if not feed.has_ended:
                self._thread.cancel(feed)
        if feed.error is not None:
            raise feed.error
        return feed.n_saved_bytes

    @contextmanager
    def answering(self, generations: Sequence[Generation]) -> Iterator[None]:
        """While these are sent to a client. Those that have not ended afterwards are cancelled."""
        with self._counted(generations):
            try:
                yield
            finally:
                for generation in generations:
                    generation.cancel()

    @contextmanager
    def _counted(self, generations: Sequence[Generation]) -> Iterator[None]:
        """The server does not end while somebody waits for these."""
        self._n_answers += 1
        self._is_idle.clear()
        self._open.update(generations)
        try:
            yield
        finally:
            self._open.difference_update(generations)
            self._n_answers -= 1
            if not self._n_answers:
                self._is_idle.set()

    @staticmethod
    @contextmanager
    def _cancelled_on_error(generations: Sequence[Generation]) -> Iterator[None]:
        try:
            yield
        except BaseException:
            for generation in generations:
                generation.cancel()
            raise


def size_of(prompt: RequestPrompt) -> int:
    """About the bytes of its text. A conversation's are those of its JSON."""
    match prompt:
        case bytes():
            return len(prompt)
        case Conversation():
            return len(dumps((prompt.messages, prompt.tools, prompt.further)))
    return sum(len(part) if isinstance(part, bytes) else 1 for part in prompt)


def _measure_all(engine: EngineClient) -> None:
    engine.align_clocks()
    engine.measure()
