"""What a group of ranks adds to the time of its slowest part: sums, and putting the logits together."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

from ggpipe.cluster.links import SUM_HEAD_BYTES, SumTimes
from ggpipe.cluster.model_shape import FLOAT_BYTES, ModelShape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.pipeline import TensorWire

# As in native/group_sum.cpp.
_EXTRA_BYTES = 24 << 10
_PIECE = 32768
_BEST_BYTES = 328  # the best 40 tokens of a row, as llama/group.py packs them


@dataclass(frozen=True, slots=True)
class _Exchange:
    """Messages that one node sends to others, or to its own ranks, for each message that a part sends to each other."""

    times: SumTimes
    n_messages: int


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCost:
    """Seconds that a run takes on a group beyond what its slowest part computes."""

    n_parts: int
    n_sums: int
    """Sums in a run: one or two per layer."""
    width: int
    """Values in a row that are added up."""
    sum_s: float
    """See `Overheads.sum_s`."""
    exchanges: tuple[_Exchange, ...]
    """Those that are unlike; a sum waits for the slowest."""
    skew_s: float
    """Seconds that each sum waits for the slowest part; see `Skew`."""
    row_bytes: int
    """What a part but 0 sends to part 0 of a row that wants logits; 0 but for the last stage."""
    halves: bool
    """Sums travel as 16-bit floats."""
    _known: dict[int, float] = field(default_factory=dict, init=False, compare=False, repr=False)

    def seconds(self, n_rows: int, n_wanted: int) -> float:
        """Seconds for a run of `n_rows` rows, `n_wanted` of which want logits."""
        if n_rows not in self._known:
            each_s = self.sum_seconds(n_rows) + self.sum_s + self.skew_s
            self._known[n_rows] = self.n_sums * each_s + self._exchange(1)
        if not (n_wanted and self.row_bytes):
            return self._known[n_rows]
        return self._known[n_rows] + max(
            exchange.times.seconds(n_wanted * self.row_bytes) for exchange in self.exchanges
        )

    def sum_seconds(self, n_rows: int) -> float:
        """Seconds of one sum over this number of rows, without waiting for the slowest part."""
        return self._exchange(n_rows * self.width)

    def _exchange(self, n_values: int) -> float:
        """The pieces of a large sum overlap, so their messages take as long as one with all of their bytes."""
        others = self.n_parts - 1
        if others * (others - 1) * self._bytes(min(n_values, _PIECE)) > self.n_parts * _EXTRA_BYTES:
            n_bytes, phases = self._bytes(math.ceil(n_values / self.n_parts)), 2  # reduce-scatter, allgather
        else:
            n_bytes, phases = self._bytes(n_values), 1
        return phases * max(
            exchange.times.seconds(exchange.n_messages * n_bytes, self.halves) for exchange in self.exchanges
        )

    def _bytes(self, n_values: int) -> int:
        return SUM_HEAD_BYTES + n_values * (2 if self.halves else FLOAT_BYTES)


def group_cost(
    spec: ClusterSpec,
    shape: ModelShape,
    layers: tuple[int, int],
    node_of: Sequence[int],
    n_threads: int,
    wire: TensorWire = "f32",
) -> GroupCost:
    """The cost of layers [a, b) beyond `stage_cost` of the slowest part. `node_of`: the node of each part. `n_threads`:
    of the part that has most."""
    n_parts, n_on = len(node_of), Counter(node_of)
    if len(n_on) == 1:
        ways = [_Exchange(spec.sums_between(node_of[0], node_of[0]), n_parts - 1)]
    else:  # what a node's parts send leaves it by one network card
        ways = [
            _Exchange(spec.sums_between(a, b), n_on[a] * (n_parts - n_on[a]))
            for a, b in itertools.permutations(n_on, 2)
        ]
    return GroupCost(
        n_parts=n_parts,
        n_sums=shape.sums_per_layer * (layers[1] - layers[0]),
        width=shape.n_embd,
        sum_s=spec.overheads.sum_s,
        exchanges=tuple(dict.fromkeys(ways)),
        skew_s=max(way.times.skew.seconds(n_threads) for way in ways),
        row_bytes=_BEST_BYTES if layers[1] == shape.n_layer else 0,
        halves=wire == "f16" and len(n_on) > 1,
    )
