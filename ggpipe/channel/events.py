"""Events of requests, which the head's engine makes. Front ends get them unchanged, in one process or over a channel.

A request's first event is `RequestAccepted` or `RequestRefused`. Any number of `TokenReady` and one `RequestEnded`
follow after `RequestAccepted`. An order (`ggpipe/core/prefixes.py`) gets one `PrefixDone` or `RequestRefused`. Ids are
the front end's, times the head's `time.monotonic`.
"""

from __future__ import annotations

import msgspec

from ggpipe import errors
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.messages import RunRecord
from ggpipe.core.prefixes import PrefixDone, PrefixOrder
from ggpipe.core.request import Counters, Finish, Token
from ggpipe.errors import BodyError, GgpipeError, PromptTooLong, RunError, SettingError, Wording
from ggpipe.stats.records import RankStats
from ggpipe.text.chat.answer import AnswerFormat


class ChannelMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of the messages between front end and head. The class name is sent as the tag."""


class RequestAccepted(ChannelMessage, frozen=True, kw_only=True):
    """A request was accepted; it is waiting or running."""

    request: int
    prompt: tuple[int, ...]
    """Tokens of the prompt; empty if it was submitted as tokens."""
    answer_format: AnswerFormat | None
    """How reasoning and tool calls are marked; None unless the prompt is a conversation."""
    sampling: SamplingConfig | None
    """The sampling settings if a conversation changed them; else None."""
    seed: int
    speculation: SpeculationConfig
    """Adjusted to the models that are loaded."""
    arrived_s: float
    ranks: tuple[RankStats, ...]
    """The ranks that serve it; see `RequestStats.ranks`."""
    warnings: tuple[Wording, ...] = ()
    """What was ignored of its JSON schema, a line each."""


class TokenReady(ChannelMessage, frozen=True):
    """The next token of a request, and when it was sampled."""

    request: int
    token: Token
    at_s: float


class RequestFigures(ChannelMessage, frozen=True, kw_only=True):
    """What was measured since the request's last RequestFigures. Sent every 0.1 s, before the first token, and before
    RequestEnded."""

    request: int
    counters: Counters
    """Totals. Tables by run and by lead are sent only before RequestEnded."""
    n_in_flight: int
    runs: tuple[RunRecord, ...]
    draft_runs: tuple[RunRecord, ...]
    started_s: float | None
    """See `RequestStats.started`."""
    ranks: tuple[RankStats, ...]
    """Each rank's work for the request."""
    totals: tuple[RankStats, ...]
    """Each rank's work for all requests."""
    n_cells: int
    """See `EngineClient.n_cells`."""


class RequestEnded(ChannelMessage, frozen=True, kw_only=True):
    """A request has ended."""

    request: int
    finish: Finish
    ended_s: float
    rest: str = ""
    """Text after the last token's, usually empty: a possible beginning of a stop string, or a replacement for an
    incomplete character."""
    not_saved: tuple[str, ...] = ()
    """Why parts of its prompt cache were not written, or why there is no embedding; one line each."""
    embedding: tuple[bytes, ...] = ()
    """The embedding if one was requested, not normalized: one vector of 32-bit floats, or one per token."""


class Failure(ChannelMessage, frozen=True, kw_only=True):
    """An error of `ggpipe.errors`, as data."""

    error: str
    """Name of its class."""
    message: Wording
    """The message; the problem of a SettingError."""
    field: str = ""
    """See `SettingError.field`."""
    advice: str | Wording = ""
    """See `SettingError.advice`."""
    param: str | None = None
    """See `BodyError.param`."""
    n_prompt: int = 0
    """See `PromptTooLong.n_prompt`."""
    n_ctx: int = 0
    """See `PromptTooLong.n_ctx`."""

    @staticmethod
    def of(error: GgpipeError) -> Failure:
        """An error as data."""
        name, message = type(error).__name__, error.wording
        match error:
            case SettingError(field=field, problem=problem, advice=advice):
                return Failure(error=name, message=Wording(problem), field=field, advice=advice)
            case PromptTooLong(n_prompt=n_prompt, n_ctx=n_ctx):
                return Failure(error=name, message=message, n_prompt=n_prompt, n_ctx=n_ctx)
            case BodyError(param=param):
                return Failure(error=name, message=message, param=param)
        return Failure(error=name, message=message)

    def to_error(self) -> GgpipeError:
        """The error, to raise."""
        kind = getattr(errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, GgpipeError)):
            return RunError(self.message)
        if issubclass(kind, PromptTooLong):
            return kind(self.n_prompt, self.n_ctx)
        if issubclass(kind, SettingError):
            return kind(self.field, self.message, self.advice)
        return kind(str(self.message), self.param) if issubclass(kind, BodyError) else kind(self.message)


class RequestRefused(ChannelMessage, frozen=True):
    """A request or an order was refused."""

    request: int
    why: Failure


RequestEvent = RequestAccepted | TokenReady | RequestEnded | RequestRefused | PrefixDone
"""Events that callers of an engine receive; `RequestFigures` only update statistics."""

Sendable = ChannelMessage | PrefixOrder | PrefixDone
"""Everything that can be sent over a channel."""
