"""The messages between a front end and the head of its ranks, as typed msgpack.

| phase     | the front end sends | the head sends                                                |
|-----------|---------------------|---------------------------------------------------------------|
| start     |                     | Ready; of a rank that cannot start: RanksFailed               |
| loading   | Interrupt           | LoadProgress …, EngineLoaded                                  |
| serving   | SubmitRequest       | RequestAccepted, TokenReady …, RequestFigures …, RequestEnded |
|           |                     | RequestRefused instead                                        |
|           | SavePrefix,         | PrefixDone, or RequestRefused                                 |
|           | RestorePrefix,      |                                                               |
|           | ErasePrefix         |                                                               |
|           | CancelRequest       |                                                               |
|           | Tokenize            | Tokenized, or NotAnswered                                     |
|           | TokenizeChat        | ChatTokenized, or NotAnswered                                 |
|           | Detokenize          | Detokenized, or NotAnswered                                   |
|           | Measure             | Measured                                                      |
| profiling | Interrupt           | Profiled                                                      |
| any time  | EndRanks            | UserLine, Alive (when silent for a second), RanksFailed       |

Events of requests are in `events`, orders for prefixes in `ggpipe/core/prefixes.py`. Times are the head's
`time.monotonic`; those of a span are its own rank's.
"""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from ggpipe.channel.events import (
    ChannelMessage,
    Failure,
    RequestAccepted,
    RequestEnded,
    RequestFigures,
    RequestRefused,
    Sendable,
    TokenReady,
)
from ggpipe.cluster.profile import Profile
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prefixes import ErasePrefix, PrefixDone, RestorePrefix, SavePrefix
from ggpipe.core.prompt import Conversation
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import RunError, UsageError, Wording
from ggpipe.stats.records import RankStats
from ggpipe.text.chat.conversation import ChatPrompt

VERSION = 20
"""Version of the messages and of their transport. Increase it when either changes."""


@dataclass(frozen=True, kw_only=True)
class ModelInfo:
    """The target's metadata, for clients of a server. 0 or empty: unknown."""

    chat_template: str = ""
    """The file's default template; empty if it has none."""
    bos_token: str = ""
    """Text of the token that begins a prompt."""
    eos_token: str = ""
    """Text of the token that ends the output."""
    end_tokens: tuple[int, ...] = ()
    """All tokens that end the output."""
    vocab_type: int = 0
    """libllama's number for the kind of tokenizer."""
    n_vocab: int = 0
    """Tokens in the vocabulary."""
    n_ctx_train: int = 0
    """Context in tokens that it was trained with."""
    n_embd: int = 0
    """Width of the hidden state."""
    n_params: int = 0
    """Number of weights."""
    n_bytes: int = 0
    """Size of all weights in bytes."""
    pooling: str = ""
    """llama.cpp's name of the pooling for embeddings; empty if the file has none."""
    fingerprint: str = ""
    """See `ModelFile.fingerprint`."""


# From the front end


class SubmitRequest(ChannelMessage, frozen=True):
    """Serve a request, under this id."""

    request: int
    spec: RequestSpec


class CancelRequest(ChannelMessage, frozen=True):
    """End a request soon (RequestEnded follows), or an order (PrefixDone follows)."""

    request: int


class Tokenize(ChannelMessage, frozen=True):
    """Answer with Tokenized."""

    text: bytes
    """UTF-8, except for invalid bytes of the user's text."""


class TokenizeChat(ChannelMessage, frozen=True):
    """Answer with ChatTokenized."""

    conversation: Conversation


class Detokenize(ChannelMessage, frozen=True):
    """Answer with Detokenized."""

    tokens: tuple[int, ...]
    special: bool = False
    """Whether special tokens have text."""


class Measure(ChannelMessage, frozen=True):
    """Ask all ranks for CPU time and memory, or for their clocks if `clocks`. Answered with Measured."""

    clocks: bool


