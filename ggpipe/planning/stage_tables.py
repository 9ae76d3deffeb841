"""Tables of the time and memory that a rank or a group needs for each range of layers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from ggpipe.cluster.memory import process_memory, stage_memory, streamed, weight_bytes
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.sim.groups import group_cost
from ggpipe.sim.stage_costs import stage_cost, streamed_cost

ROWS = (1, 2, 3, 4, 6, 8)
"""Numbers of rows for which runs are estimated."""
N_PAST = 160
"""Number of earlier tokens in the context of estimated runs."""


@dataclass(frozen=True)
class StageRank:
    """A rank of a stage."""

    node: int
    threads: int
    share: float
    """Share of the tensors; 1 if the stage has no other rank."""


StageRanks = tuple[StageRank, ...]


class StageTables:
    """Tables for one cluster and one target. They are cached, since many stages are alike."""

    def __init__(self, spec: ClusterSpec, target: ModelShape, n_ctx: int, n_ubatch: int) -> None:
        self._spec = spec
        self._target = target
        self._n_ctx, self._n_ubatch = n_ctx, n_ubatch
        own_kinds = [replace(node, name="") for node in spec.nodes]
        self._kind = [own_kinds.index(kind) for kind in own_kinds]
        self._seconds: dict[object, NDArray[np.float64]] = {}
        self._factors: dict[object, list[float]] = {}
        self._memory: dict[float, NDArray[np.float64]] = {}
        self._streamed: dict[object, NDArray[np.float64]] = {}

    def seconds(self, stage: StageRanks) -> NDArray[np.float64]:
        """Seconds of a run of one row in layers [a, b), with the message to the next stage.

        Shape (n_layer + 1, n_layer + 1), indexed by [a, b]; infinite where b <= a.
        """
        if (key := self._key(stage)) not in self._seconds:
            shape, message_s = self._target, self._message_s
            known: dict[object, float] = {}

            def seconds(a: int, b: int) -> float:
                alike = shape.read_bytes((a, b)), shape.cell_bytes((a, b)), b - a, b == shape.n_layer
                if alike not in known:
                    known[alike] = message_s + self._run_s(stage, (a, b), (1,))[0]
                return known[alike]

            self._seconds[key] = _table(shape.n_layer, seconds)
        return self._seconds[key]

    def streamed_seconds(self, stage: StageRanks, rooms: tuple[float, ...]) -> NDArray[np.float64]:
        """As `seconds`, for layers that do not fit: ranks stream the weights for which they have no memory.

        `rooms`: bytes of memory of each rank. Also infinite where all weights fit, where there is too little memory to
        stream, and on nodes whose disks are not known.
        """
        key = self._key(stage), rooms
        if key not in self._streamed:

            def seconds(a: int, b: int) -> float:
                missing = []
                for part, room in zip(stage, rooms, strict=True):
                    own, node = self._target.part(part.share), self._spec.nodes[part.node]
                    missing.append(max(self.memory(part.share)[a, b] - room, 0.0))
                    kept = weight_bytes(own, (a, b)) - missing[-1]
                    if missing[-1] and not (node.disk_bytes_per_s and streamed(own, (a, b), kept)):
                        return np.inf
                return self.run_s(stage, (a, b), (1,), missing)[0] if any(missing) else np.inf

            self._streamed[key] = _table(self._target.n_layer, seconds)
        return self._streamed[key]

    def row_factors(self, stage: StageRanks) -> list[float]:
        """Times of runs with the numbers of rows in `ROWS`, relative to a run of one row."""
        if (key := self._key(stage)) not in self._factors:
            times_s = self._run_s(stage, (0, max(self._target.n_layer // 2, 1)), ROWS)
            self._factors[key] = [seconds / times_s[0] for seconds in times_s]
        return self._factors[key]

    def memory(self, share: float) -> NDArray[np.float64]:
        """Bytes that a rank needs for its share of layers [a, b).

        Shape (n_layer + 1, n_layer + 1), indexed by [a, b]; infinite where b <= a.
        """
        if share not in self._memory:
            part = self._target.part(share)

            def n_bytes(a: int, b: int) -> float:
                own = stage_memory(part, (a, b), self._n_ctx, self._n_ubatch)
                return (own + process_memory(part, a == 0)).total

            self._memory[share] = _table(part.n_layer, n_bytes)
        return self._memory[share]

    def speed(self, node: int, threads: int) -> float:
        """Speed of a node with this number of threads, in an arbitrary unit."""
        return 1 / self._run_s((StageRank(node, threads, 1.0),), (0, max(self._target.n_layer // 2, 1)), (1,))[0]

    def run_s(
        self, stage: StageRanks, layers: tuple[int, int], rows: Sequence[int], missing_bytes: Sequence[float]
    ) -> list[float]:
        """As `_run_s`, with the message to the next stage, if each rank streams that much of its weights."""
        return [self._message_s + own for own in self._run_s(stage, layers, rows, missing_bytes)]

    @property
    def _message_s(self) -> float:
        """Seconds of the message to the next stage."""
        spec = self._spec
        network = spec.network
        return spec.overheads.run_s + network.latency_s + self._target.border_bytes / network.bytes_per_s

    def _run_s(
        self,
        stage: StageRanks,
        layers: tuple[int, int],
        rows: Sequence[int],
        missing_bytes: Sequence[float] = (),
    ) -> list[float]:
        """Seconds of runs, one per number of rows. A group takes as long as its slowest part, plus its sums."""
        spec, shape = self._spec, self._target
        costs = []
        for p, missing in zip(stage, missing_bytes or (0.0,) * len(stage), strict=True):
            node, part = spec.nodes[p.node], shape.part(p.share)
            cost = stage_cost(node, part, layers, p.threads)
            n_readers = sum(other.node == p.node for other in stage)
            costs.append(streamed_cost(cost, node, part, layers, missing, n_readers))
        own_s = [max(cost.seconds(n, N_PAST) for cost in costs) for n in rows]
        if len(stage) == 1:
            return own_s
        group = group_cost(spec, shape, layers, [p.node for p in stage], max(p.threads for p in stage))
        return [own + group.seconds(n, n) for n, own in zip(rows, own_s, strict=True)]

    def _key(self, stage: StageRanks) -> object:
        """A key that is equal for stages that take the same time. Sums may have been measured between some nodes."""
        nodes = [part.node for part in stage]
        where = nodes if self._spec.sums and len(stage) > 1 else map(nodes.index, nodes)
        return tuple((self._kind[p.node], p.threads, p.share) for p in stage), tuple(where)


def _table(n: int, value: Callable[[int, int], float]) -> NDArray[np.float64]:
    table = np.full((n + 1, n + 1), np.inf)
    for a in range(n):
        for b in range(a + 1, n + 1):
            table[a, b] = value(a, b)
    return table
