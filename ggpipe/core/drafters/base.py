"""What a drafter is to those who drive it. There are two kinds, by what drives them (`registry`):

with a model        its own pipeline computes its runs: events in, actions out, as the head's scheduler
without a model     the head's scheduler: each message is answered at once, with draft tokens or none
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from ggpipe.core.draft_messages import DrafterMessage, MicroBatch, Vocabularies
from ggpipe.core.events import CancelRuns, RunDone, RunEnded, SubmitRun, Tick
from ggpipe.core.request import DraftCheck, Limits


class ToHead(msgspec.Struct, frozen=True):
    """Draft tokens for the head."""

    micro_batch: MicroBatch


class HeadNeeds(msgspec.Struct, frozen=True, kw_only=True):
    """What a draft head reads of its target."""

    layers: tuple[int, ...]
    """The layers whose inputs it reads."""
    width: int
    """Numbers in a state of the target."""
    horizon: int
    """Depth of the deepest draft token below the last verified one."""


class StatesArrived(msgspec.Struct, frozen=True):
    """All hidden states of a run of the target are there, for a drafter that reads them. Runs arrive in order."""

    run: int
    rows: tuple[tuple[int, int], ...]
    """Request and position of each row."""


class ForgetStates(msgspec.Struct, frozen=True):
    """States of the target's runs before this one are not read any more."""

    before: int


DraftEvent = DrafterMessage | RunEnded | StatesArrived | Tick
DraftAction = SubmitRun | CancelRuns | RunDone | ToHead | ForgetStates


class Drafter(Protocol):
    """Drafts for any number of requests with a model. Pure: no clock, no I/O; runs go to a pipeline that its driver
    has."""

    def handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
        """Take in one event that happened at `now` (seconds, any clock that does not go back)."""

    @property
    def wake_at(self) -> float | None:
        """When to send `Tick`, by the clock of `now`; None when only other events matter."""


class DraftPipeline(msgspec.Struct, frozen=True, kw_only=True):
    """A loaded draft model, as its drafter needs to know it."""

    limits: Limits
    """Limits of the draft model's pipeline."""
    vocabularies: Vocabularies | None = None
    """None where target and draft have the same tokens."""
    restored: tuple[int, ...] | None = None
    """See `PrefixCache`."""
    horizon: int | None = None
    """See `HeadNeeds`; None: it is no draft head."""
    window: int = 0
    """Number of tokens of a request that a draft model sees; 0: all."""


class TextDrafter(Protocol):
    """Drafts for any number of requests from their tokens alone. Pure, and quick: no run is submitted until it has
    answered. It decides what is probable enough to be sent, since no run of its own shows what drafting costs."""

    joins: bool
    """It also drafts after draft tokens of others, and draft models are sent its own."""

    def answer(self, message: DrafterMessage, draft_check: DraftCheck | None = None) -> list[MicroBatch]:
        """Take in one message. Draft tokens are complete: no more follow before the next message of their request.
        `draft_check`: what may follow in its request; None: all tokens may."""
