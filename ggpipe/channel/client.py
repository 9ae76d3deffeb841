"""An engine as front ends see it, wherever its ranks are: submit one or many requests, and receive their events.

engine = started_ranks.load()
request = engine.submit(RequestSpec(prompt=b"Once upon", sampling=SamplingConfig(temp=0)))
while request.is_active:
    for event in engine.step():
        ...

`engine/session.py` implements it in this process, `remote.py` over a socket. The front end keeps all requests with
their tokens, so nothing is lost with the ranks.
"""

from __future__ import annotations

import abc
import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import msgspec

from ggpipe.channel.events import RequestAccepted, RequestEnded, RequestEvent, RequestRefused, TokenReady
from ggpipe.channel.messages import ModelInfo
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.prefixes import PrefixOrder
from ggpipe.core.prompt import Conversation, as_prompt
from ggpipe.core.request import Token, check_prompt
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import GgpipeError, UsageError, Wording
from ggpipe.stats.records import RankStats, RequestStats
from ggpipe.text.chat.answer import AnswerFormat
from ggpipe.text.chat.conversation import ChatPrompt


@dataclass(kw_only=True, eq=False)
class ClientRequest:
    """A submitted request, and what has arrived so far."""

    id: int
    spec: RequestSpec
    """The request as it was submitted."""
    stats: RequestStats
    """Updated while the request is served. Times are this process's `time.monotonic`."""
    n_resumed: int
    """Tokens of its output that were known when the current ranks accepted it."""
    accepted: RequestAccepted | None = None
    """The first acceptance, if ranks were restarted since. None: not accepted so far."""
    tokens: list[Token] = field(default_factory=list)
    """The output, without `spec.resumed`."""
    ended: RequestEnded | None = None
    error: GgpipeError | None = None
    """Why it was refused, or failed."""

    @property
    def is_active(self) -> bool:
        """Whether it is waiting or running."""
        return self.ended is None and self.error is None

    @property
    def prompt(self) -> tuple[int, ...]:
        """Tokens of the prompt; empty while they are unknown."""
        if self.accepted is not None and self.accepted.prompt:
            return self.accepted.prompt
        own = self.spec.prompt
        return tuple(part for part in own if isinstance(part, int)) if isinstance(own, tuple) else ()

    @property
    def answer_format(self) -> AnswerFormat | None:
        """How reasoning and tool calls are marked; None until it is accepted, and unless it is a conversation."""
        return self.accepted.answer_format if self.accepted is not None else None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """The output so far."""
        return (*self.spec.resumed, *(token.id for token in self.tokens))

    @property
    def rest(self) -> str:
        """Text after the last token's; see `RequestEnded.rest`."""
        return self.ended.rest if self.ended is not None else ""

    @property
    def continued(self) -> RequestSpec:
        """The request with everything known about it, for other ranks to continue."""
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
    """Something that the user can stop."""

    stopping: bool
    """The user has asked to stop."""

    def stop(self) -> None:
        """Stop loading or the active requests soon. May be called from any thread or a signal handler."""


class StartedRanks(Stoppable, Protocol):
    """Running ranks, with nothing loaded yet."""

    @property
    def ranks(self) -> Sequence[RankStats]:
        """All ranks in order, with the progress of their loading."""

    @property
    def is_loading(self) -> bool:
        """Ranks are being restarted while requests wait."""

    def load(self) -> EngineClient:
        """Load the models on all ranks. Raises the first error of any rank, and RunError when the user stops it."""

    def is_ending(self) -> bool:
        """Whether the user has asked to stop, or this process should end."""


