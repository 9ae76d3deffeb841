"""Control messages between ranks: everything but runs, results and draft tokens. Msgpack after a version byte.

| where                 | the head sends                | another rank sends                      |
|-----------------------|-------------------------------|-----------------------------------------|
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

from ggpipe.cluster.links import Overheads
from ggpipe.cluster.profile import MeasuredLayers, Point
from ggpipe.config.layer_split import LayerSplit
from ggpipe.core.draft_messages import VocabOutline
from ggpipe.core.drafters.base import DraftPipeline, HeadNeeds
from ggpipe.core.layout import Layout
from ggpipe.core.messages import Restored
from ggpipe.errors import RunError, Wording
from ggpipe.transport.base import HEAD, Payload

VERSION = 14
"""Version of the format. Increment it whenever a message changes."""


class ControlMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all; the class name travels as the tag."""


# Loading


class Hello(ControlMessage, frozen=True, kw_only=True):
    """The model file and the software of a rank."""

    host: str
    model: int
    """Id of the model whose layers the rank holds, as `EngineConfig.model_of`."""
    fingerprint: str
    """See `ModelFile.fingerprint`."""
    architecture: str
    n_layer: int
    sparsity: float
    """See `ModelShape`."""
    ggpipe: str
    """The version of ggpipe."""
    libllama: str
    """The version of libllama."""
    cpu_features: tuple[str, ...]
    memory_bytes: int
    """Available on its machine, before anything is loaded."""
    kind: str
    """The kind of the model's drafter if it is not the target, as in `core.drafters.registry`."""
    head_needs: HeadNeeds | None = None
    """Requirements of a draft head or MTP layers; None: the model is neither."""


class LoadLayers(ControlMessage, frozen=True):
    """Load your layers of this layout of the target, or of the draft on a draft rank."""

    layout: Layout
    warmup: bool = False
    """See `llama.stage.Stage`."""
    inputs: tuple[int, ...] = ()
    """Layers of the target whose inputs a draft head reads; a rank sends those that it has."""
    inputs_to: int = HEAD
    """The rank that they are sent to."""


class DraftVocab(ControlMessage, frozen=True):
    """The draft's vocabulary."""

    outline: VocabOutline


class StageLoading(ControlMessage, frozen=True):
    """How far a rank's stage is loaded."""

    done_bytes: int
    total_bytes: int


class StageContext(msgspec.Struct, frozen=True, kw_only=True):
    """Facts about the context of a loaded stage. `llama.stage.Stage` has attributes with the same names."""

    n_ctx: int
    """KV cells."""
    n_batch: int
    """Maximum number of prompt tokens in a batch."""
    exact_in_company: bool
    n_prefixes: int
    n_branches: int
    partial_prefixes: bool
    rolls_back: bool


class StageLoaded(ControlMessage, frozen=True, kw_only=True):
    """A rank's stage is ready for runs."""

    load_s: float
    threads: tuple[int, int]
    """For runs of one token, and for longer ones."""
    resident_bytes: int
    wanted: dict[str, int]
    """Tensors that the stage needs from the stage before it, as `llama.stage.BoundaryTensors.wanted`."""
    produced: dict[str, int]
    """Tensors that the stage sends to the next stage, as `llama.stage.BoundaryTensors.produced`."""
    context: StageContext
    restored: Restored
    """What the rank's prompt cache had."""


class StartDraft(ControlMessage, frozen=True):
    """All stages are loaded: the first draft rank becomes the draft's head."""

    drafter: int
    """Its id."""
    kind: str
    """As in `core.drafters.registry`."""
    pipeline: DraftPipeline


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


# Profiling


class ProfileHello(ControlMessage, frozen=True, kw_only=True):
    """The machine of a rank, and the models that it measures."""

    target: Hello
    draft: Hello | None
    cores: int
    threads: tuple[int, int]
    """For runs of one token, and for longer ones."""
    memory_bytes: int
    """Available before anything is loaded."""
    cache_bytes: int


class MeasureDraft(ControlMessage, frozen=True):
    """Measure the whole draft model while no other rank of your machine computes."""

    budget_s: float


class DraftMeasured(ControlMessage, frozen=True):
    """All layers of the draft model; None where the rank's memory is too small for it."""

    draft: MeasuredLayers | None


class MeasureAlone(ControlMessage, frozen=True):
    """Measure these layers of the target while no other rank of your machine computes."""

    layers: tuple[int, int]
    budget_s: float


class AloneMeasured(ControlMessage, frozen=True, kw_only=True):
    """The answer to MeasureAlone; the fields are those of `cluster.profile.RankProfile`."""

    alone: tuple[Point, ...]
    half: MeasuredLayers | None
    memory_bytes_per_s: float
    overheads: Overheads
    change_s: float
    fixed_s: float


class MeasureTogether(ControlMessage, frozen=True):
    """Measure the layers of MeasureAlone again, while all ranks compute, until StopTogether."""

    budget_s: float


class ReadyToStop(ControlMessage, frozen=True):
    """The rank has enough measurements for MeasureTogether, and continues computing for the others."""


class StopTogether(ControlMessage, frozen=True):
    """All ranks have measured enough of MeasureTogether."""


class TogetherMeasured(ControlMessage, frozen=True):
    """The answer to MeasureTogether; the fields are those of `cluster.profile.RankProfile`."""

    together: tuple[Point, ...]
    guest: float | None


class MeasureTurn(ControlMessage, frozen=True):
    """Decode some rows one by one, with the layers of MeasureAlone: another rank of your machine did so before."""


class TurnMeasured(ControlMessage, frozen=True):
    """The answer to MeasureTurn."""

    first_s: float
    later_s: float
    """Mean of the last rows: the other ranks of the machine rest."""


class MeasureLink(ControlMessage, frozen=True):
    """Measure messages from your rank to the rank `peer`."""

    peer: int
    budget_s: float


class LinkMeasured(ControlMessage, frozen=True):
    """The answer to MeasureLink: fields of `cluster.profile.LinkProfile` and of `cluster.links.Overheads`."""

    latency_s: float
    bytes_per_s: float
    send_s: float
    read_s: float


class MeasureSums(ControlMessage, frozen=True):
    """Measure sums over these two ranks, of which you are one. The other one does the same."""

    ranks: tuple[int, int]
    budget_s: float


class SumsMeasured(ControlMessage, frozen=True):
    """The answer to MeasureSums: seconds of this rank's sums, by `measure.sums.ROWS`. Empty where MPI cannot."""

    f32_s: tuple[tuple[float, ...], ...]
    f16_s: tuple[tuple[float, ...], ...]
    """Times with values sent as float16. Empty if both ranks share memory."""


class MeasureDecodes(ControlMessage, frozen=True):
    """Measure sums in decodes of a group of these two ranks, of which you are one. The other one does the same."""

    ranks: tuple[int, int]
    layers: tuple[int, int]
    budget_s: float


class DecodesMeasured(ControlMessage, frozen=True):
    """The answer to MeasureDecodes: seconds of each sum in each decode of a row. Empty for an indivisible model."""

    sums_s: tuple[tuple[float, ...], ...]


class EndProfile(ControlMessage, frozen=True):
    """Everything is measured."""


# Choosing the split


class RankFacts(ControlMessage, frozen=True, kw_only=True):
    """What the speed of a rank depends on, and its memory."""

    host: str
    target: str
    """The fingerprint of the target's file."""
    draft: str | None
    """The fingerprint of the draft's file."""
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
