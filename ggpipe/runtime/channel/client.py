"""An engine as front ends see it, wherever its ranks are: submit requests, take what comes, one or many at a time.

engine = started_ranks.load()
request = engine.submit(engine.tokenize("Once upon"), SamplingConfig(temp=0))
while request.is_active:
    for event in engine.step():
        ...

`runtime/session.py` is such an engine in this process, `remote.py` one behind a socket. A front end holds the requests
and all of their tokens itself, so nothing is lost with the ranks.
"""

from __future__ import annotations

import abc
import itertools
import time
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

from ggpipe.chat.conversation import ChatPrompt, Conversation
from ggpipe.config import SamplingConfig, SpeculationConfig
from ggpipe.core.request import PromptTask, Token, check_prompt
from ggpipe.errors import GgpipeError, UsageError
from ggpipe.metrics.stats import RankStats, RequestStats


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """What the target's file says of it, for those who ask a server; 0 where it does not."""

    chat_template: str = ""
    """The usual one of the file; nothing where it has none."""
    bos_token: str = ""
    """The text of the token that begins a text."""
    eos_token: str = ""
    """The text of the token that ends a text."""
    vocab_type: int = 0
    """libllama's number of the tokenizer's kind."""
    n_vocab: int = 0
    """Tokens of the vocabulary."""
    n_ctx_train: int = 0
    """Tokens of the context that it was trained with."""
    n_embd: int = 0
    """Numbers that a layer gives for each token."""
    n_params: int = 0
    """Numbers of all weights."""
    n_bytes: int = 0
    """Bytes of all weights."""
    pooling: str = ""
    """How its embeddings are made, as llama.cpp names it; nothing where the file does not say."""
    fingerprint: str = ""
    """As `ModelFile.fingerprint`."""


@dataclass(kw_only=True, eq=False)
class ClientRequest:
    """A request that was submitted, and what came of it so far."""

    id: int
    prompt: tuple[int, ...]
    sampling: SamplingConfig
    n_predict: int
    speculation: SpeculationConfig | None
    cache_prompt: bool
    user: str
    """As `Request.user`."""
    stats: RequestStats
    """Filled in while the request is served. Times are this process's `time.monotonic`."""
    given: tuple[int, ...] = ()
    """The first tokens of its text, which were known when it was submitted."""
    given_redrawn: tuple[int, ...] = ()
    """The places of those of them that were drawn at the second attempt."""
    tokens: list[Token] = field(default_factory=list)
    """Those behind them."""
    task: PromptTask | None = None
    """What is done instead of continuing the prompt."""
    n_resumed: int = 0
    """Tokens of its text that were known when the ranks that serve it now took it."""
    rest: str = ""
    """Text behind the last token's: what may have begun a stop string, and a replacement character for one whose last
    bytes never came; mostly empty."""
    not_saved: tuple[str, ...] = ()
    """Why parts of a prefix are not written to disk, or not restored, a line each."""
    n_saved_bytes: int = 0
    """Of the files of its task."""
    embedding: tuple[bytes, ...] = ()
    """Its embedding, not normalized, where that is its task: a vector of 32-bit floats, or one for each token."""
    error: GgpipeError | None = None
    """Why it was not taken, or not ended."""

    @property
    def is_active(self) -> bool:
        """It is waiting or being served."""
        return self.stats.finish is None and self.error is None

    @property
    def token_ids(self) -> tuple[int, ...]:
        """Its text so far."""
        return (*self.given, *(token.id for token in self.tokens))

    @property
    def redrawn(self) -> tuple[int, ...]:
        """The places of the tokens of its text that were drawn at the second attempt."""
        n_given = len(self.given)
        return (*self.given_redrawn, *(n_given + i for i, token in enumerate(self.tokens) if token.redrawn))


@dataclass(frozen=True, slots=True)
class TokenReady:
    """The next token of a request."""

    request: ClientRequest
    token: Token


@dataclass(frozen=True, slots=True)
class RequestEnded:
    """A request is over: `stats.finish` says why, or `error`."""

    request: ClientRequest