class Interrupt(ChannelMessage, frozen=True):
    """Stop loading, or measuring."""


class EndRanks(ChannelMessage, frozen=True):
    """End all ranks."""


FromFrontEnd = (
    SubmitRequest | SavePrefix | RestorePrefix | ErasePrefix | CancelRequest | Tokenize | TokenizeChat | Detokenize
    | Measure | Interrupt | EndRanks
)  # fmt: skip


# From the head


class Ready(ChannelMessage, frozen=True):
    """The ranks are connected, and nothing is loaded."""

    place: str
    """The head's rank and host."""
    now_s: float
    """Time on the head's clock."""


class LoadProgress(ChannelMessage, frozen=True):
    """Progress of the ranks' loading."""

    ranks: tuple[RankStats, ...]


class EngineLoaded(ChannelMessage, frozen=True, kw_only=True):
    """The engine is ready for requests."""

    ranks: tuple[RankStats, ...]
    n_ctx: int
    can_speculate: bool
    warnings: tuple[Wording, ...]
    sampling: SamplingConfig
    """See `EngineClient.sampling`."""
    model: ModelInfo


class NotAnswered(ChannelMessage, frozen=True):
    """A question failed."""

    why: Failure


class Tokenized(ChannelMessage, frozen=True):
    """The answer to Tokenize."""

    tokens: tuple[int, ...]


class ChatTokenized(ChannelMessage, frozen=True):
    """The answer to TokenizeChat."""

    prompt: ChatPrompt


class Detokenized(ChannelMessage, frozen=True):
    """The answer to Detokenize."""

    pieces: tuple[bytes, ...]


class Measured(ChannelMessage, frozen=True):
    """The answer to Measure."""

    ranks: tuple[RankStats, ...]


class Profiled(ChannelMessage, frozen=True):
    """The ranks have measured themselves, and are about to end."""

    profile: Profile


class UserLine(ChannelMessage, frozen=True):
    """A line for the user."""

    text: str | Wording


class Alive(ChannelMessage, frozen=True):
    """The head's process is alive."""


class RanksFailed(ChannelMessage, frozen=True):
    """The ranks end with this error."""

    why: Failure


FromHead = (
    Ready | LoadProgress | EngineLoaded | RequestAccepted | TokenReady | RequestFigures | RequestEnded | RequestRefused
    | PrefixDone | Tokenized | ChatTokenized | Detokenized | NotAnswered | Measured | Profiled | UserLine | Alive
    | RanksFailed
)  # fmt: skip

_ENCODER = msgspec.msgpack.Encoder()
_FROM_FRONT_END: msgspec.msgpack.Decoder[FromFrontEnd] = msgspec.msgpack.Decoder(FromFrontEnd)
_FROM_HEAD: msgspec.msgpack.Decoder[FromHead] = msgspec.msgpack.Decoder(FromHead)


def encode(message: Sendable) -> bytes:
    """A message as bytes. Raises UsageError for values that cannot be encoded, such as users' template arguments."""
    try:
        return _ENCODER.encode(message)
    except (TypeError, ValueError, OverflowError, RecursionError) as e:
        raise UsageError(
            f"a value cannot be sent to the ranks ({e}): use JSON types, and integers of at most 64 bits"
        ) from e


def from_front_end(payload: bytes) -> FromFrontEnd:
    """The inverse of `encode`. Raises RunError for bytes that are not a front end's message."""
    try:
        return _FROM_FRONT_END.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as e:
        raise _unreadable(e) from e


def from_head(payload: bytes) -> FromHead:
    """The inverse of `encode`. Raises RunError for bytes that are not a head's message."""
    try:
        return _FROM_HEAD.decode(payload)
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as e:
        raise _unreadable(e) from e


def _unreadable(error: Exception) -> RunError:
    why = " ".join(str(error).split())
    return RunError(f"unreadable message between front end and head ({why}): use one ggpipe everywhere")
