"""The engine, as the server's event loop uses it: requests, their outputs, and the server's state."""

from __future__ import annotations

import asyncio
import enum
import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Collection, Iterator, Mapping, Sequence
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
from ggpipe.server.slots import SlotRequest, Slots
from ggpipe.server.totals import Totals
from ggpipe.stats.occupancy import Occupancy
from ggpipe.stats.records import RequestStats
from ggpipe.text.chat.answer import AnswerFormat
from ggpipe.text.chat.conversation import ChatPrompt

T = TypeVar("T")

_MOST_PER_CELL, _MOST_FIXED = 64, 64 * 1024  # bytes of prompts; tokens have about 4
_MEASURE_S = 10.0


class Status(enum.Enum):
    """The server's state."""

    LOADING = "loading"
    OK = "ok"
    RESTARTING = "restarting"
    """Ranks have died and new ones are loading; streams wait."""
    STOPPING = "stopping"
    """Running requests finish, and new ones are refused."""


@dataclass(frozen=True, kw_only=True, eq=False)
class Generation:
    """An output that is being generated."""

    index: int
    """Index of the completion in the HTTP request."""
    prompt: int
    """Index of its prompt in the HTTP request."""
    spec: RequestSpec
    """The request to the engine."""
    feed: Feed
    thread: EngineThread

    @property
    def stats(self) -> RequestStats:
        """What was measured; complete when the output has ended."""
        return self.feed.stats

    @property
    def tokens(self) -> Sequence[Token]:
        """The tokens so far."""
        return self.feed.tokens

    @property
    def rest(self) -> str:
        """Text after the last token's."""
        return self.feed.rest

    @property
    def marks(self) -> AnswerFormat | None:
        """How reasoning and tool calls are marked; None unless the output answers a conversation."""
        return self.feed.marks

    @property
    def key(self) -> str:
        """Prefix of the ids of tool calls."""
        return self.feed.key

    def cancel(self) -> None:
        """End it soon, unless it has ended."""
        if not self.feed.has_ended:
            self.thread.cancel(self.feed)

    async def arrivals(self) -> AsyncGenerator[Sequence[Token], None]:
        """Tokens as they arrive, one or several at a time. Raises ApiError."""
        at = 0
        while await self.feed.wait_async(at):
            tokens = self.feed.tokens[at:]
            at += len(tokens)
            yield tokens
        if self.feed.error is not None:
            raise ApiError.of(self.feed.error)


