"""What drives a drafter over a fake pipeline, whatever its kind."""

from __future__ import annotations

from abc import abstractmethod

from ggpipe.core.draft_messages import MicroBatch
from ggpipe.core.drafters.base import DraftAction, DraftEvent, ToHead
from ggpipe.core.drafters.draft_model import DraftModel
from ggpipe.core.events import CancelRuns, RunEnded, SubmitRun, Tick
from ggpipe.core.messages import Run
from support.fake_pipeline import FakePipeline, Move


class DrafterDriver:
    """Passes events to a drafter and does what it says. Nothing moves by itself."""

    def __init__(self, drafter: DraftModel, pipeline: FakePipeline) -> None:
        self.drafter, self.pipeline = drafter, pipeline
        self.now = 0.0

    def pipeline_moves(self, name: str) -> list[Move]:
        """What can happen next in the pipeline, or with time; `name`: of the pipeline."""
        moves = self.pipeline.moves(name, lambda: self.handle(RunEnded(self.pipeline.take_result())))
        if self.drafter.wake_at is not None:
            moves.append(("tick", self._tick))
        return moves

    def _tick(self) -> None:
        assert self.drafter.wake_at is not None
        self.now = max(self.now, self.drafter.wake_at)
        self.handle(Tick())

    def handle(self, event: DraftEvent) -> None:
        """Let the drafter handle it."""
        self.now += 0.001
        for action in self.drafter.handle(event, self.now):
            self._act(action)
        self.drafter.validate()

    def _act(self, action: DraftAction) -> None:
        match action:
            case SubmitRun(run):
                self._submitted(run)
            case CancelRuns():
                self.pipeline.cancel(action)
            case ToHead(batch):
                self._sent(batch)

    @abstractmethod
    def _submitted(self, run: Run) -> None:
        """It submits this run."""

    @abstractmethod
    def _sent(self, batch: MicroBatch) -> None:
        """It sends the head these draft tokens."""
