"""An engine's drafters as the head reaches them, by their ids: draft models on ranks, others in this process."""

from __future__ import annotations

from collections.abc import Mapping

from ggpipe.config.engine import SpeculationConfig
from ggpipe.core.draft_messages import MicroBatch, Steering
from ggpipe.core.drafters import registry
from ggpipe.core.layout import Layout
from ggpipe.transport import codec
from ggpipe.transport.base import Kind, Transport


class Drafters:
    """Belongs to the main thread."""

    def __init__(self, transport: Transport, n_models: int, started: Mapping[int, Layout], rolls_back: bool) -> None:
        """`n_models`: draft models. `started`: those that draft, by their drafters' ids. `rolls_back`: the target can
        take draft tokens back."""
        self._transport = transport
        self._n_models = n_models
        self._models = dict(started)
        self._rolls_back = rolls_back
        self._in_head = {
            drafter: registry.WITHOUT_MODEL[kind](drafter)
            for drafter, kind in enumerate(registry.kinds(n_models))
            if kind in registry.WITHOUT_MODEL
        }

    @property
    def has_model(self) -> bool:
        """There is a draft model that can roll back, as the target can."""
        return bool(self._models) and self._rolls_back

    def chosen(self, speculation: SpeculationConfig) -> tuple[int, ...]:
        """The ids of those that draft for a request."""
        if not self._rolls_back:
            return ()
        named = registry.chosen(speculation.drafters, self._n_models)
        return tuple(drafter for drafter in named if drafter in self._in_head or drafter in self._models)

    def n_ranks(self, drafter: int) -> int:
        """Ranks that hold layers of this drafter's model."""
        return 0 if drafter in self._in_head else len(self._models[drafter].stage_ranks)

    def steer(self, drafter: int, message: Steering) -> list[MicroBatch]:
        """Send a message to a drafter; returns what it answers at once."""
        if drafter in self._in_head:
            return self._in_head[drafter].answer(message)
        self._transport.send(self._models[drafter].head, Kind.STEER, codec.steering_message(message))
        return []