class EngineClient(abc.ABC):
    """An engine. Call all methods but `stop` from one thread."""

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
        """All ranks in order, followed by the draft models inside the head's process."""
        self.n_ctx = n_ctx
        """KV cells, shared by all requests."""
        self.n_cells = 0
        """KV cells in use by requests, kept prefixes and draft tokens."""
        self.can_speculate = can_speculate
        self.warnings = warnings
        self.sampling = sampling or SamplingConfig()
        """Settings that apply if the user omits them: the model's recommendations, or else llama.cpp's defaults."""
        self.model = model or ModelInfo()
        """The target model."""
        self._owner = owner
        self._offset_s = 0.0
        """This process's clock minus the head's."""
        self._ids = itertools.count(1)
        self._requests: dict[int, ClientRequest] = {}
        """Active requests by id."""
        self._orders: dict[int, PrefixOrder] = {}
        """Orders by id that have not been carried out."""

    # Many requests

    def submit(self, spec: RequestSpec, stats: RequestStats | None = None) -> ClientRequest:
        """Submit a request. Its first event is `RequestAccepted` or `RequestRefused`; a refused one has an `error`.

        `stats` is updated while the request is served.
        """
        stats = stats if stats is not None else RequestStats()
        request = ClientRequest(id=next(self._ids), spec=spec, stats=stats, n_resumed=len(spec.resumed))
        self._requests[request.id] = request
        self._submit(request)
        return request

    def resume(self, request: ClientRequest) -> None:
        """Continue an active request whose ranks died. Its id must not be in use by this engine.

        With `exact`, the output is the same as without the interruption. Statistics of the output cover all of it;
        those of runs and ranks start anew.
        """
        request.stats.runs.clear()
        request.stats.draft_runs.clear()
        request.n_resumed = len(request.token_ids)
        self._requests[request.id] = request
        self._submit(request)

    def order(self, make: Callable[[int], PrefixOrder]) -> PrefixOrder:
        """Have all ranks save, restore or erase a prefix. `make`: makes the order with the id that it gets. It waits as
        requests do, and continues when ranks are restarted. `PrefixDone` or `RequestRefused` follows."""
        order = make(next(self._ids))
        self._orders[order.id] = order
        self._order(order)
        return order

    def cancel(self, request: ClientRequest | PrefixOrder) -> None:
        """End a request soon: `RequestEnded` follows, after tokens that were already generated. Or an order, unless the
        ranks have started it: `PrefixDone` follows. Does nothing if it has ended."""
        if request.id in self._requests or request.id in self._orders:
            self._cancel(request.id)

    def step(self) -> list[RequestEvent]:
        """Wait at most 0.1 s for events, and return them in order.

        Cancels everything when the user asks to stop. Raises RunError when a rank breaks, and Terminated when this
        process should end.
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
            self._owner.stopping = False  # only now: a stop during loading ends the first request
        return events

    def _note(self, event: RequestEvent, request: ClientRequest) -> None:
        """Update a request with an event."""
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
                stats.drafted_by.append(token.drafters)
            case RequestEnded():
                stats.finish, stats.ended = event.finish, event.ended_s + offset_s
                request.ended = event
                self._requests.pop(request.id, None)
            case RequestRefused(_, why):
                request.error = why.to_error()
                self._requests.pop(request.id, None)

    def stop(self) -> None:
        """End the active requests soon, or else the next ones. May be called from any thread or a signal handler."""
        self._owner.stop()

    # One request

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raises UsageError for a prompt that is empty or leaves no room for output."""
        check_prompt(prompt, self.n_ctx)

    def begin(self, spec: RequestSpec, stats: RequestStats | None = None) -> ClientRequest:
        """Submit the only request, and wait until it is accepted.

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
        """The tokens of a request from `begin`. Closing or dropping the iterator ends the request. Raises RunError when
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
        """`stream` for a string or tokens, with the most common settings of a request."""
        spec = RequestSpec(
            prompt=as_prompt(prompt),
            sampling=sampling,
            n_predict=n_predict,
            speculation=speculation or SpeculationConfig(),
        )
        return self.stream(spec, stats)

    @contextlib.contextmanager
    def _ending(self, request: ClientRequest) -> Iterator[None]:
        """Clean up if the caller leaves or a rank breaks, so that the next request can begin."""
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

    # For subclasses

    @property
    @abc.abstractmethod
    def is_open(self) -> bool:
        """Whether the ranks have not been asked to end."""

    @abc.abstractmethod
    def tokenize(self, text: str) -> tuple[int, ...]:
        """Tokens of a prompt. Bytes that are not UTF-8 are surrogates in `text`."""

    @abc.abstractmethod
    def tokenize_chat(self, conversation: Conversation) -> ChatPrompt:
        """A conversation, rendered and tokenized, for callers that want only the tokens: `submit` accepts
        conversations.

        Raises UsageError if the template refuses it.
        """

    @abc.abstractmethod
    def detokenize(self, tokens: Sequence[int], special: bool = False) -> tuple[bytes, ...]:
        """The text of each token, which may be part of a UTF-8 character. Special tokens have text only with `special`.
        Raises UsageError for ids that are not tokens."""

    @abc.abstractmethod
    def measure(self) -> None:
        """Ask every rank for its resident memory and CPU time, and update `ranks`."""

    @abc.abstractmethod
    def align_clocks(self) -> None:
        """Set `clock_offset_s` of all ranks, from the fastest of several pings. Ranks of one machine share a clock."""

    @abc.abstractmethod
    def idle(self, seconds: float) -> None:
        """Wait without a request. Raises an error when a rank breaks."""

    @abc.abstractmethod
    def _submit(self, request: ClientRequest) -> None: ...

    @abc.abstractmethod
    def _order(self, order: PrefixOrder) -> None: ...

    @abc.abstractmethod
    def _cancel(self, number: int) -> None: ...

    @abc.abstractmethod
    def _step(self) -> list[RequestEvent]: ...
