"""A pipeline as one of its ranks sees it. For its head: runs go in at the first stage, cancels go to all."""

from __future__ import annotations

from collections.abc import Callable

from ggpipe.core.layout import Layout
from ggpipe.core.messages import Run
from ggpipe.runtime.runner import Ended, Outcome, Runner
from ggpipe.transport import codec
from ggpipe.transport.base import Kind, Transport


class Pipe:
    """The stages of a layout, of which this rank may hold the first."""

    def __init__(self, transport: Transport, layout: Layout, rank: int, ended: Callable[[Ended], None]) -> None:
        """We are `rank` in it. `ended` takes what comes of runs when our stage is the last; from the stage's thread."""
        self._transport = transport
        self.layout = layout
        self._ended = ended
        self.runner: Runner | None = None
        """Our own stage, once there is one."""
        self._following = layout.next_of(rank)

    def submit(self, run: Run) -> None:
        """Put a run in."""
        if self.runner is not None:
            self.runner.submit(run)
        else:
            header = codec.header_with(codec.run_header(run), (), False)
            self._transport.send(self.layout.stages[0], Kind.RUN, header)

    def cancel(self, runs: tuple[int, ...]) -> None:
        """Nobody needs these runs: every stage skips or stops them."""
        for rank in self.layout.stages:
            if rank == self.layout.head and self.runner is not None:
                self.runner.cancel(runs)
            else:
                self._transport.send(rank, Kind.CANCEL, codec.ids_message(runs))

    def deliver(self, outcome: Outcome) -> None:
        """Send on what came of a run in our own stage; from its thread where the transport allows."""
        if isinstance(outcome, Ended):
            self._ended(outcome)
        else:
            assert self._following is not None
            self._transport.send(self._following, Kind.RUN, outcome.message)
