"""Messages between the head, which has whole models, and ranks that get weights from it; see `engine/weights.py`."""

from __future__ import annotations

from ggpipe.cluster.model_file import ModelPart
from ggpipe.transport.loading_messages import ControlMessage


class HasModels(ControlMessage, frozen=True):
    """A rank can open the models of the config."""

    received: tuple[str, ...]
    """File names of those that its machine does not have: it gets their weights from the head."""


class AllHaveModels(ControlMessage, frozen=True):
    """All ranks can: go on."""


class AskModel(ControlMessage, frozen=True):
    """Answer with ModelOutline, or NotSent."""

    model: int
    """Its id."""


class ModelOutline(ControlMessage, frozen=True):
    """The files of a model."""

    digest: str
    """Of the headers and of some weights."""
    parts: tuple[ModelPart, ...]


class ReadModel(ControlMessage, frozen=True):
    """Answer with ModelBytes, or NotSent."""

    model: int
    part: int
    offset: int
    n_bytes: int


class ModelBytes(ControlMessage, frozen=True):
    """Bytes of a model's file."""

    data: bytes


class NotSent(ControlMessage, frozen=True):
    """The head cannot read the model."""

    problem: str
