"""What a front end and the head of its ranks send each other. Msgpack, typed.

| phase    | the front end sends | the head sends                                    |
|----------|---------------------|---------------------------------------------------|
| start    |                     | Ready; of a rank that cannot start: Failed        |
| loading  | Stop                | Loading …, Loaded                                 |
| serving  | Submit              | Started, NewTokens …, Figures …, Ended            |
|          |                     | Refused instead                                   |
|          | Cancel              |                                                   |
|          | Tokenize            | Tokenized                                         |
|          | TokenizeChat        | ChatTokenized                                     |
|          | Detokenize          | Detokenized                                       |
|          | Measure             | Measured                                          |
| profiling| Stop                | Profiled                                          |
| any time | Quit                | Line, Alive (when silent for a second), Failed    |

A request's number is the front end's. Times are the head's `time.monotonic`, those of a span its own rank's.
"""

from __future__ import annotations

import msgspec

from ggpipe import errors
from ggpipe.chat.conversation import ChatPrompt, Conversation
from ggpipe.cluster.profile import Profile
from ggpipe.config import SamplingConfig, SpeculationConfig
from ggpipe.core.messages import RunRecord
from ggpipe.core.request import Counters, Finish, PromptTask, Token
from ggpipe.errors import GgpipeError, RunError, UsageError
from ggpipe.metrics.stats import RankStats
from ggpipe.runtime.channel.client import ModelInfo

VERSION = 16
"""Of the messages and of how they travel. Raise it whenever one of them changes."""


class Message(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all; the class name travels as the tag."""


# From the front end


class Submit(Message, frozen=True, kw_only=True):
    """Continue a prompt, behind these tokens of its text if there are any."""

    request: int
    prompt: tuple[int, ...]
    sampling: SamplingConfig
    n_predict: int
    speculation: SpeculationConfig | None
    cache_prompt: bool
    tokens: tuple[int, ...]
    redrawn: tuple[int, ...]
    """The places of those that were drawn at the second attempt."""
    task: PromptTask | None
    user: str
    """As `Request.user`."""


class Cancel(Message, frozen=True):
    """End a request soon; its Ended follows."""

    request: int


class Tokenize(Message, frozen=True):
    """Answer with Tokenized."""

    text: bytes
    """UTF-8, as far as the user's text is."""


class TokenizeChat(Message, frozen=True):
    """Answer with ChatTokenized."""

    conversation: Conversation


class Detokenize(Message, frozen=True):
    """Answer with Detokenized."""

    tokens: tuple[int, ...]
    special: bool = False
    """Special tokens have texts, too."""


class Measure(Message, frozen=True):
    """Ask all ranks for their CPU time and memory, and for their clocks if `clocks`; answer with Measured."""

    clocks: bool


class Stop(Message, frozen=True):
    """The user wants an end of the loading, or of the measuring."""


class Quit(Message, frozen=True):
    """End all ranks."""


FromFrontEnd = Submit | Cancel | Tokenize | TokenizeChat | Detokenize | Measure | Stop | Quit


# From the head


class Ready(Message, frozen=True):
    """The ranks are connected; nothing is loaded."""

    place: str
    """The head's rank and host."""
    now_s: float
    """The head's clock."""


class Loading(Message, frozen=True):
    """How far the ranks' loading is."""

    ranks: tuple[RankStats, ...]


class Loaded(Message, frozen=True, kw_only=True):
    """The engine serves requests."""

    ranks: tuple[RankStats, ...]
    n_ctx: int
    can_speculate: bool
    warnings: tuple[str, ...]
    sampling: SamplingConfig
    """As `EngineClient.sampling`."""
    model: ModelInfo


class Started(Message, frozen=True, kw_only=True):
    """A request was taken, as `RequestStats` has it."""

    request: int
    seed: int
    arrived_s: float
    speculation: SpeculationConfig
    ranks: tuple[RankStats, ...]


class NewTokens(Message, frozen=True):
    """The next tokens of a request, and when each was sampled."""

    request: int
    tokens: tuple[Token, ...]
    times_s: tuple[float, ...]


class Figures(Message, frozen=True, kw_only=True):
    """What was measured of a request since its last Figures; sent every tenth of a second, and before Ended."""

    request: int
    counters: Counters
    """The totals; tables by run and by lead only before Ended."""
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


class Ended(Message, frozen=True, kw_only=True):
    """A request is over."""

    request: int
    finish: Finish
    ended_s: float
    rest: str
    """As `ClientRequest.rest`."""
    not_saved: tuple[str, ...]
    """As `ClientRequest.not_saved`."""
    n_saved_bytes: int
    """As `ClientRequest.n_saved_bytes`."""
    embedding: tuple[bytes, ...]
    """As `ClientRequest.embedding`."""


class Refused(Message, frozen=True):
    """A request was not taken."""

    request: int
    error: str
    message: str


class Tokenized(Message, frozen=True):
    """The answer to Tokenize."""

    tokens: tuple[int, ...]


class ChatTokenized(Message, frozen=True):
    """The answer to TokenizeChat."""

    prompt: ChatPrompt


class Detokenized(Message, frozen=True):
    """The answer to Detokenize."""

    pieces: tuple[bytes, ...]


class Measured(Message, frozen=True):
    """The answer to Measure."""

    ranks: tuple[RankStats, ...]


class Profiled(Message, frozen=True):
    """The ranks have measured themselves and are leaving."""

    profile: Profile


class Line(Message, frozen=True):
    """A line for the user, which names settings as messages of errors do."""

    text: str


class Alive(Message, frozen=True):
    """Nothing happened; the head's process is there."""


class Failed(Message, frozen=True):
    """The ranks end with this error; `error` is the name of a class in `ggpipe.errors`."""

    error: str
    message: str

    @staticmethod
    def of(error: GgpipeError) -> Failed:
        """The message about an error."""
        return Failed(type(error).__name__, str(error))


FromHead = (
    Ready | Loading | Loaded | Started | NewTokens | Figures | Ended | Refused | Tokenized | ChatTokenized
    | Detokenized | Measured | Profiled | Line | Alive | Failed
)  # fmt: skip

_ENCODER = msgspec.msgpack.Encoder()
_FROM_FRONT_END: msgspec.msgpack.Decoder[FromFrontEnd] = msgspec.msgpack.Decoder(FromFrontEnd)
_FROM_HEAD: msgspec.msgpack.Decoder[FromHead] = msgspec.msgpack.Decoder(FromHead)


def encode(message: Message) -> bytes:
    """A message as bytes. Raises UsageError for values that none can hold, as in what users give to chat templates."""
    try:
        return _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise UsageError(
            f"a value cannot be sent to the ranks ({e}): give what JSON has, and numbers of 64 bits"
        ) from e


def from_front_end(payload: bytes) -> FromFrontEnd:
    """The inverse of `encode`. Raises RunError for bytes that are no message of a front end."""
    try:
        return _FROM_FRONT_END.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as e:
        raise _unreadable(e) from e


def from_head(payload: bytes) -> FromHead:
    """The inverse of `encode`. Raises RunError for bytes that are no message of a head."""
    try:
        return _FROM_HEAD.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as e:
        raise _unreadable(e) from e


def _unreadable(error: Exception) -> RunError:
    why = " ".join(str(error).split())
    return RunError(f"an unreadable message arrived between front end and head ({why}): use one ggpipe everywhere")


def error_of(failed: Failed | Refused) -> GgpipeError:
    """The error that the message is about."""
    kind = getattr(errors, failed.error, None)
    if isinstance(kind, type) and issubclass(kind, GgpipeError):
        return kind(failed.message)
    return RunError(failed.message)
