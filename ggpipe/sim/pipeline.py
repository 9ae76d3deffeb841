"""Virtual pipelines: stages in order, and runs on their way through them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence

from ggpipe.core.events import CancelRuns
from ggpipe.core.messages import Run, Span
from ggpipe.sim.clock import VirtualClock
from ggpipe.sim.cores import Cores
from ggpipe.sim.network import Network
from ggpipe.sim.stage import HEADER_BYTES, Process, StagePart, VirtualStage, header_bytes
from ggpipe.sim.virtual_cluster import PipelineSpec, VirtualCluster

_ANSWER_BYTES = 48


class _Taps:
    """States of the target on their way to a draft head."""

    def __init__(self, row_bytes: Mapping[int, int], reader: int, arrived: Callable[[Run], None]) -> None:
        """`row_bytes`: by the rank that sends them, of all layers that it taps."""
        self._row_bytes = row_bytes
        self._reader = reader
        self._arrived = arrived
        self._missing: dict[int, int] = {}
        """By run: from how many ranks its states have not come yet."""

    def computed(self, run: Run, rank: int, network: Network) -> None:
        """A rank has computed a run."""
        if n_bytes := self._row_bytes.get(rank):
            network.send(rank, self._reader, HEADER_BYTES + n_bytes * len(run.rows), lambda: self._came(run))

    def _came(self, run: Run) -> None:
        missing = self._missing.get(run.id, len(self._row_bytes)) - 1
        self._missing[run.id] = missing
        if not missing:  # ranks compute runs in order: what is missing of an earlier one was cancelled
            self._missing = {other: n for other, n in self._missing.items() if other > run.id}
            self._arrived(run)


class VirtualPipeline:
    """All stages of a pipeline. Runs that the last stage has computed go to the head."""

    def __init__(
        self,
        clock: VirtualClock,
        network: Network,
        cores: list[Cores],
        processes: list[Process],
        cluster: VirtualCluster,
        pipeline: PipelineSpec,
        head: int,
        ended: Callable[[Run, tuple[Span, ...]], None],
    ) -> None:
        """`head`: the rank that submits; `ended` is called when a result arrives there."""
        self._network = network
        layout = pipeline.layout
        self._following = {
            stage.ranks[0]: next(iter(layout.receivers_of(stage.ranks[0])), None) for stage in layout.stages
        }
        self._head = head
        self._ended = ended
        self._stages: dict[int, VirtualStage] = {}
        """By part 0's rank."""
        self._ranks = {stage.ranks[0]: stage.ranks for stage in layout.stages}
        self._layers = {stage.ranks[0]: stage.layers for stage in layout.stages}
        self._taps: list[_Taps] = []
        first, last = layout.stages[0].ranks[0], layout.stages[-1].ranks[0]
        self._first = first
        for rank, ranks in self._ranks.items():
            nodes = [cluster.node_of[own] for own in ranks]
            parts = [
                StagePart(cores[node], processes[own], cluster, pipeline.stages[own], own, nodes.count(node))
                for own, node in zip(ranks, nodes, strict=True)
            ]
            row_bytes = 0 if rank == last else pipeline.row_bytes
            group = pipeline.groups.get(rank)
            first_layer, end = self._layers[rank]
            self._stages[rank] = VirtualStage(
                clock, parts, group, cluster.overheads, rank, end - first_layer, row_bytes, self._pass_on
            )

    def tap(self, layers: Sequence[int], row_bytes: int, reader: int, arrived: Callable[[Run], None]) -> None:
        """Have the stages send the inputs of these layers to a rank, `row_bytes` for each layer and row. `arrived` is
        called there with each run of which all have come."""
        n_of = {
            rank: sum(a < layer <= b or layer == a == 0 for layer in layers) for rank, (a, b) in self._layers.items()
        }
        self._taps.append(_Taps({rank: n * row_bytes for rank, n in n_of.items() if n}, reader, arrived))

    def submit(self, run: Run) -> int:
        """Submit a run; returns the number of messages that this takes."""
        self._send(self._head, self._first, header_bytes(run), run, ())
        return sum(rank != self._head for rank in self._ranks[self._first])

    def cancel(self, cancelled: CancelRuns) -> int:
        """Cancel runs and drop rows; returns the number of messages that this takes."""
        n_messages = 0
        for first, stage in self._stages.items():
            for rank in self._ranks[first]:
                by_message = rank != self._head
                n_messages += by_message
                self._network.send(
                    self._head, rank, HEADER_BYTES, functools.partial(stage.cancel, cancelled, by_message)
                )
        return n_messages

    def _pass_on(self, run: Run, spans: tuple[Span, ...], rank: int) -> None:
        if run.rows and not run.cancelled:
            for taps in self._taps:
                taps.computed(run, rank, self._network)
        following = self._following[rank]
        if following is None:
            n_bytes = spans[-1].sent_bytes + _ANSWER_BYTES * sum(row.logits_request >= 0 for row in run.rows)
            self._network.send(rank, self._head, n_bytes, lambda: self._ended(run, spans))
        else:
            self._send(rank, following, spans[-1].sent_bytes, run, spans)

    def _send(self, source: int, target: int, n_bytes: int, run: Run, spans: tuple[Span, ...]) -> None:
        """Send a run to all parts of a stage, which begin when all have it. `target`: part 0's rank."""
        stage, ranks = self._stages[target], self._ranks[target]
        n_left = len(ranks)

        def arrive() -> None:
            nonlocal n_left
            n_left -= 1
            if not n_left:
                stage.take(run, spans)

        for rank in ranks:
            self._network.send(source, rank, n_bytes, arrive)
