"""Which stage holds which layers, and which ranks make a stage."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from ggpipe.config.engine import MAX_PARTS
from ggpipe.errors import LaunchError, SettingError, UsageError

_SLACK = 1e-6  # shares are written in decimal: 0.1 + 0.2 + 0.7 is a whole


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


class Shares(NamedTuple):
    """How a model's layers are divided."""

    shares: tuple[float, ...]
    """Of the layers, for each stage; the target's first one may be 0, for a head that only coordinates."""
    group_sizes: tuple[int, ...] = ()
    """Ranks of each stage; empty: one each."""

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each stage."""
        return self.group_sizes or (1,) * len(self.shares)

    @property
    def n_ranks(self) -> int:
        """Ranks of all stages."""
        return sum(self.sizes)

    def __str__(self) -> str:
        stages = zip(self.shares, self.sizes, strict=True)
        return ",".join(f"{share!r}*{size}" if size > 1 else repr(share) for share, size in stages)


class Split(NamedTuple):
    """A layer split as the command line writes it."""

    target: Shares
    drafts: tuple[Shares, ...] = ()
    """Of each draft model, in order; one without shares has no ranks of its own."""

    @property
    def n_draft_ranks(self) -> int:
        """Ranks that hold a draft model and nothing else."""
        return sum(draft.n_ranks for draft in self.drafts)

    @property
    def n_ranks(self) -> int:
        """All ranks: the target's, and then each draft model's."""
        return self.target.n_ranks + self.n_draft_ranks

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each stage, of all models."""
        return tuple(size for part in (self.target, *self.drafts) for size in part.sizes)

    def __str__(self) -> str:
        return "/".join(map(str, (self.target, *self.drafts)))


def parse_split(text: str) -> Split:
    """`a,b*n,…[/c,…[/d,…]]`: shares of the target's layers for each rank, or for a group of n ranks, then of each draft
    model's. A draft model without shares has no ranks of its own; the last one has shares.

    Raises UsageError.
    """
    target, *drafts = text.split("/")
    if drafts and not drafts[-1]:
        raise SettingError(f"`shares` {text}: give shares for the draft ranks behind the /, or leave it out")
    return Split(_parse_part(text, target), tuple(_parse_part(text, own) if own else Shares(()) for own in drafts))


def _parse_part(text: str, part: str) -> Shares:
    """A model's part of the text."""
    stages = [stage.partition("*") for stage in part.split(",")]
    try:
        shares = tuple(float(share) for share, _, _ in stages)
    except ValueError:
        raise SettingError(f"`shares` {text}: write a share for each rank, as in 0.2,0.4,0.4") from None
    sizes = tuple(_group_size(text, size) if star else 1 for _, star, size in stages)
    if any(not math.isfinite(s) or s < 0 for s in shares):
        raise SettingError(f"`shares` {text}: a share is a number between 0 and 1")
    if any(s == 0 for s in shares[1:]):
        raise SettingError(f"`shares` {text}: only the first rank (the head) may have a share of 0")
    if sum(shares) > 1 + _SLACK:
        raise SettingError(f"`shares` {text}: shares add up to {sum(shares):g}, more than 1")
    if sum(shares) == 0:
        raise SettingError(f"`shares` {text}: no rank has a share")
    if shares[0] == 0 and sizes[0] > 1:
        raise SettingError(f"`shares` {text}: a head with a share of 0 computes nothing, so it is no group")
    return Shares(shares, sizes if max(sizes) > 1 else ())


def _group_size(text: str, size: str) -> int:
    if not size.strip().isdecimal():
        raise SettingError(f"`shares` {text}: write the share of a group and its number of ranks, as in 0.5*2")
    if not 1 <= int(size) <= MAX_PARTS:
        raise SettingError(f"`shares` {text}: a group has 1 to {MAX_PARTS} ranks")
    return int(size)


def fill_up(shares: tuple[float, ...]) -> tuple[float, ...]:
    """With what is left of 1, which `lay_out` gives to a head that has a share."""
    return (shares[0] + max(1 - sum(shares), 0.0), *shares[1:]) if shares[0] > 0 else shares


def shares_text(layout: Layout, draft_layout: Layout | None = None) -> str:
    """The text that `parse_split` and `lay_out` turn into these layers, with as few digits as possible.

    Raises ValueError for a layout that no shares give: a rank other than the first without layers.
    """
    return "/".join(_part_text(part) for part in (layout, draft_layout) if part is not None)


def _part_text(layout: Layout) -> str:
    stages = [layout.stage_of(rank) for rank in layout.ranks if layout.part_of(rank) == 0]
    counts = [b - a for a, b in (stage.layers for stage in stages)]
    sizes = [f"*{len(stage.ranks)}" if len(stage.ranks) > 1 else "" for stage in stages]
    n_layer = sum(counts)
    if 0 in counts[1:]:
        raise ValueError(f"no shares give ranks {counts} layers")
    for digits in range(1, 12):
        for shares in _roundings(counts, digits):
            numbers = (_number_text(share, digits) for share in shares)
            text = ",".join(number + size for number, size in zip(numbers, sizes, strict=True))
            if _gives(text, n_layer, layout):
                return text
    raise ValueError(f"no shares give ranks {counts} layers")


def _roundings(counts: list[int], digits: int) -> Iterator[list[int]]:
    """Shares in units of the last digit: rounded to the nearest, then up, with the rest for the head."""
    unit, n_layer = 10**digits, sum(counts)
    yield [round(count * unit / n_layer) for count in counts]
    others = [-(-count * unit // n_layer) for count in counts[1:]]
    yield [max(unit - sum(others), 0) if counts[0] else 0, *others]


def _number_text(share: int, digits: int) -> str:
    text = f"{share / 10**digits:.{digits}f}".rstrip("0")
    return "0" if share == 0 else text + "0" if text.endswith(".") else text


def _gives(text: str, n_layer: int, layout: Layout) -> bool:
    try:
        shares, group_sizes = parse_split(text).target
        return lay_out(n_layer, len(layout.ranks), shares, layout.head, group_sizes) == layout
    except UsageError:
        return False


def lay_out(
    n_layer: int, n_ranks: int, shares: tuple[float, ...] | None, head: int = 0, group_sizes: tuple[int, ...] = ()
) -> Layout:
    """Whole layers for each rank, or for each group: `group_sizes` has the ranks of each stage; empty: one each.

    Each stage gets its share rounded down; layers left over go to the head, as with PipeInfer, or, when the head has
    none, one each to the stages that rounding cost most. Without shares the layers are spread evenly, the longer ranges
    first.

    Raises LaunchError when shares and ranks differ in number, or a rank would be left without a layer.
    """
    n_stages = n_ranks if shares is None else len(shares)
    if shares is None:
        counts = [n_layer // n_ranks + (rank < n_layer % n_ranks) for rank in range(n_ranks)]
    else:
        if (n_named := sum(group_sizes) or n_stages) != n_ranks:
            raise LaunchError(
                f"`shares` names {n_named} ranks, but {n_ranks} were started: "
                f"use mpirun -n {n_named}, or give {n_ranks} shares"
            )
        counts = [math.floor(share * n_layer + _SLACK) for share in shares]
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
