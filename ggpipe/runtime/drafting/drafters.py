"""An engine's drafters as the head reaches them, by their ids: draft models on ranks, others in this process."""

from __future__ import annotations

from collections.abc import Sequence

from ggpipe.config import SpeculationConfig
from ggpipe.core.draft_messages import MicroBatch, Steering
from ggpipe.core.drafters import registry
from ggpipe.core.layout import Layout
from ggpipe.transport import codec
from ggpipe.transport.base import Kind, Transport


class Drafters:
    """Belongs to the main thread."""

    def __init__(self, transport: Transport, models: Sequence[Layout], rolls_back: bool) -> None:
        """`models`: of each draft model that has started. `rolls_back`: the target can take draft tokens back."""
        self._transport = transport
        self._models = tuple(models)
        self._rolls_back = rolls_back
        self._in_head = {
            drafter: registry.WITHOUT_MODEL[kind](drafter)
            for drafter, kind in enumerate(registry.kinds(len(models)))
            if kind in registry.WITHOUT_MODEL
        }

    @property
    def has_model(self) -> bool:
        """There is a draft model, and both models can roll back."""
        return bool(self._models) and self._rolls_back

    def chosen(self, speculation: SpeculationConfig) -> tuple[int, ...]:
        """The ids of those that draft for a request."""
        return registry.chosen(speculation.drafters, len(self._models)) if self._rolls_back else ()

    def n_ranks(self, drafter: int) -> int:
        """Ranks that hold layers of this drafter's model."""
        return 0 if drafter in self._in_head else len(self._models[drafter].stage_ranks)

    def steer(self, drafter: int, message: Steering) -> list[MicroBatch]:
        """Send a message to a drafter; returns what it answers at once."""
        if drafter in self._in_head:
            return self._in_head[drafter].answer(message)
        self._transport.send(self._models[drafter].head, Kind.STEER, codec.steering_message(message))
        return []
