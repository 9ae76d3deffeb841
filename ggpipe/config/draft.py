"""Settings of a draft model, or of MTP layers."""

from __future__ import annotations

from dataclasses import dataclass, field

from ggpipe.config.checks import MAX_TOKENS, check_range
from ggpipe.config.context import ContextConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import check_threads
from ggpipe.errors import Setting, SettingError, Wording

WINDOW = 8192
"""Tokens of a request that draft models see by default."""
_LEAST_WINDOW = 64
_ROOM = 256
"""Cells for a request's draft tokens, in addition to those of what the draft model sees of it."""


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
    window: int = WINDOW
    """Number of tokens of a request that a draft model sees: the latest ones. 0: all. Draft heads and MTP layers see
    all."""

    def __post_init__(self) -> None:
        check_threads("draft.threads", self.threads, Wording("as ", Setting("threads")))
        check_threads("draft.threads_batch", self.threads_batch, Wording("as ", Setting("draft.threads")))
        check_range("draft.window", self.window, 0, MAX_TOKENS, "a number of tokens")
        if 0 < self.window < _LEAST_WINDOW:
            raise SettingError("draft.window", f"must be 0 or at least {_LEAST_WINDOW}, got {self.window}")

    @property
    def n_ranks(self) -> int:
        """Number of ranks that hold only this model."""
        return self.layer_split.n_ranks if self.layer_split is not None else 0


def draft_cells(n_ctx: int, window: int, n_requests: int) -> int:
    """Size of a draft model's context if that of the target has `n_ctx` tokens, and it sees `window` tokens of each
    of `n_requests` requests."""
    return min(n_ctx, n_requests * (window + _ROOM)) if window else n_ctx


def window_in(n_cells: int, n_ctx: int, window: int, n_requests: int) -> int:
    """Number of tokens of a request that a draft model with `n_cells` cells sees if the target has `n_ctx`; 0: all.
    It has fewer cells than `draft_cells` if it was trained with so few."""
    if n_cells < draft_cells(n_ctx, window, n_requests):
        return min(window, max(n_cells // n_requests - _ROOM, 0))
    return window
