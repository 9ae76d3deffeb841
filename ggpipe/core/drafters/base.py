"""What every drafter is to those who drive it: events in, actions out, as the head's scheduler."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from ggpipe.core.draft_messages import MicroBatch, Steering
from ggpipe.core.events import Cancel, RunDone, RunEnded, Submit, Tick


@dataclass(frozen=True, slots=True)
class Send:
    """Draft tokens for the head."""

    batch: MicroBatch


DraftEvent = Steering | RunEnded | Tick
DraftAction = Submit | Cancel | RunDone | Send


class Drafter(Protocol):
    """Drafts for any number of requests. Pure: no clock, no I/O; runs go to a pipeline that its driver has."""

    def handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
        """Take in one event that happened at `now` (seconds, any clock that does not go back)."""

    @property
    def wake_at(self) -> float | None:
        """When to send `Tick`, by the clock of `now`; None when only other events matter."""
