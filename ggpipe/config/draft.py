"""Settings of a draft model, or of MTP layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ggpipe.config.context import ContextConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import check_threads
from ggpipe.errors import Setting, Wording


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A draft model, and where it runs. Raises SettingError for an invalid setting."""

    model: ModelConfig
    """The model. Of MTP layers: the target, which they are a part of."""
    is_mtp: bool = False
    """The model's MTP layers draft, not all of it."""
    context: ContextConfig = field(default_factory=ContextConfig)
    layer_split: LayerSplit | None = None
    """How its layers are divided among its ranks, which follow those of the target and of earlier draft models. None:
    the head runs the draft model."""
    threads: int = -1
    """-1: the rank's number of threads for the target."""
    threads_batch: int = -1
    """Threads for runs of more than one token; -1: the value of `threads`."""

    def __post_init__(self) -> None:
        check_threads("draft.threads", self.threads, Wording("as ", Setting("threads")))
        check_threads("draft.threads_batch", self.threads_batch, Wording("as ", Setting("draft.threads")))

    @property
    def n_ranks(self) -> int:
        """Number of ranks that hold only this model."""
        return self.layer_split.n_ranks if self.layer_split is not None else 0
