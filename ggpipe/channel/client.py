"""An engine as front ends see it, wherever its ranks are: submit requests, take what comes, one or many at a time.

engine = started_ranks.load()
request = engine.submit(RequestSpec(prompt=b"Once upon", sampling=SamplingConfig(temp=0)))
while request.is_active:
    for event in engine.step():
        ...

`engine/session.py` is such an engine in this process, `remote.py` one behind a socket. A front end holds the requests
and all of their tokens itself, so nothing is lost with the ranks.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from ggpipe.channel.events import RequestAccepted, RequestEnded, RequestEvent, RequestRefused, TokenReady
from ggpipe.channel.messages import ModelInfo
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.prefixes import ErasePrefix, PrefixOrder, RestorePrefix, SavePrefix
from ggpipe.core.prompt import Conversation, as_prompt
from ggpipe.core.request import Token, check_prompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import GgpipeError, UsageError, Wording
from ggpipe.stats.records import RankStats, RequestStats
from ggpipe.text.chat.answer import AnswerFormat
from ggpipe.text.chat.conversation import ChatPrompt


@dataclass(kw_only=True, eq=False)
class ClientRequest:
    """A request that was submitted, and what came of it so far."""

    id: int
    spec: RequestSpec
    """As it was stated."""
    stats: RequestStats
    """Filled in while the request is served. Times are this process's `time.monotonic`."""
    n_resumed: int
    """Tokens of its output that were known when the ranks that serve it now took it."""
    accepted: RequestAccepted | None = None
    """The answer to it; after a restart, the first one. None: it was not answered."""
    tokens: list[Token] = field(default_factory=list)
    """Its output, without `spec.resumed`."""
    ended: RequestEnded | None = None
    error: GgpipeError | None = None
    """Why it was not taken, or not ended."""

    @property
    def is_active(self) -> bool:
        """It is waiting or being served."""
        return self.ended is None and self.error is None

    @property
    def prompt(self) -> tuple[int, ...]:
        """The tokens of its prompt; empty while they are not known."""
        if self.accepted is not None and self.accepted.prompt:
            return self.accepted.prompt
        own = self.spec.prompt
        return tuple(part for part in own if isinstance(part, int)) if isinstance(own, tuple) else ()

    @property
    def answer_format(self) -> AnswerFormat | None:
        """How an answer to a conversation is marked, when it is accepted; None for other prompts."""
        return self.accepted.answer_format if self.accepted is not None else None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its output so far."""
        return (*self.spec.resumed, *(token.id for token in self.tokens))

    @property
    def rest(self) -> str:
        """Text after the last token's, as `RequestEnded.rest`."""
        return self.ended.rest if self.ended is not None else ""

    @property
    def continued(self) -> RequestSpec:
        """The request with all that is known of it now, for ranks that are to continue it."""
        if self.accepted is None:
            return self.spec
        n_before = len(self.spec.resumed)
        return msgspec.structs.replace(
            self.spec,
            prompt=self.prompt,
            sampling=replace(self.accepted.sampling or self.spec.sampling, seed=self.accepted.seed),
            resumed=self.token_ids,
            redrawn=(*self.spec.redrawn, *(n_before + i for i, token in enumerate(self.tokens) if token.redrawn)),
        )


class Stoppable(Protocol):
    """What the user's wish for an end is kept in."""

    stopping: bool
    """The user wants an end of what is going on."""

    def stop(self) -> None:
        """End loading, or the active requests, soon. From any thread or a signal handler."""


class StartedRanks(Stoppable, Protocol):
    """Ranks that run, with nothing loaded yet."""

    @property
    def ranks(self) -> Sequence[RankStats]:
        """All ranks in order; how far their loading is."""

    @property
    def is_loading(self) -> bool:
        """Ranks are started again while requests wait."""

    def load(self) -> EngineClient:
        """Load the models everywhere. Raises the first error that any rank met, RunError when the user stops it."""

    def is_ending(self) -> bool:
        """The user wants an end of what is going on, or this process is to end."""


