"""PipeInfer's thresholds: how probable a candidate must be to be drafted."""

from __future__ import annotations

from ggpipe.config.speculation import SpeculationConfig


class Thresholds:
    """Two thresholds that move with what happened since the last accepted token (Butler et al., SC'24)."""

    def __init__(self, config: SpeculationConfig) -> None:
        self._config = config
        self.n_batches = 0
        """Micro-batches drafted since the last accepted token."""
        self.n_failed = 0
        """Attempts since the last accepted token whose best candidate was not probable enough."""

    def accepted(self) -> None:
        """A token was accepted."""
        self.n_batches = self.n_failed = 0

    @property
    def cutoff(self) -> float:
        """Minimum probability of the best candidate with which a branch continues."""
        return self._config.p_accept + self._shift

    @property
    def split(self) -> float:
        """Minimum probability of another candidate for which a branch splits."""
        return self._config.p_split + self._shift

    @property
    def can_fall(self) -> bool:
        """Whether another attempt may succeed after this one failed."""
        return self._config.p_decay > 0

    @property
    def _shift(self) -> float:
        return self.n_batches * self._config.p_recovery - self.n_failed * self._config.p_decay
