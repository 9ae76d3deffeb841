"""What a front end and the head of its ranks send each other. Msgpack, typed.

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

What comes of requests is in `events`, orders for prefixes are in `ggpipe/core/prefixes.py`. Times are the head's
`time.monotonic`, those of a span its own rank's.
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

VERSION = 19
"""Of the messages and of how they travel. Raise it whenever one of them changes."""


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


# From the front end


class SubmitRequest(ChannelMessage, frozen=True):
    """Serve a request, which has this number from now on."""

    request: int
    spec: RequestSpec


class CancelRequest(ChannelMessage, frozen=True):
    """End a request soon; its RequestEnded follows. Or an order: PrefixDone follows."""

    request: int


class Tokenize(ChannelMessage, frozen=True):
    """Answer with Tokenized."""

    text: bytes
    """UTF-8, as far as the user's text is."""


class TokenizeChat(ChannelMessage, frozen=True):
    """Answer with ChatTokenized."""

    conversation: Conversation


class Detokenize(ChannelMessage, frozen=True):
    """Answer with Detokenized."""

    tokens: tuple[int, ...]
    special: bool = False
    """Special tokens have texts, too."""


class Measure(ChannelMessage, frozen=True):
    """Ask all ranks for their CPU time and memory, and for their clocks if `clocks`; answer with Measured."""

    clocks: bool


class Interrupt(ChannelMessage, frozen=True):
    """The user wants an end of the loading, or of the measuring."""


class EndRanks(ChannelMessage, frozen=True):
    """End all ranks."""


FromFrontEnd = (
    SubmitRequest | SavePrefix | RestorePrefix | ErasePrefix | CancelRequest | Tokenize | TokenizeChat | Detokenize
    | Measure | Interrupt | EndRanks
)  # fmt: skip


# From the head


class Ready(ChannelMessage, frozen=True):
    """The ranks are connected; nothing is loaded."""

    place: str
    """The head's rank and host."""
    now_s: float
    """The head's clock."""


class LoadProgress(ChannelMessage, frozen=True):
    """How far the ranks' loading is."""

    ranks: tuple[RankStats, ...]


class EngineLoaded(ChannelMessage, frozen=True, kw_only=True):
    """The engine serves requests."""

    ranks: tuple[RankStats, ...]
    n_ctx: int
    can_speculate: bool
    warnings: tuple[Wording, ...]
    sampling: SamplingConfig
    """As `EngineClient.sampling`."""
    model: ModelInfo


class NotAnswered(ChannelMessage, frozen=True):
    """The answer to a question that cannot be answered."""

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
    """The ranks have measured themselves and are leaving."""

    profile: Profile


class UserLine(ChannelMessage, frozen=True):
    """A line for the user."""

    text: str | Wording


class Alive(ChannelMessage, frozen=True):
    """Nothing happened; the head's process is there."""


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
