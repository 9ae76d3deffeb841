"""Which stage holds which layers, and which ranks make a stage."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ggpipe.errors import LaunchError, SettingError, UsageError

_SLACK = 1e-6  # shares are written in decimal: 0.1 + 0.2 + 0.7 is a whole


@dataclass(frozen=True)
class StageLayout:
    """A stage of a pipeline."""

    layers: tuple[int, int]
    """First, and one past the last."""
    ranks: tuple[int, ...]
    """The ranks that hold these layers together; the first one speaks for the stage. One, as yet."""


@dataclass(frozen=True)
class Layout:
    """A pipeline's stages in order, and its head, which may hold layers or only coordinate."""

    stages: tuple[StageLayout, ...]
    head: int = 0
    """The pipeline's first rank; the others follow."""

    @classmethod
    def of_ranks(cls, layers: Sequence[tuple[int, int]], head: int = 0) -> Layout:
        """A stage for each rank, from `head` on; an empty range is a head that only coordinates."""
        stages = (StageLayout((a, b), (rank,)) for rank, (a, b) in enumerate(layers, head) if b > a)
        return cls(tuple(stages), head)

    @property
    def stage_ranks(self) -> tuple[int, ...]:
        """All ranks that hold layers, in pipeline order."""
        return tuple(rank for stage in self.stages for rank in stage.ranks)

    @property
    def ranks(self) -> range:
        """All ranks of the pipeline."""
        return range(self.head, max(self.stage_ranks, default=self.head - 1) + 1)

    @property
    def layers(self) -> tuple[tuple[int, int], ...]:
        """The layers of each rank."""
        return tuple(map(self.layers_of, self.ranks))

    def layers_of(self, rank: int) -> tuple[int, int]:
        """A rank's layers; an empty range for a head that only coordinates."""
        return next((stage.layers for stage in self.stages if rank in stage.ranks), (0, 0))

    def next_of(self, rank: int) -> int | None:
        """The rank that a rank's stage sends to; None for the last stage, which answers the head."""
        later = (stage.ranks[0] for stage in self.stages if stage.ranks[0] > rank)
        return next(later, None)


def parse_shares(text: str) -> tuple[tuple[float, ...], tuple[float, ...]]:
    """`a,b,…[/c,…]`: shares of the target's layers for each rank, then of the draft's. Raises UsageError."""
    target, slash, draft = text.partition("/")
    if slash and not draft:
        raise SettingError(f"`shares` {text}: give shares for the draft ranks behind the /, or leave it out")
    return _parse_half(text, target), _parse_half(text, draft) if slash else ()


def _parse_half(text: str, half: str) -> tuple[float, ...]:
    try:
        shares = tuple(float(part) for part in half.split(","))
    except ValueError:
        raise SettingError(f"`shares` {text}: write a share for each rank, as in 0.2,0.4,0.4") from None
    if any(not math.isfinite(s) or s < 0 for s in shares):
        raise SettingError(f"`shares` {text}: a share is a number between 0 and 1")
    if any(s == 0 for s in shares[1:]):
        raise SettingError(f"`shares` {text}: only the first rank (the head) may have a share of 0")
    if sum(shares) > 1 + _SLACK:
        raise SettingError(f"`shares` {text}: shares add up to {sum(shares):g}, more than 1")
    if sum(shares) == 0:
        raise SettingError(f"`shares` {text}: no rank has a share")
    return shares


def fill_up(shares: tuple[float, ...]) -> tuple[float, ...]:
    """With what is left of 1, which `lay_out` gives to a head that has a share."""
    return (shares[0] + max(1 - sum(shares), 0.0), *shares[1:]) if shares[0] > 0 else shares


def shares_text(layout: Layout, draft_layout: Layout | None = None) -> str:
    """The text that `parse_shares` and `lay_out` turn into these layers, with as few digits as possible.

    Raises ValueError for a layout that no shares give: a rank other than the first without layers.
    """
    halves = [_half_text(part) for part in (layout, draft_layout) if part is not None]
    return "/".join(halves)


def _half_text(layout: Layout) -> str:
    counts = [b - a for a, b in layout.layers]
    n_layer = sum(counts)
    if 0 in counts[1:]:
        raise ValueError(f"no shares give ranks {counts} layers")
    for digits in range(1, 12):
        for shares in _roundings(counts, digits):
            text = ",".join(_number_text(share, digits) for share in shares)
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
        shares, _ = parse_shares(text)
        return lay_out(n_layer, len(layout.ranks), shares, layout.head) == layout
    except UsageError:
        return False


def lay_out(n_layer: int, n_ranks: int, shares: tuple[float, ...] | None, head: int = 0) -> Layout:
    """Whole layers for each rank. Each gets its share rounded down; layers left over go to the head, as with
    PipeInfer, or, when the head has none, one each to the ranks that rounding cost most. Without shares the
    layers are spread evenly, the longer ranges first.

    Raises LaunchError when shares and ranks differ in number, or a rank would be left without a layer.
    """
    if shares is None:
        counts = [n_layer // n_ranks + (rank < n_layer % n_ranks) for rank in range(n_ranks)]
    else:
        if len(shares) != n_ranks:
            raise LaunchError(
                f"`shares` names {len(shares)} ranks, but {n_ranks} were started: "
                f"use mpirun -n {len(shares)}, or give {n_ranks} shares"
            )
        counts = [math.floor(share * n_layer + _SLACK) for share in shares]
        left = n_layer - sum(counts)
        if shares[0] > 0:
            counts[0] += left
        else:
            by_loss = sorted(range(1, n_ranks), key=lambda r: counts[r] - shares[r] * n_layer)
            for i in range(left):
                counts[by_loss[i % len(by_loss)]] += 1
    for rank, count in enumerate(counts):
        if count == 0 and not (rank == 0 and shares is not None and shares[0] == 0):
            raise LaunchError(
                f"rank {head + rank} would get no layer: the model has {n_layer} layers for {n_ranks} ranks; "
                "give it a larger share, or use fewer ranks"
            )
    starts = [sum(counts[:rank]) for rank in range(n_ranks)]
    return Layout.of_ranks([(a, a + n) for a, n in zip(starts, counts, strict=True)], head)


def layer_range(layers: tuple[int, int]) -> str:
    """First to last layer, both included: `0-7`, `7`; `-` for none."""
    first, end = layers
    return "-" if end <= first else f"{first}" if end == first + 1 else f"{first}-{end - 1}"