ClientEvent = TokenReady | RequestEnded


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
        warnings: tuple[str, ...] = (),
        sampling: SamplingConfig | None = None,
        model: ModelInfo | None = None,
    ) -> None:
        self.ranks = ranks
        """All ranks in order; behind them the draft inside the head's process, if there is one."""
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
        self.rest = ""
        """Of the last `generate`, as `ClientRequest.rest`."""
        self.not_saved: tuple[str, ...] = ()
        """Of the last `generate`, as `ClientRequest.not_saved`."""
        self._owner = owner
        self._ids = itertools.count(1)
        self._requests: dict[int, ClientRequest] = {}
        """Those that are active."""

    # Many requests

    def submit(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingConfig,
        n_predict: int = -1,
        speculation: SpeculationConfig | None = None,
        stats: RequestStats | None = None,
        cache_prompt: bool = True,
        tokens: tuple[int, ...] = (),
        redrawn: tuple[int, ...] = (),
        task: PromptTask | None = None,
        user: str = "",
    ) -> ClientRequest:
        """Have a prompt continued by at most `n_predict` tokens (-1: until the text ends or the context is full).

        `speculation` needs a draft model. `stats` is filled in while the request is served. With `cache_prompt`, what
        earlier requests computed of the prompt is not computed again. A bad prompt ends the request with its error.

        `tokens`: the first of its text, which other ranks generated with the same settings and seed. The text goes on
        behind them, and `n_predict` counts them. `redrawn`: the places of those that were drawn at the second attempt.
        `task`: what is done instead.

        `user`: whom it is for. Users take turns where requests wait.
        """
        request = ClientRequest(
            id=next(self._ids),
            prompt=prompt,
            sampling=sampling,
            n_predict=n_predict,
            speculation=speculation,
            cache_prompt=cache_prompt,
            user=user,
            stats=stats if stats is not None else RequestStats(),
            given=tokens,
            given_redrawn=redrawn,
            task=task,
        )
        self._take_in(request)
        return request

    def resume(self, request: ClientRequest) -> None:
        """Have an active request of another engine, whose ranks broke, go on from its tokens.

        With `exact` its text is the one of an undisturbed run. Its figures of the text are of all of it, those of runs
        and ranks begin again. Its id must not be that of an active request of this engine.
        """
        if request.stats.ranks:  # it was taken, so its seed is known
            request.sampling = replace(request.sampling, seed=request.stats.seed)
        request.stats.runs.clear()
        request.stats.draft_runs.clear()
        self._take_in(request)

    def _take_in(self, request: ClientRequest) -> None:
        self._requests[request.id] = request
        request.n_resumed = len(request.token_ids)
        self._submit(request)

    def cancel(self, request: ClientRequest) -> None:
        """End a request soon; `RequestEnded` follows, after tokens that are generated already. Does nothing when it is
        over."""
        if request.id in self._requests:
            self._cancel(request)

    def step(self) -> list[ClientEvent]:
        """Wait for something to happen, at most 0.1 s. Returns what came, in order.

        When the user wants an end, all active requests are cancelled. Raises RunError when a rank breaks, Terminated
        when this process is to end.
        """
        stopping = self._owner.stopping and bool(self._requests)
        if stopping:
            for request in tuple(self._requests.values()):
                self.cancel(request)
        events = self._step()
        for event in events:
            match event:
                case TokenReady(request, token):
                    request.tokens.append(token)
                case RequestEnded(request):
                    self._requests.pop(request.id, None)
        if stopping and not self._requests:
            self._owner.stopping = False  # only now: one that came while loading ends the first request
        return events

    def stop(self) -> None:
        """End the active requests soon, or the next ones, keeping what is generated. From any thread or a signal
        handler."""
        self._owner.stop()

    def tokenize_mixed(self, parts: Sequence[int | str]) -> tuple[int, ...]:
        """The tokens of a prompt of texts and tokens. Only a text at its beginning gets what the model's texts begin
        with, as BOS."""
        begun, tokens = self.tokenize(""), list[int]()
        for i, part in enumerate(parts):
            if isinstance(part, int):
                tokens.append(part)
            else:
                found = self.tokenize(part)
                tokens += found[len(begun) :] if i and found[: len(begun)] == begun else found
        return tuple(tokens)

    # One request

    def check_prompt(self, prompt: Sequence[int]) -> None:
        """Raises UsageError for a prompt that is empty or that leaves no room for an answer."""
        check_prompt(prompt, self.n_ctx)

    def generate(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingConfig,
        n_predict: int = -1,
        stats: RequestStats | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> Generator[Token, None, None]:
        """Continue a prompt, as `submit` does, with no other request beside it. `stop` ends it early.

        An iterator that is closed, or dropped, ends its request. Raises UsageError for a bad prompt or while another
        request is active, RunError when a rank breaks.
        """
        if self._requests:
            raise UsageError("generate serves one request at a time: exhaust the last iterator, or close it")
        request = self.submit(prompt, sampling, n_predict, speculation, stats)
        self.rest, self.not_saved = "", ()
        try:
            while request.is_active:
                for event in self.step():
                    match event:
                        case TokenReady(_, token):
                            yield token
                        case RequestEnded():
                            self.rest, self.not_saved = request.rest, request.not_saved
        except GeneratorExit:
            self._abandon(request)
            raise
        finally:
            if request.is_active:
                request.stats.ended = time.monotonic()
                self._requests.pop(request.id, None)
        if request.error is not None:
            raise request.error

    def _abandon(self, request: ClientRequest) -> None:
        """The caller wants no more of it: the next request must find nothing in the way."""
        if self.is_open:
            self.cancel(request)
            while request.is_active:
                self.step()

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
        """A conversation as the model reads it, and how the model will mark reasoning in its answer.

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
    def _cancel(self, request: ClientRequest) -> None: ...

    @abc.abstractmethod
    def _step(self) -> list[ClientEvent]: ...
