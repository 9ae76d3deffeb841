"""How models' layers are divided among ranks, as users write it: `0.5,0.5*2/1.0`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ggpipe.config.checks import check_range
from ggpipe.errors import SettingError

MAX_PARTS = 16
"""Ranks of a group: ggml has room for as many devices that compute together."""
SLACK = 1e-6
"""Shares are written in decimal: 0.1 + 0.2 + 0.7 is a whole."""


@dataclass(frozen=True)
class LayerSplit:
    """How one model's layers are divided."""

    shares: tuple[float, ...]
    """Of the layers, for each stage; the target's first one may be 0, for a head that only coordinates."""
    group_sizes: tuple[int, ...] = ()
    """Ranks of each stage; empty: one each."""

    def __post_init__(self) -> None:
        n_sizes, n_shares = len(self.group_sizes), len(self.shares)
        if n_sizes not in (0, n_shares):
            raise SettingError("group_sizes", f"has {n_sizes} numbers for {n_shares} shares", "give one for each")
        for size in self.group_sizes:
            check_range("group_sizes", size, 1, MAX_PARTS, "a number of ranks")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each stage."""
        return self.group_sizes or (1,) * len(self.shares)

    @property
    def n_ranks(self) -> int:
        """Ranks of all stages."""
        return sum(self.sizes)

    @property
    def filled(self) -> LayerSplit:
        """With what is left of 1, which `lay_out` gives to a head that has a share."""
        first, *others = self.shares
        left = max(1 - sum(self.shares), 0.0) if first > 0 else 0.0
        return LayerSplit((first + left, *others), self.group_sizes)

    def __str__(self) -> str:
        stages = zip(self.shares, self.sizes, strict=True)
        return ",".join(f"{share or 0!r}*{size}" if size > 1 else f"{share or 0!r}" for share, size in stages)


LayerSplits = tuple[LayerSplit | None, ...]
"""The target's, then each draft model's; None: a draft model without ranks of its own."""


def n_ranks_of(splits: Sequence[LayerSplit | None]) -> int:
    """All ranks: the target's, and then each draft model's."""
    return sum(split.n_ranks for split in splits if split is not None)


def text_of(splits: Sequence[LayerSplit | None]) -> str:
    """As the command line has it."""
    return "/".join("" if split is None else str(split) for split in splits)


def parse_layer_split(text: str) -> LayerSplits:
    """`a,b*n,…[/c,…[/d,…]]`: shares of the target's layers for each rank, or for a group of n ranks, then of each draft
    model's. A draft model without shares has no ranks of its own; the last one has shares.

    Raises SettingError.
    """
    target, *drafts = text.split("/")
    if drafts and not drafts[-1]:
        raise _error(text, "give shares for the draft ranks behind the /, or leave it out")
    return (_parse_model(text, target), *(_parse_model(text, own) if own else None for own in drafts))


def _parse_model(text: str, part: str) -> LayerSplit:
    """A model's part of the text."""
    stages = [stage.partition("*") for stage in part.split(",")]
    try:
        shares = tuple(float(share) for share, _, _ in stages)
    except ValueError:
        raise _error(text, "write a share for each rank, as in 0.2,0.4,0.4") from None
    sizes = tuple(_group_size(text, size) if star else 1 for _, star, size in stages)
    if any(not math.isfinite(s) or s < 0 for s in shares):
        raise _error(text, "a share is a number between 0 and 1")
    if any(s == 0 for s in shares[1:]):
        raise _error(text, "only the first rank (the head) may have a share of 0")
    if sum(shares) > 1 + SLACK:
        raise _error(text, f"shares add up to {sum(shares):g}, more than 1")
    if sum(shares) == 0:
        raise _error(text, "no rank has a share")
    if shares[0] == 0 and sizes[0] > 1:
        raise _error(text, "a head with a share of 0 computes nothing, so it is no group")
    return LayerSplit(shares, sizes if max(sizes) > 1 else ())


def _group_size(text: str, size: str) -> int:
    if not size.strip().isdecimal():
        raise _error(text, "write the share of a group and its number of ranks, as in 0.5*2")
    if not 1 <= int(size) <= MAX_PARTS:
        raise _error(text, f"a group has 1 to {MAX_PARTS} ranks")
    return int(size)


def _error(text: str, why: str) -> SettingError:
    return SettingError("layer_split", text, why)
