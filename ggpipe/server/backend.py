"""The engine as the server's event loop sees it: prompts in, texts out, and what is counted of them."""

from __future__ import annotations

import asyncio
import enum
import functools
import threading
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from ggpipe.api.engine_thread import EngineThread
from ggpipe.api.feed import Feed
from ggpipe.chat.conversation import ChatPrompt, Conversation
from ggpipe.chat.reasoning import ReasoningFormat
from ggpipe.config import SpeculationConfig
from ggpipe.core.request import Token, check_prompt
from ggpipe.errors import GgpipeError
from ggpipe.metrics.stats import RankStats, RequestStats
from ggpipe.options.sampling import SamplingOf
from ggpipe.runtime.channel.client import EngineClient
from ggpipe.sampling import SamplingConfig
from ggpipe.server.errors import ApiError

T = TypeVar("T")


class Status(enum.Enum):
    """What the server does."""

    LOADING = "loading"
    OK = "ok"
    RESTARTING = "restarting"
    """Ranks died, and new ones load; streams wait."""
    STOPPING = "stopping"
    """Running requests end, and no new ones begin."""


class Totals:
    """What was done for all requests that ended. Filled in by the engine's thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.n_requests = 0
        self.prompt_tokens = 0
        """Without those that the prefix cache had."""
        self.cached_tokens = 0
        self.prompt_s = 0.0
        """From arrival to the first token."""
        self.predicted_tokens = 0
        self.predicted_s = 0.0
        self.most_tokens = 0
        """Of a prompt and its text."""
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.drafts = 0
        """Runs with draft tokens that came back."""

    def add(self, stats: RequestStats) -> None:
        """A request has ended."""
        counters = stats.counters
        with self._lock:
            self.n_requests += 1
            self.cached_tokens += counters.cached_tokens
            self.prompt_tokens += stats.n_prompt - counters.cached_tokens if stats.n_generated else 0
            self.prompt_s += stats.ttft_s or 0.0
            self.predicted_tokens += stats.n_generated
            self.predicted_s += stats.decode_s
            self.most_tokens = max(self.most_tokens, stats.n_prompt + stats.n_generated)
            self.draft_tokens += counters.submitted_tokens
            self.accepted_tokens += counters.accepted_tokens
            self.drafts += counters.verified_runs


class Generation:
    """A text that is written."""

    def __init__(
        self, index: int, prompt: int, feed: Feed, marks: ReasoningFormat | None, cancel: Callable[[], None]
    ) -> None:
        """`index`, `prompt`: its number and its prompt's number, in one request. `marks`: how reasoning is marked in
        it."""
        self.index = index
        self.prompt = prompt
        self.feed = feed
        self.marks = marks
        self._cancel = cancel

    @property
    def stats(self) -> RequestStats:
        """Whole when it has ended."""
        return self.feed.stats

    def cancel(self) -> None:
        """End it soon, if it has not ended."""
        if not self.feed.has_ended:
            self._cancel()

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
        self.began = time.time()
        self._thread = thread
        self._usual = usual
        self._sampling = SamplingConfig()
        self._speculation = speculation
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
    def n_active(self) -> int:
        """Requests of the engine that have not ended, waiting ones too."""
        return self._thread.n_active

    @property
    def n_restarts(self) -> int:
        """How often ranks were started again."""
        return self._thread.n_restarts

    async def load(self) -> None:
        """Wait until the model is loaded. Raises what that failed with."""
        await self._thread.loaded.wait_async(None)
        if self._thread.loaded.error is not None:
            raise self._thread.loaded.error
        self._sampling, self.n_ctx = await self.ask(lambda engine: (self._usual(engine.sampling), engine.n_ctx))
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
        return await self.ask(lambda engine: engine.tokenize(text))

    async def tokenize_chat(self, conversation: Conversation) -> ChatPrompt:
        """A conversation as the model reads it."""
        return await self.ask(lambda engine: engine.tokenize_chat(conversation))

    async def detokenize(self, tokens: Sequence[int]) -> tuple[bytes, ...]:
        """The text of each token."""
        return await self.ask(lambda engine: engine.detokenize(tokens))

    def sampling(self, own: SamplingOf) -> SamplingConfig:
        """How tokens are drawn: as the server was started, with what a request says. Raises ApiError."""
        try:
            return own(self._sampling)
        except GgpipeError as e:
            raise ApiError.of(e) from e

    def begin(
        self,
        prompts: Sequence[tuple[tuple[int, ...], ReasoningFormat | None]],
        sampling: Sequence[SamplingConfig],
        n_predict: int,
        cache_prompt: bool,
    ) -> list[Generation]:
        """Have prompts continued, each once for each of `sampling`. Raises ApiError where too many wait already."""
        self.check()
        n_most, n_new = self.n_slots + self._n_waiting, len(prompts) * len(sampling)
        if self.n_active + n_new > n_most:
            raise ApiError(503, f"{self.n_active} requests are being served or wait: try again later")
        for tokens, _ in prompts:
            try:
                check_prompt(tokens, self.n_ctx)
            except GgpipeError as e:
                raise ApiError.of(e) from e
        generations: list[Generation] = []
        for prompt, (tokens, marks) in enumerate(prompts):
            for drawn in sampling:
                stats = RequestStats()
                feed = Feed(functools.partial(self.totals.add, stats))
                feed.stats = stats
                self._thread.submit(
                    feed, tokens, functools.partial(_given, drawn), n_predict, self._speculation, cache_prompt
                )
                cancel = functools.partial(self._thread.cancel, feed)
                generations.append(Generation(len(generations), prompt, feed, marks, cancel))
        return generations

    @contextmanager
    def answering(self, generations: Sequence[Generation]) -> Iterator[None]:
        """While these are sent to a client. Those that have not ended afterwards are cancelled."""
        self._n_answers += 1
        self._is_idle.clear()
        self._open.update(generations)
        try:
            yield
        finally:
            for generation in generations:
                generation.cancel()
                self._open.discard(generation)
            self._n_answers -= 1
            if not self._n_answers:
                self._is_idle.set()


def _given(drawn: SamplingConfig, _: SamplingConfig) -> SamplingConfig:
    return drawn
