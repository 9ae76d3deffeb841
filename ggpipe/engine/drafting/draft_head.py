"""The draft model's head: drives its drafter (`core.drafters.registry`) over the draft's pipeline."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from ggpipe.core.draft_messages import MicroBatch
from ggpipe.core.drafters.base import Drafter, DraftEvent, Send
from ggpipe.core.events import Cancel, RunDone, RunEnded, Submit, Tick
from ggpipe.core.messages import RunRecord, RunResult
from ggpipe.engine.pipeline import Pipeline


class DraftHead:
    """On the first draft rank, or inside the head's process. All methods belong to the main thread."""

    def __init__(
        self,
        pipeline: Pipeline,
        drafter: Drafter,
        send: Callable[[MicroBatch, Sequence[RunRecord]], None],
    ) -> None:
        """`send` brings draft tokens to the head, with the runs that ended since the last ones."""
        self._pipeline = pipeline
        self._drafter = drafter
        self._send = send
        self._records: list[RunRecord] = []

    def ended(self, result: RunResult) -> None:
        """A run came back."""
        self.handle(RunEnded(result))

    def handle(self, event: DraftEvent) -> None:
        """Give the state machine an event, and perform its actions."""
        for action in self._drafter.handle(event, time.monotonic()):
            match action:
                case Submit(run):
                    self._pipeline.submit(run)
                case Cancel(runs):
                    self._pipeline.cancel(runs)
                case RunDone(records):
                    self._records += records
                case Send(batch):
                    self._send(batch, self._records)
                    self._records = []

    def wait_s(self) -> float | None:
        """Seconds until `tick` is due; None when it is not."""
        wake_at = self._drafter.wake_at
        return None if wake_at is None else max(wake_at - time.monotonic(), 0.0)

    def tick(self) -> None:
        """To be called when `wait_s` has passed; does nothing too early."""
        wake_at = self._drafter.wake_at
        if wake_at is not None and time.monotonic() >= wake_at:
            self.handle(Tick())
