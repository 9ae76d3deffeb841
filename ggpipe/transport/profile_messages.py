"""Control messages of a profile."""

from __future__ import annotations

from ggpipe.cluster.links import Overheads
from ggpipe.cluster.profile import MeasuredLayers, Point
from ggpipe.transport.loading_messages import ControlMessage, Hello


class ProfileHello(ControlMessage, frozen=True, kw_only=True):
    """The machine of a rank, and the models that it measures."""

    target: Hello
    drafts: tuple[Hello, ...]
    cores: int
    threads: tuple[int, int]
    """For runs of one token, and for longer ones."""
    memory_bytes: int
    """Available before anything is loaded."""
    cache_bytes: int


class MeasureDraft(ControlMessage, frozen=True):
    """Measure a whole draft model while no other rank of your machine computes."""

    number: int
    """Of the draft model, from 0."""
    budget_s: float


class DraftMeasured(ControlMessage, frozen=True):
    """All layers of a draft model; None where the rank's memory is too small for it."""

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
    disk_bytes_per_s: float
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
