"""Settings of a draft model."""

from __future__ import annotations

from dataclasses import dataclass, field

from ggpipe.config.context import ContextConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import check_threads
from ggpipe.errors import Setting, Wording


@dataclass(frozen=True, kw_only=True)
class DraftConfig:
    """A draft model, and where it runs."""

    model: ModelConfig
    context: ContextConfig = field(default_factory=ContextConfig)
    layer_split: LayerSplit | None = None
    """How its layers are divided among its ranks, which follow the target's and those of earlier draft models. None:
    the head runs it."""
    threads: int = -1
    """-1 takes the number of threads that the rank has for the target."""
    threads_batch: int = -1
    """Threads for runs of more than one token; -1 takes the value of `threads`."""

    def __post_init__(self) -> None:
        check_threads("draft.threads", self.threads, Wording("as ", Setting("threads")))
        check_threads("draft.threads_batch", self.threads_batch, Wording("as ", Setting("draft.threads")))

    @property
    def n_ranks(self) -> int:
        """Ranks that hold nothing but this model."""
        return self.layer_split.n_ranks if self.layer_split is not None else 0
