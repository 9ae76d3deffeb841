"""Which stage holds which layers, and which ranks make a stage."""

from __future__ import annotations

import collections
import contextlib
import itertools
import math
import statistics
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from ggpipe.config.layer_split import LEAST_SUM, SLACK, LayerSplit
from ggpipe.errors import LaunchError, Setting


@dataclass(frozen=True)
class StageLayout:
    """A stage of a pipeline."""

    layers: tuple[int, int]
    """First, and one past the last."""
    ranks: tuple[int, ...]
    """The ranks that hold these layers together, one or a group. The first one, part 0, speaks for the stage."""


@dataclass(frozen=True)
class Layout:
    """A pipeline's stages in order, and its head, which may hold layers or only coordinate."""

    stages: tuple[StageLayout, ...]
    head: int = 0
    """The pipeline's first rank; the others follow."""

    @classmethod
    def of_ranks(cls, layers: Sequence[tuple[int, int]], head: int = 0, group_sizes: Sequence[int] = ()) -> Layout:
        """A stage for each range of layers, on the ranks from `head` on; an empty range is a head that only
        coordinates. `group_sizes`: ranks of each stage; empty: one each."""
        sizes = group_sizes or (1,) * len(layers)
        ends = itertools.accumulate(sizes, initial=head)
        ranks = (tuple(range(first, end)) for first, end in itertools.pairwise(ends))
        return cls(tuple(StageLayout((a, b), own) for (a, b), own in zip(layers, ranks, strict=True) if b > a), head)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """All ranks that hold layers, in pipeline order."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def group_sizes(self) -> frozenset[int]:
        """Ranks of its groups; empty where each stage has one rank."""
        return frozenset(len(stage.ranks) for stage in self.stages) - {1}

    @property
    def ranks(self) -> range:
        """All ranks of the pipeline."""
        return range(self.head, max(self.stage_ranks, default=self.head - 1) + 1)

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """The layers of each rank."""
        return tuple(map(self.layers_of, self.ranks))

    @property
    def fewest_layers(self) -> int:
        """Layers of the stage that has the fewest."""
        return min(end - first for first, end in (stage.layers for stage in self.stages))

    def stage_of(self, rank: int) -> StageLayout:
        """The stage that a rank is in; one without layers for a head that only coordinates."""
        return next((stage for stage in self.stages if rank in stage.ranks), StageLayout((0, 0), (rank,)))

    def layers_of(self, rank: int) -> tuple[int, int]:
        """A rank's layers; an empty range for a head that only coordinates."""
        return self.stage_of(rank).layers

    def part_of(self, rank: int) -> int:
        """Which part of its stage's group a rank is; 0 for a stage of one rank."""
        return self.stage_of(rank).ranks.index(rank)

    def receivers_of(self, rank: int) -> tuple[int, ...]:
        """The ranks that a rank sends runs to: all parts of the next stage.

        None for the last stage, which answers the head, and for all parts but 0: what they compute is part 0's as well.
        """
        if self.part_of(rank) > 0:
            return ()
        return next((stage.ranks for stage in self.stages if stage.ranks[0] > rank), ())


def decimal_split(layout: Layout) -> LayerSplit:
    """The split that `lay_out` turns into this layout, with as few digits as possible.

    Raises ValueError for a layout that no shares give: a rank other than the first without layers.
    """
    stages = [layout.stage_of(rank) for rank in layout.ranks if layout.part_of(rank) == 0]
    counts = [b - a for a, b in (stage.layers for stage in stages)]
    sizes = tuple(len(stage.ranks) for stage in stages)
    n_layer, n_ranks = sum(counts), len(layout.ranks)
    for digits in range(1, 12) if 0 not in counts[1:] else ():
        for shares in filter(lambda shares: all(shares[1:]), _roundings(counts, digits)):
            split = LayerSplit(tuple(share / 10**digits for share in shares), sizes if max(sizes) > 1 else ())
            with contextlib.suppress(LaunchError):
                adds_up = LEAST_SUM * 10**digits <= sum(shares) <= 10**digits
                if adds_up and lay_out(n_layer, n_ranks, split, layout.head) == layout:
                    return split
    raise ValueError(f"no shares give ranks {counts} layers")


