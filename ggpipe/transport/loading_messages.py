"""Control messages while ranks load their layers, and the base of all control messages."""

from __future__ import annotations

import msgspec

from ggpipe.core.draft_messages import VocabOutline
from ggpipe.core.drafters.base import DraftPipeline, HeadNeeds
from ggpipe.core.layout import Layout
from ggpipe.core.messages import Restored
from ggpipe.core.row_work import RowWork
from ggpipe.transport.base import HEAD


class ControlMessage(msgspec.Struct, frozen=True, tag=True, forbid_unknown_fields=True):
    """Base of all; the class name travels as the tag."""


class Hello(ControlMessage, frozen=True, kw_only=True):
    """The model file and the software of a rank."""

    host: str
    model: int
    """Id of the model whose layers the rank holds, as `EngineConfig.model_of`."""
    fingerprint: str
    """See `ModelFile.fingerprint`."""
    architecture: str
    n_layer: int
    work: RowWork
    """The work of the model's rows."""
    ggpipe: str
    """The version of ggpipe."""
    libllama: str
    """The version of libllama."""
    cpu_features: tuple[str, ...]
    memory_bytes: int
    """Available on its machine, before anything is loaded."""
    n_threads: int
    """The most threads that it computes with."""
    n_cores: int
    """Physical cores of its machine that ranks may run on."""
    kind: str
    """The kind of the model's drafter if it is not the target, as in `core.drafters.registry`."""
    head_needs: HeadNeeds | None = None
    """Requirements of a draft head or MTP layers; None: the model is neither."""
    target_fingerprint: str = ""
    """Of the target's file, where MTP layers or a draft head take weights from it."""


class LoadLayers(ControlMessage, frozen=True):
    """Load your layers of this layout of the target, or of the draft on a draft rank."""

    layout: Layout
    warmup: bool = False
    """See `llama.stage.Stage`."""
    inputs: tuple[int, ...] = ()
    """Layers of the target whose inputs a draft head reads; a rank sends those that it has."""
    inputs_to: int = HEAD
    """The rank that they are sent to."""
    stream_memory_gb: float | None = None
    """Stream weights, with this much memory for them; None: as in the config."""


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
    most_taken_back: int | None
    can_pause: bool


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
    tokenizer: bytes = b""
    """The target's, as a GGUF file, for a draft model with another vocabulary."""
