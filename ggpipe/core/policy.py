"""When the draft goes on guessing, when a branch splits, and when it stops."""

from __future__ import annotations

from ggpipe.config import SpeculationConfig


class PipeInferPolicy:
    """PipeInfer's thresholds (Butler et al., SC'24): both move with what happened since the last accepted token."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self.n_batches = 0
        """Micro-batches drafted since then."""
        self.n_rejected = 0
        """Attempts since then whose best candidate was not probable enough."""

    def accepted(self) -> None:
        """A token was accepted."""
        self.n_batches = self.n_rejected = 0

    @property
    def cutoff(self) -> float:
        """A branch goes on with its best candidate if that is at least this probable."""
        return self._config.p_accept + self._shift

    @property
    def split(self) -> float:
        """A branch splits for a further candidate that is at least this probable."""
        return self._config.p_split + self._shift

    @property
    def relents(self) -> bool:
        """A further attempt may succeed where this one did not."""
        return self._config.p_decay > 0

    @property
    def _shift(self) -> float:
        return self.n_batches * self._config.p_recovery - self.n_rejected * self._config.p_decay