class Backend:
    """Used only in the event loop."""

    def __init__(
        self,
        thread: EngineThread,
        usual: SamplingOf,
        n_predict: int,
        speculation: SpeculationConfig,
        n_slots: int,
        n_waiting: int,
    ) -> None:
        """`usual`, `n_predict`: for settings that requests omit. At most `n_slots` requests are served at a time, and
        `n_waiting` more are accepted."""
        self.totals = Totals()
        self.n_slots = n_slots
        self.n_predict = n_predict
        self.n_ctx = 0
        """KV cells, shared by all requests; 0 before the model is loaded."""
        self.model: ModelInfo | None = None
        """None before it is loaded."""
        self.began = time.time()
        self.occupancy = Occupancy()
        self._measured_at = -math.inf
        self._n_measured: int | None = None
        """Number of restarts when the ranks' clocks were last compared."""
        self.slots = Slots(n_slots)
        self.thread = thread
        self._usual = usual
        self.sampling = SamplingConfig()
        """Defaults for settings that requests omit. They are known when the model is loaded."""
        self.speculation = speculation
        """Speculation of all requests."""
        self._n_waiting = n_waiting
        self._is_loaded = False
        self._is_stopping = False
        self._open: set[Generation] = set()
        """Outputs whose answers have not been sent completely."""
        self._is_idle = asyncio.Event()
        self._is_idle.set()

    # State

    @property
    def status(self) -> Status:
        """The current state."""
        if self._is_stopping:
            return Status.STOPPING
        if not self._is_loaded:
            return Status.LOADING
        return Status.RESTARTING if self.thread.is_restarting else Status.OK

    @property
    def progress(self) -> float:
        """How much of the weights is loaded, 0 to 1."""
        ranks = list(self.thread.ranks)
        n_bytes = sum(rank.load_bytes for rank in ranks)
        return min(sum(rank.loaded_bytes for rank in ranks) / n_bytes, 1.0) if n_bytes else 0.0

    @property
    def open(self) -> Collection[Generation]:
        """Outputs whose answers have not been sent completely."""
        return self._open

    def measure(self) -> None:
        """Ask the ranks for their memory, at most every ten seconds, and once after each start for their clocks."""
        now = time.monotonic()
        if self.status is not Status.OK or now < self._measured_at + _MEASURE_S:
            return
        self._measured_at = now
        if self._n_measured == self.thread.n_restarts:
            self.thread.ask(lambda engine: engine.measure())
        else:
            self._n_measured = self.thread.n_restarts
            self.thread.ask(_measure_all)

    async def load(self, prepare: Callable[[], Awaitable[None]] | None = None) -> None:
        """Wait for the model, then for `prepare`. Raises the error if loading fails."""
        await self.thread.loaded.wait_async(None)
        if self.thread.loaded.error is not None:
            raise self.thread.loaded.error
        asked = self.thread.ask(lambda engine: (self._usual(engine.sampling), engine.n_ctx, engine.model))
        found = await asyncio.wrap_future(asked)
        self.sampling, self.n_ctx, self.model = found
        if prepare is not None:
            await prepare()
        self._is_loaded = True

    async def failed(self) -> GgpipeError:
        """Wait until the engine ends, and return the reason."""
        await self.thread.ended.wait_async(None)
        assert self.thread.ended.error is not None
        return self.thread.ended.error

    async def drain(self, limit_s: float) -> None:
        """Refuse new requests, and wait until all are answered. Those that take longer are cut off."""
        self._is_stopping = True
        try:
            async with asyncio.timeout(limit_s):
                await self._is_idle.wait()
        except TimeoutError:
            self.cut_off()
            await self._is_idle.wait()

    def cut_off(self) -> None:
        """End all outputs as they are."""
        for generation in self._open:
            generation.cancel()

    # Requests

    def check(self) -> None:
        """Raises ApiError while requests are refused."""
        match self.status:
            case Status.LOADING:
                raise ApiError(503, "Loading model")
            case Status.STOPPING:
                raise ApiError(503, "the server is shutting down")

    async def ask(self, question: Callable[[EngineClient], T]) -> T:
        """The engine's answer to a question. Raises ApiError for wrong input."""
        try:
            return await asyncio.wrap_future(self.thread.ask(question))
        except GgpipeError as e:
            raise ApiError.of(e) from e
        except (UnicodeError, OverflowError, ValueError) as e:  # not UTF-8, or a number that is too large
            raise ApiError(400, f"the request cannot be passed on to the model: {e}") from e

    async def tokenize(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt."""
        self._check_size(len(text))
        return await self.ask(lambda engine: engine.tokenize(text))

    async def tokenize_part(self, text: str) -> tuple[int, ...]:
        """Tokens of a text within a prompt: without those that begin every prompt."""
        tokens, begun = await self.tokenize(text), await self.tokenize("")
        return tokens[len(begun) :] if tokens[: len(begun)] == begun else tokens

    async def prompt_texts(self, generations: Sequence[Generation]) -> dict[int, str]:
        """The text of each prompt of these outputs, special tokens included, by the prompt's index."""
        prompts = {one.prompt: one.feed.prompt for one in generations}
        return {
            index: b"".join(await self.detokenize(tokens, special=True)).decode("utf-8", "replace")
            for index, tokens in prompts.items()
        }

    async def tokenize_chat(self, conversation: Conversation) -> ChatPrompt:
        """A conversation, rendered and tokenized."""
        self._check_size(size_of(conversation))
        return await self.ask(lambda engine: engine.tokenize_chat(conversation))

    def _check_size(self, n_bytes: int) -> None:
        """Raises ApiError for a prompt that is clearly too long, since all requests wait while one is tokenized."""
        if n_bytes > _MOST_PER_CELL * self.n_ctx + _MOST_FIXED:
            raise ApiError.too_long(self.n_ctx)

    async def detokenize(self, tokens: Sequence[int], special: bool = False) -> tuple[bytes, ...]:
        """The text of each token. Special tokens have text only with `special`."""
        return await self.ask(lambda engine: engine.detokenize(tokens, special))

    async def stop_string(self, generation: Generation) -> str:
        """The stop string that ended an output; empty if none did."""
        if generation.stats.finish is not Finish.STOP_STRING:
            return ""
        pieces = await self.detokenize([token.id for token in generation.feed.tokens])
        text = b"".join(pieces).decode("utf-8", "replace")
        found = [(text.find(stop), stop) for stop in generation.spec.sampling.stop if stop in text]
        return min(found)[1] if found else ""

    async def begin(
        self, specs: Sequence[RequestSpec], n_choices: int = 1, slot: int = -1, names: Mapping[str, str] | None = None
    ) -> list[Generation]:
        """Submit requests, and wait until all are accepted. Each group of `n_choices` has the same prompt. `slot`: the
        slot to use if it is free; -1: any. `names`: of settings in the request's body, where they differ.

        Raises ApiError if too many requests wait, or if one cannot be served; then none is. A user's only request may
        exceed the limit, by up to `n_slots` requests.
        """
        self._check_room(len(specs), specs[0].user)
        for spec in specs[::n_choices]:
            self._check_size(size_of(spec.prompt))
        generations = [self._submit(index, index // n_choices, spec) for index, spec in enumerate(specs)]
        with self._counted(generations):
            try:
                for generation in generations:
                    await generation.feed.wait_for_answer()
                    if generation.feed.error is not None:
                        raise ApiError.of(generation.feed.error.renamed(names or {}))
            except BaseException:
                for generation in generations:
                    generation.cancel()
                raise
        for generation in generations:
            if generation.spec.pooling is None:
                self.slots.begin(SlotRequest(feed=generation.feed, spec=generation.spec, wanted=slot))
        return generations

    def _submit(self, index: int, prompt: int, spec: RequestSpec) -> Generation:
        stats = RequestStats()
        feed = Feed(lambda: self.totals.add(stats, self.thread.ranks) if feed.is_accepted else None)
        feed.stats = stats
        self.thread.submit(feed, lambda _: spec)
        return Generation(index=index, prompt=prompt, spec=spec, feed=feed, thread=self.thread)

    @property
    def n_fair(self) -> int:
        """How many of one client's requests may be submitted at once, so that other clients get a turn."""
        return self.n_slots + self._n_waiting // 4

    def _check_room(self, n_new: int, user: str) -> None:
        """Raises ApiError if too many requests wait."""
        self.check()
        n_most = self.n_slots + self._n_waiting
        if n_new > n_most:
            raise ApiError(400, f"{n_new} outputs are too many for one request: ask for at most {n_most}")
        is_only = n_new == 1 and not any(one.spec.user == user and not one.feed.has_ended for one in self._open)
        if self.thread.n_active + n_new > n_most + (self.n_slots if is_only else 0):
            raise ApiError(503, f"{self.thread.n_active} requests are running or waiting: try again later")

    async def order(self, make: Callable[[int], PrefixOrder]) -> int:
        """Save, restore or erase a prefix. Returns the size of its files in bytes. Raises GgpipeError."""
        feed = Feed()
        self.thread.order(feed, make)
        try:
            await feed.wait_async(None)
        finally:
            if not feed.has_ended:
                self.thread.cancel(feed)
        if feed.error is not None:
            raise feed.error
        return feed.n_saved_bytes

    @contextmanager
    def answering(self, generations: Sequence[Generation]) -> Iterator[None]:
        """A context in which outputs are sent to a client. Any that have not ended by its end are cancelled."""
        with self._counted(generations):
            try:
                yield
            finally:
                for generation in generations:
                    generation.cancel()

    @contextmanager
    def _counted(self, generations: Sequence[Generation]) -> Iterator[None]:
        """A context in which the server does not end, since a client waits for these outputs."""
        self._is_idle.clear()
        self._open.update(generations)
        try:
            yield
        finally:
            self._open.difference_update(generations)
            if not self._open:
                self._is_idle.set()


def size_of(prompt: RequestPrompt) -> int:
    """Approximate size of a prompt in bytes. A conversation counts as JSON."""
    match prompt:
        case bytes():
            return len(prompt)
        case Conversation():
            return len(dumps((prompt.messages, prompt.tools, prompt.further)))
    return sum(len(part) if isinstance(part, bytes) else 1 for part in prompt)


def _measure_all(engine: EngineClient) -> None:
    engine.align_clocks()
    engine.measure()