def _roundings(counts: list[int], digits: int) -> Iterator[list[int]]:
    """Shares in units of the last digit: rounded to the nearest; up, with the rest for the head; or, if the head has no
    layers, up except for the largest, which gets the rest."""
    unit, n_layer = 10**digits, sum(counts)
    yield [round(count * unit / n_layer) for count in counts]
    others = [-(-count * unit // n_layer) for count in counts[1:]]
    yield [max(unit - sum(others), 0) if counts[0] else 0, *others]
    if not counts[0]:
        others[others.index(max(others))] -= max(sum(others) - unit, 0)
        yield [0, *others]


def lay_out(n_layer: int, n_ranks: int, split: LayerSplit | None, head: int = 0) -> Layout:
    """Whole layers for each rank, or for each group.

    Each stage gets its share rounded down; layers left over go to the head, as with PipeInfer, or, when the head has
    none, one each to the stages that rounding cost most. Without a split the layers are spread evenly, the longer
    ranges first.

    Raises LaunchError when shares and ranks differ in number, or a rank would be left without a layer.
    """
    shares, group_sizes = (split.shares, split.group_sizes) if split is not None else (None, ())
    n_stages = n_ranks if shares is None else len(shares)
    if shares is None:
        counts = [n_layer // n_ranks + (rank < n_layer % n_ranks) for rank in range(n_ranks)]
    else:
        if (n_named := sum(group_sizes) or n_stages) != n_ranks:
            raise LaunchError(
                Setting("layer_split"),
                f" names {n_named} ranks, but {n_ranks} were started: use mpirun -n {n_named}, or give {n_ranks} "
                "shares",
            )
        counts = [math.floor(share * n_layer + SLACK) for share in shares]
        left = n_layer - sum(counts)
        if shares[0] > 0:
            counts[0] += left
        else:
            by_loss = sorted(range(1, n_stages), key=lambda i: counts[i] - shares[i] * n_layer)
            for i in range(left):
                counts[by_loss[i % len(by_loss)]] += 1
    for i, count in enumerate(counts):
        if count == 0 and not (i == 0 and shares is not None and shares[0] == 0):
            rank, things = head + (sum(group_sizes[:i]) or i), "stages" if group_sizes else "ranks"
            raise LaunchError(
                f"rank {rank} would get no layer: the model has {n_layer} layers for {n_stages} {things}; "
                f"give it a larger share, or use fewer {things}"
            )
    starts = [sum(counts[:i]) for i in range(n_stages)]
    return Layout.of_ranks([(a, a + n) for a, n in zip(starts, counts, strict=True)], head, group_sizes)


def part_shares(n_parts: int, tensor_split: Sequence[float] = ()) -> tuple[float, ...]:
    """The parts' shares of a group's tensors, which add up to 1: in the proportions of `tensor_split` where these are
    for groups of as many ranks, else even."""
    weights = tensor_split if len(tensor_split) == n_parts else (1.0,) * n_parts
    return tuple(weight / sum(weights) for weight in weights)


def layer_range(layers: tuple[int, int]) -> str:
    """First to last layer, both included: `0-7`, `7`; `-` for none."""
    first, end = layers
    return "-" if end <= first else f"{first}" if end == first + 1 else f"{first}-{end - 1}"


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Where a rank is."""

    machine: object
    n_cores: int
    """Of the machine."""
    n_threads: int
    """Of the rank."""


def crowding(target: Layout, drafts: Iterable[Layout], places: Sequence[RankPlace]) -> float:
    """Threads per core on the machine of the target's median stage; 0 if no machine holds several stages, those of
    drafts included. `places`: of each rank."""
    n_stages, ranks = collections.Counter[object](), set[int]()
    for layout in (target, *drafts):
        for stage in layout.stages:
            n_stages.update({places[rank].machine for rank in stage.ranks})
            ranks.update(stage.ranks)
    if max(n_stages.values()) == 1:
        return 0.0
    n_threads = collections.Counter[object]()
    for place in (places[rank] for rank in ranks):
        n_threads[place.machine] += place.n_threads
    return statistics.median_high(
        max(n_threads[places[rank].machine] / places[rank].n_cores for rank in stage.ranks) for stage in target.stages
    )
