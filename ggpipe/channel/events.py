"""What comes of a request: made by the head's engine, and the same up to the front end's user, on a channel or not.

`RequestAccepted` or `RequestRefused` comes first; after `RequestAccepted` any number of `TokenReady`, then
`RequestEnded`. Of an order (`ggpipe/core/prefixes.py`), `PrefixDone` or `RequestRefused` comes. Their numbers are the
front end's. Times are the head's `time.monotonic`.
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
    """Base of what a front end and the head send each other; the class name travels as the tag."""


class RequestAccepted(ChannelMessage, frozen=True, kw_only=True):
    """A request was taken; it waits, or is served."""

    request: int
    prompt: tuple[int, ...]
    """Its tokens, where it was given as something else; else empty."""
    answer_format: AnswerFormat | None
    """How reasoning and calls of tools are marked in an answer to a conversation; None: it was none."""
    sampling: SamplingConfig | None
    """How tokens are drawn, where a conversation changed what was stated; else None."""
    seed: int
    speculation: SpeculationConfig
    """As far as it is possible with the models that are loaded."""
    arrived_s: float
    ranks: tuple[RankStats, ...]
    """Those that serve it, as `RequestStats.ranks`."""


class TokenReady(ChannelMessage, frozen=True):
    """The next token of a request, and when it was drawn."""

    request: int
    token: Token
    at_s: float


class RequestFigures(ChannelMessage, frozen=True, kw_only=True):
    """What was measured of a request since its last RequestFigures; sent every tenth of a second, and before
    RequestEnded."""

    request: int
    counters: Counters
    """The totals; tables by run and by lead only before RequestEnded."""
    n_in_flight: int
    runs: tuple[RunRecord, ...]
    draft_runs: tuple[RunRecord, ...]
    started_s: float | None
    """As `RequestStats.started`."""
    ranks: tuple[RankStats, ...]
    """Each rank's work for the request."""
    totals: tuple[RankStats, ...]
    """Each rank's work for all requests."""
    n_cells: int
    """As `EngineClient.n_cells`."""


class RequestEnded(ChannelMessage, frozen=True, kw_only=True):
    """A request is over."""

    request: int
    finish: Finish
    ended_s: float
    rest: str = ""
    """Text after the last token's: what may have begun a stop string, and a replacement character for one whose last
    bytes never came; mostly empty."""
    not_saved: tuple[str, ...] = ()
    """Why parts of its prompt cache are not written to disk, or there is no embedding, a line each."""
    embedding: tuple[bytes, ...] = ()
    """Its embedding, not normalized, where that is wanted: a vector of 32-bit floats, or one for each token."""


class Failure(ChannelMessage, frozen=True, kw_only=True):
    """An error of the input, or of this moment, as it travels: what an error of `ggpipe.errors` is made of."""

    error: str
    """The name of its class."""
    message: Wording
    """Its message; of a SettingError, the problem."""
    field: str = ""
    """As `SettingError.field`."""
    advice: str | Wording = ""
    """As `SettingError.advice`."""
    param: str | None = None
    """As `BodyError.param`."""
    n_prompt: int = 0
    """As `PromptTooLong.n_prompt`."""
    n_ctx: int = 0
    """As `PromptTooLong.n_ctx`."""

    @staticmethod
    def of(error: GgpipeError) -> Failure:
        """An error, to be sent."""
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
        """The error, to be raised."""
        kind = getattr(errors, self.error, None)
        if not (isinstance(kind, type) and issubclass(kind, GgpipeError)):
            return RunError(self.message)
        if issubclass(kind, PromptTooLong):
            return kind(self.n_prompt, self.n_ctx)
        if issubclass(kind, SettingError):
            return kind(self.field, self.message, self.advice)
        return kind(str(self.message), self.param) if issubclass(kind, BodyError) else kind(self.message)


class RequestRefused(ChannelMessage, frozen=True):
    """A request or an order was not taken."""

    request: int
    why: Failure


RequestEvent = RequestAccepted | TokenReady | RequestEnded | RequestRefused | PrefixDone
"""What front ends' users see of requests and orders; `RequestFigures` go into their statistics."""

Sendable = ChannelMessage | PrefixOrder | PrefixDone
"""All that goes over a channel."""
