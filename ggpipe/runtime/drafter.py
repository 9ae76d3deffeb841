"""The draft's head: drives the state machine of `core.drafting` over the draft's pipeline."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence

from ggpipe.core.drafting import Drafter, DraftEvent, Send
from ggpipe.core.events import Cancel, Limits, RunEnded, Submit, Tick
from ggpipe.core.messages import MicroBatch, RunRecord, RunResult
from ggpipe.runtime.pipe import Pipe


class DraftHead:
    """On the first draft rank, or inside the head's process. All methods belong to the main thread."""

    def __init__(self, pipe: Pipe, limits: Limits, send: Callable[[MicroBatch, Sequence[RunRecord]], None]) -> None:
        """`send` brings guesses to the head, with the runs that ended since."""
        self._pipe = pipe
        self._drafter = Drafter(limits)
        self._send = send
        self._rows: dict[int, tuple[int, int]] = {}
        """Of each run in flight: rows, guesses."""
        self._records: list[RunRecord] = []

    def ended(self, result: RunResult) -> None:
        """A run came back."""
        n_rows, n_guesses = self._rows.pop(result.run)
        if n_rows:
            self._records.append(RunRecord(result.run, n_rows, n_guesses, result.cancelled, result.spans))
        self.handle(RunEnded(result.run, result.rows))

    def handle(self, event: DraftEvent) -> None:
        """Let the state machine know, and do what it says."""
        actions = collections.deque(self._drafter.handle(event, time.monotonic()))
        for action in actions:
            match action:
                case Submit(run, n_guesses):
                    self._rows[run.id] = len(run.rows), n_guesses
                    self._pipe.submit(run)
                case Cancel(runs):
                    self._pipe.cancel(runs)
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