class EngineClient(abc.ABC):
    """See the module's text. All methods but `stop` belong to one thread."""

    def __init__(
        self,
        owner: Stoppable,
        ranks: list[RankStats],
        n_ctx: int,
        can_speculate: bool,
        warnings: tuple[Wording, ...] = (),
        sampling: SamplingConfig | None = None,
        model: ModelInfo | None = None,
    ) -> None:
        self.ranks = ranks
        """All ranks in order; behind them the drafts inside the head's process, if there are any."""
        self.n_ctx = n_ctx
        """KV cells, for all requests together."""
        self.n_cells = 0
        """Those of them in use: of requests, kept prefixes and draft tokens."""
        self.can_speculate = can_speculate
        self.warnings = warnings
        self.sampling = sampling or SamplingConfig()
        """What the model's file recommends, and llama.cpp's defaults for the rest: for settings that the user leaves
        out."""
        self.model = model or ModelInfo()
        """The target."""
        self._owner = owner
        self._offset_s = 0.0
        """This process's clock minus the head's."""
        self._ids = itertools.count(1)
        self._requests: dict[int, ClientRequest] = {}
        """Those that are active."""
        self._orders: dict[int, PrefixOrder] = {}
        """Those that are not carried out."""

    # Many requests

    def submit(self, spec: RequestSpec, stats: RequestStats | None = None) -> ClientRequest:
        """Have a request served. `RequestAccepted` or `RequestRefused` is the first of its events; a refused one has
        its `error`.

        `spec.speculation` needs a draft model. `stats` is filled in while the request is served.
        """
        stats = stats if stats is not None else RequestStats()
        request = ClientRequest(id=next(self._ids), spec=spec, stats=stats, n_resumed=len(spec.resumed))
        self._requests[request.id] = request
        self._submit(request)
        return request

    def resume(self, request: ClientRequest) -> None:
        """Have an active request of another engine, whose ranks broke, go on from its tokens.

        With `exact` its text is the one of an undisturbed run. Its figures of the text are of all of it, those of runs
        and ranks begin again. Its id must not be that of an active request of this engine.
        """
        request.stats.runs.clear()
        request.stats.draft_runs.clear()
        request.n_resumed = len(request.token_ids)
        self._requests[request.id] = request
        self._submit(request)

    def save_prefix(self, tokens: tuple[int, ...], file: str) -> SavePrefix:
        """Have all ranks write a prefix to disk, under this name in their folders. It waits as requests do, and goes on
        when ranks are started again. `PrefixDone` or `RequestRefused` comes of it."""
        order = SavePrefix(next(self._ids), tokens, file)
        self._begin_order(order)
        return order

    def restore_prefix(self, tokens: tuple[int, ...], file: str) -> RestorePrefix:
        """Have all ranks put a prefix from disk into their caches; else as `save_prefix`."""
        order = RestorePrefix(next(self._ids), tokens, file)
        self._begin_order(order)
        return order

    def erase_prefix(self, tokens: tuple[int, ...]) -> ErasePrefix:
        """Have all ranks take what these tokens begin with out of their caches; else as `save_prefix`."""
        order = ErasePrefix(next(self._ids), tokens)
        self._begin_order(order)
        return order

    def _begin_order(self, order: PrefixOrder) -> None:
        self._orders[order.id] = order
        self._order(order)

    def cancel(self, request: ClientRequest | PrefixOrder) -> None:
        """End a request soon; `RequestEnded` follows, after tokens that are generated already. Or an order, unless
        ranks are at it; `PrefixDone` follows. Does nothing when it is over."""
        if request.id in self._requests or request.id in self._orders:
            self._cancel(request.id)

    def step(self) -> list[RequestEvent]:
        """Wait for something to happen, at most 0.1 s. Returns what came, in order.

        When the user wants an end, all that is active is cancelled. Raises RunError when a rank breaks, Terminated
        when this process is to end.
        """
        stopping = self._owner.stopping and bool(self._requests or self._orders)
        if stopping:
            for number in (*self._requests, *self._orders):
                self._cancel(number)
        events: list[RequestEvent] = []
        for event in self._step():
            if (own := self._requests.get(event.request)) is not None:
                self._note(event, own)
                events.append(event)
            elif self._orders.pop(event.request, None) is not None:
                events.append(event)
        if stopping and not (self._requests or self._orders):
            self._owner.stopping = False  # only now: one that came while loading ends the first request
        return events

    def _note(self, event: RequestEvent, request: ClientRequest) -> None:
        """Note what came of a request."""
        stats, offset_s = request.stats, self._offset_s
        match event:
            case RequestAccepted():
                stats.seed, stats.speculation, stats.ranks = event.seed, event.speculation, list(event.ranks)
                if request.accepted is None:
                    request.accepted = event
                    stats.n_prompt = len(request.prompt)
                    if not stats.token_times:
                        stats.arrived = event.arrived_s + offset_s
            case TokenReady(_, token, at_s):
                request.tokens.append(token)
                stats.token_times.append(at_s + offset_s)
                stats.drafted.append(token.drafted)
            case RequestEnded():
                stats.finish, stats.ended = event.finish, event.ended_s + offset_s
                request.ended = event
                self._requests.pop(request.id, None)
            case RequestRefused(_, why):
                request.error = why.to_error()
                self._requests.pop(request.id, None)

    def stop(self) -> None:
        """End the active requests soon, or the next ones, keeping what is generated. From any thread or a signal
        handler."""
        self._owner.stop()

    # One request

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raises UsageError for a prompt that is empty or that leaves no room for an answer."""
        check_prompt(prompt, self.n_ctx)

    def begin(self, spec: RequestSpec, stats: RequestStats | None = None) -> ClientRequest:
        """Submit a request, with no other one beside it, and wait until it is accepted.

        Raises UsageError for a bad prompt or while another request is active, RunError when a rank breaks.
        """
        if self._requests:
            raise UsageError("generate serves one request at a time: exhaust the last iterator, or close it")
        request = self.submit(spec, stats)
        with self._ending(request):
            while request.accepted is None and request.is_active:
                self.step()
        if request.error is not None:
            raise request.error
        return request

    def tokens(self, request: ClientRequest) -> Generator[Token, None, None]:
        """The tokens of a request that was begun. An iterator that is closed, or dropped, ends it. Raises RunError when
        a rank breaks."""
        with self._ending(request):
            at = 0
            while at < len(request.tokens) or request.is_active:
                if at == len(request.tokens):
                    self.step()
                    continue
                at += 1
                yield request.tokens[at - 1]

    def stream(self, spec: RequestSpec, stats: RequestStats | None = None) -> Generator[Token, None, None]:
        """`begin`, then `tokens`. `stop` ends it early."""
        yield from self.tokens(self.begin(spec, stats))

    def generate(
        self,
        prompt: str | Sequence[int],
        sampling: SamplingConfig,
        n_predict: int = -1,
        stats: RequestStats | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> Generator[Token, None, None]:
        """`stream` for a text or tokens, with what most programs state of a request."""
        spec = RequestSpec(
            prompt=as_prompt(prompt),
            sampling=sampling,
            n_predict=n_predict,
            speculation=speculation or SpeculationConfig(),
        )
        return self.stream(spec, stats)

    @contextlib.contextmanager
    def _ending(self, request: ClientRequest) -> Iterator[None]:
        """When the caller leaves, or a rank breaks, the next request finds nothing in the way."""
        try:
            yield
        except GeneratorExit:
            if self.is_open:
                self.cancel(request)
                while request.is_active:
                    self.step()
            raise
        except BaseException:
            if request.is_active:
                request.stats.ended = time.monotonic()
                self._requests.pop(request.id, None)
            raise

    # What the kinds of engines do in their own ways

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """The ranks were not asked to end yet."""

    @abc.abstractmethod
    def tokenize(self, text: str) -> tuple[int, ...]:
        """A prompt's tokens. Bytes that are not UTF-8 are surrogates in `text`."""

    @abc.abstractmethod
    def tokenize_chat(self, conversation: Conversation) -> ChatPrompt:
        """A conversation as the model reads it, and how the model will mark reasoning in its answer. Requests take
        conversations as they are: this is for those who want the tokens alone.

        Raises UsageError where the template does not take it.
        """

    @abc.abstractmethod
    def detokenize(self, tokens: Sequence[int], special: bool = False) -> tuple[bytes, ...]:
        """The text of each token, which may be part of a UTF-8 character. Special tokens have none, but with `special`.
        Raises UsageError for what is no token."""

    @abc.abstractmethod
    def measure(self) -> None:
        """Ask every rank what it has resident and what CPU time it took; fills `ranks`."""

    @abc.abstractmethod
    def align_clocks(self) -> None:
        """Fill in `clock_offset_s` of all ranks, from the quickest of some pings. One machine's ranks share a clock."""

    @abc.abstractmethod
    def idle(self, seconds: float) -> None:
        """Stay ready without a request. Raises when a rank breaks."""

    @abc.abstractmethod
    def _submit(self, request: ClientRequest) -> None: ...

    @abc.abstractmethod
    def _order(self, order: PrefixOrder) -> None: ...

    @abc.abstractmethod
    def _cancel(self, number: int) -> None: ...

    @abc.abstractmethod
    def _step(self) -> list[RequestEvent]: ...
