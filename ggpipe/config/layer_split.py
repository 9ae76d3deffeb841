"""How layers are divided among ranks, in the notation of users: `0.5,0.5*2/1.0`."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ggpipe.config.checks import check_range
from ggpipe.errors import SettingError

MAX_PARTS = 16
"""Maximum number of ranks in a group, which is ggml's for devices that compute together."""
MAX_RANKS = 1024
"""Maximum number of ranks to start or to plan for, and of machines in a cluster file."""
LEAST_SUM = 0.95
"""Least sum of the shares that a user writes. Rounded ones, such as 0.33,0.33,0.33, add up to a little less than 1."""
SLACK = 1e-6
"""Tolerance for the sum of shares, which are rounded decimals."""


@dataclass(frozen=True)
class LayerSplit:
    """How one model's layers are divided. Raises SettingError for invalid group sizes."""

    shares: tuple[float, ...]
    """Each stage's share of the layers. The target's first share may be 0, for a head that only coordinates."""
    group_sizes: tuple[int, ...] = ()
    """Number of ranks in each stage; empty: one each."""

    def __post_init__(self) -> None:
        n_sizes, n_shares = len(self.group_sizes), len(self.shares)
        if n_sizes not in (0, n_shares):
            raise SettingError("group_sizes", f"has {n_sizes} numbers for {n_shares} shares", "give one per share")
        for size in self.group_sizes:
            check_range("group_sizes", size, 1, MAX_PARTS, "a number of ranks")

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of ranks in each stage."""
        return self.group_sizes or (1,) * len(self.shares)

    @property
    def n_ranks(self) -> int:
        """Number of ranks in all stages."""
        return sum(self.sizes)

    @property
    def filled(self) -> LayerSplit:
        """The split with shares that add up to 1: a head with a share gets the rest."""
        first, *others = self.shares
        left = max(1 - sum(self.shares), 0.0) if first > 0 else 0.0
        return LayerSplit((first + left, *others), self.group_sizes)

    def __str__(self) -> str:
        stages = zip(self.shares, self.sizes, strict=True)
        return ",".join(f"{share or 0!r}*{size}" if size > 1 else f"{share or 0!r}" for share, size in stages)


LayerSplits = tuple[LayerSplit | None, ...]
"""The splits of the target and of each draft model; None: a draft model without ranks of its own."""


def n_ranks_of(splits: Sequence[LayerSplit | None]) -> int:
    """Number of ranks of all models."""
    return sum(split.n_ranks for split in splits if split is not None)


def text_of(splits: Sequence[LayerSplit | None]) -> str:
    """The splits in the notation of the command line."""
    return "/".join("" if split is None else str(split) for split in splits)


def parse_layer_split(text: str) -> LayerSplits:
    """Parse `a,b*n,…[/c,…[/d,…]]`: the shares of the target's layers, then those of each draft model's.

    A share is for one rank, or for a group of n ranks. A draft model without shares has no ranks of its own; the last
    one must have shares. Raises SettingError.
    """
    target, *drafts = text.split("/")
    if drafts and not drafts[-1]:
        raise _error(text, "give shares for the draft ranks after the /, or leave it out")
    return (_parse_model(text, target), *(_parse_model(text, own) if own else None for own in drafts))


def _parse_model(text: str, part: str) -> LayerSplit:
    """Parse one model's part of the text."""
    stages = [stage.partition("*") for stage in part.split(",")]
    try:
        shares = tuple(float(share) for share, _, _ in stages)
    except ValueError:
        raise _error(text, "give one share per rank, as in 0.2,0.4,0.4") from None
    sizes = tuple(_group_size(text, size) if star else 1 for _, star, size in stages)
    if any(not math.isfinite(s) or s < 0 for s in shares):
        raise _error(text, "a share is a number between 0 and 1")
    if any(s == 0 for s in shares[1:]):
        raise _error(text, "only the first rank (the head) may have a share of 0")
    if sum(shares) > 1 + SLACK:
        raise _error(text, f"shares add up to {sum(shares):g}, more than 1")
    if sum(shares) == 0:
        raise _error(text, "no rank has a share")
    if sum(shares) < LEAST_SUM - SLACK:
        pairs = zip(shares, sizes, strict=True)
        whole = ",".join(f"{share / sum(shares):.3g}" + f"*{size}" * (size > 1) for share, size in pairs)
        raise _error(text, f"shares add up to {sum(shares):g}, less than 1: some layers have no rank; for all, {whole}")
    if shares[0] == 0 and sizes[0] > 1:
        raise _error(text, "a head with a share of 0 computes nothing, so it cannot be a group")
    return LayerSplit(shares, sizes if max(sizes) > 1 else ())


def _group_size(text: str, size: str) -> int:
    if not size.strip().isdecimal():
        raise _error(text, "give a group's share and its number of ranks, as in 0.5*2")
    if not 1 <= int(size) <= MAX_PARTS:
        raise _error(text, f"a group has 1 to {MAX_PARTS} ranks")
    return int(size)


def _error(text: str, why: str) -> SettingError:
    return SettingError("layer_split", text, why)
