"""Control messages between ranks: everything but runs, results and draft tokens. Msgpack after a version byte.

`loading_messages`, `profile_messages` and `weights_messages` have those of loading, of profiles and of weights.

| where                 | the head sends                | another rank sends                      |
|-----------------------|-------------------------------|-----------------------------------------|
| `engine/weights`      | ModelOutline or NotSent       | AskModel                                |
|                       | ModelBytes or NotSent         | ReadModel                               |
|                       | AllHaveModels                 | HasModels                               |
| `planning/auto`       |                               | RankFacts                               |
|                       | StartProfile (then a profile) |                                         |
|                       | UseSplit                      |                                         |
| `profiling/profile`   |                               | ProfileHello                            |
|                       | MeasureDraft                  | DraftMeasured                           |
|                       | MeasureAlone                  | AloneMeasured                           |
|                       | MeasureTogether               | ReadyToStop                             |
|                       | StopTogether                  | TogetherMeasured                        |
|                       | MeasureTurn                   | TurnMeasured                            |
|                       | MeasureLink                   | LinkMeasured                            |
|                       | MeasureSums                   | SumsMeasured                            |
|                       | MeasureDecodes                | DecodesMeasured                         |
|                       | EndProfile                    |                                         |
| `engine/loading`      |                               | Hello                                   |
|                       | LoadLayers                    | DraftVocab, StageLoading …, StageLoaded |
|                       | StartDraft                    |                                         |
| `engine/engine`       |                               | PrefixSaved                             |
| `engine/head`         | AskClock                      | Clock                                   |
|                       | AskUsage                      | Usage                                   |
|                       | Quit                          |                                         |
| at any time           | Abort                         | RankFailed                              |
| `transport/heartbeat` | Beat, Abort                   | Beat                                    |
"""

from __future__ import annotations

import msgspec

from ggpipe.config.layer_split import LayerSplit
from ggpipe.errors import RunError, Wording
from ggpipe.transport.base import Payload
from ggpipe.transport.loading_messages import (
    ControlMessage,
    DraftVocab,
    Hello,
    LoadLayers,
    StageLoaded,
    StageLoading,
    StartDraft,
)
from ggpipe.transport.profile_messages import (
    AloneMeasured,
    DecodesMeasured,
    DraftMeasured,
    EndProfile,
    LinkMeasured,
    MeasureAlone,
    MeasureDecodes,
    MeasureDraft,
    MeasureLink,
    MeasureSums,
    MeasureTogether,
    MeasureTurn,
    ProfileHello,
    ReadyToStop,
    StopTogether,
    SumsMeasured,
    TogetherMeasured,
    TurnMeasured,
)
from ggpipe.transport.weights_messages import (
    AllHaveModels,
    AskModel,
    HasModels,
    ModelBytes,
    ModelOutline,
    NotSent,
    ReadModel,
)

VERSION = 16
"""Version of the format. Increment it whenever a message changes."""


# Serving


class AskClock(ControlMessage, frozen=True):
    """Answer with Clock at once."""


class Clock(ControlMessage, frozen=True):
    """A rank's `time.monotonic`."""

    now_s: float


class PrefixSaved(ControlMessage, frozen=True):
    """A rank is through with what a request saves or restores."""

    request: int
    problem: str
    """Why its file is as it was, or not restored; empty when that was done."""
    n_bytes: int
    """Size of the file."""


class AskUsage(ControlMessage, frozen=True):
    """Answer with Usage."""


class Usage(ControlMessage, frozen=True):
    """What a rank's process has used."""

    cpu_s: float
    resident_bytes: int


class Quit(ControlMessage, frozen=True):
    """Free the stage and exit."""

    exit_code: int


# Choosing the split


class RankFacts(ControlMessage, frozen=True, kw_only=True):
    """What the speed of a rank depends on, and its memory."""

    host: str
    target: str
    """The fingerprint of the target's file."""
    drafts: tuple[str, ...]
    """The fingerprint of each draft model's file."""
    threads: tuple[int, int]
    """For runs of one token, and for longer ones."""
    ranks_on_host: int
    cpu: str
    cores: int
    cpu_features: tuple[str, ...]
    ggpipe: str
    libllama: str
    memory_bytes: int
    """Available before anything is loaded."""


class StartProfile(ControlMessage, frozen=True):
    """No profile of these ranks is known: measure one now, all together."""


class UseSplit(ControlMessage, frozen=True):
    """How the layers are divided."""

    target: LayerSplit
    draft: LayerSplit | None
    """See `DraftConfig.layer_split`."""
    tensor_split: tuple[float, ...] = ()
    """See `PipelineConfig.tensor_split`."""


# Failing


class RankFailed(ControlMessage, frozen=True):
    """A rank has failed; `place` says which, `error` is the name of a class in `ggpipe.errors`."""

    place: str
    error: str
    message: Wording


class Abort(ControlMessage, frozen=True):
    """The head gives up what all ranks do together."""


# Heartbeats


class Beat(ControlMessage, frozen=True):
    """This rank's process runs."""

    process: int
    """Its id."""
    is_signalled: bool
    """The rank received SIGCONT or SIGTERM, so mpirun may be about to end it."""


AnyControlMessage = (
    Hello | LoadLayers | DraftVocab | StageLoading | StageLoaded | StartDraft
    | PrefixSaved | AskClock | Clock | AskUsage | Usage | Quit
    | ProfileHello | MeasureDraft | DraftMeasured | MeasureAlone | AloneMeasured
    | MeasureTogether | ReadyToStop | StopTogether | TogetherMeasured
    | MeasureTurn | TurnMeasured | MeasureLink | LinkMeasured | MeasureSums | SumsMeasured
    | MeasureDecodes | DecodesMeasured | EndProfile
    | RankFacts | StartProfile | UseSplit
    | HasModels | AllHaveModels | AskModel | ModelOutline | ReadModel | ModelBytes | NotSent
    | RankFailed | Abort | Beat
)  # fmt: skip
"""Every control message there is."""

_ENCODER = msgspec.msgpack.Encoder()
_DECODER: msgspec.msgpack.Decoder[AnyControlMessage] = msgspec.msgpack.Decoder(AnyControlMessage)


def encode(message: ControlMessage) -> bytes:
    """A control message as bytes."""
    return bytes((VERSION,)) + _ENCODER.encode(message)


def decode(payload: Payload) -> AnyControlMessage:
    """The inverse of `encode`. Raises RunError for what this version of ggpipe does not write."""
    view = memoryview(payload)
    if not view:
        raise RunError("an empty control message arrived: use one ggpipe everywhere")
    if view[0] != VERSION:
        raise RunError(
            f"a control message of format {view[0]} arrived, this rank reads format {VERSION}: "
            "use one ggpipe everywhere"
        )
    try:
        return _DECODER.decode(view[1:])
    except (msgspec.MsgspecError, ValueError, RecursionError, MemoryError) as e:
        raise RunError(
            f"an unreadable control message arrived ({' '.join(str(e).split())}): use one ggpipe everywhere"
        ) from e
