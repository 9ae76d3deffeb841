"""A pipeline as one of its ranks sees it. For its head: runs go in at the first stage, cancels go to all."""

from __future__ import annotations

from collections.abc import Callable

from ggpipe.core.events import CancelRuns
from ggpipe.core.layout import Layout
from ggpipe.core.messages import Run
from ggpipe.engine.stage_thread import Fetched, InputsReady, PartDone, Passed, ResultReady, RunNotice, StageThread
from ggpipe.transport import codec
from ggpipe.transport.base import HEAD, Kind, Payload, Transport


class Pipeline:
    """The stages of a layout, one of which may be this rank's own."""

    def __init__(
        self,
        transport: Transport,
        layout: Layout,
        rank: int,
        ended: Callable[[ResultReady | Fetched], None],
        start: Callable[[Callable[[RunNotice], None]], StageThread] | None,
        inputs_to: int = HEAD,
    ) -> None:
        """We are `rank` in it. `ended` takes the results of our own stage when it is the last one, in its thread, and
        rows that were fetched from it.

        `start` makes the thread of our own stage, given `deliver`; None where we hold no layers. `inputs_to`: the rank
        that layers' inputs are sent to, where a draft head reads them.
        """
        self._transport = transport
        self.layout = layout
        self._rank = rank
        self._ended = ended
        self._inputs_to = inputs_to
        self._receivers = layout.receivers_of(rank)
        self._own = start(self.deliver) if start is not None else None

    def submit(self, run: Run) -> None:
        """Put a run in at the first stage: all its parts get it."""
        first = self.layout.stages[0].ranks
        if others := [rank for rank in first if rank != self._rank]:
            header = codec.header_with(codec.run_header(run), (), False)
            for rank in others:
                self._transport.send(rank, Kind.RUN, header)
        if self._own is not None and self._rank in first:
            self._own.submit(run)

    def cancel(self, cancelled: CancelRuns) -> None:
        """Every stage skips or stops these runs, and drops the dead rows of others."""
        for rank in self.layout.stage_ranks:
            if rank == self._rank:
                self.cancel_own(cancelled)
            else:
                self._transport.send(rank, Kind.CANCEL, codec.cancel_message(cancelled))

    def cancel_own(self, cancelled: CancelRuns) -> None:
        """As `cancel`, in our own stage."""
        if self._own is not None:
            self._own.cancel(cancelled)

    def fetch(self, request: int, run: int, row: int) -> None:
        """Have the last stage send the head a whole row that it kept, for a request."""
        rank = self.layout.stages[-1].ranks[0]
        if rank == self._rank:
            self.fetch_own(request, run, row)
        else:
            self._transport.send(rank, Kind.FETCH, codec.fetch_message(request, run, row))

    def fetch_own(self, request: int, run: int, row: int) -> None:
        """As `fetch`, of our own stage."""
        assert self._own is not None
        self._own.fetch(request, run, row)

    def deliver(self, outcome: RunNotice) -> None:
        """Send on what came of a run in our own stage; from its thread where the transport allows."""
        match outcome:
            case ResultReady() | Fetched():
                self._ended(outcome)
            case Passed(message):
                for rank in self._receivers:
                    self._transport.send(rank, Kind.RUN, message)
            case InputsReady(message):
                self.send_inputs(message)
            case PartDone(run, span):
                self._transport.send(HEAD, Kind.PART_SPAN, codec.part_span_message(run, span))

    def send_inputs(self, message: Payload) -> None:
        """Send on layers' inputs, towards the draft head that reads them."""
        self._transport.send(self._inputs_to, Kind.STATES, message)

    def close(self) -> None:
        """Free our own stage."""
        if self._own is not None:
            self._own.close()
