"""Which rank is on which machine, and what is left of that when machines are away."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ggpipe.core.layout import Split, fill_up, part_shares
from ggpipe.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All ranks, the target's first: their machines, and what they have of the models and the cores."""

    hosts: tuple[str, ...]
    """The machine of each rank."""
    split: Split | None
    """Of the layers; None: all ranks are the target's, or what a plan makes them."""
    threads: tuple[int, ...] = (-1,)
    """One value for all ranks, or one for each."""
    threads_batch: tuple[int, ...] = (-1,)
    tensor_split: tuple[float, ...] = ()
    """In which proportions the ranks of a group divide each tensor, in groups of as many ranks."""

    @classmethod
    def on(
        cls,
        slots: Sequence[str],
        split: Split | None,
        threads: tuple[int, ...] = (-1,),
        threads_batch: tuple[int, ...] = (-1,),
        tensor_split: tuple[float, ...] = (),
    ) -> Placement:
        """Ranks on the machines of a hostfile, in its order (see `hosts_of`). Further ranks begin with the first
        again."""
        n_ranks = len(slots) if split is None else sum(split.sizes + split.draft_sizes)
        hosts = tuple(slots[rank % len(slots)] for rank in range(n_ranks))
        return cls(hosts=hosts, split=split, threads=threads, threads_batch=threads_batch, tensor_split=tensor_split)

    @property
    def split_text(self) -> str:
        """As on the command line."""
        return "auto" if self.split is None else str(self.split)

    @property
    def n_target(self) -> int:
        """Ranks of the target."""
        return len(self.hosts) - (sum(self.split.draft_sizes) if self.split is not None else 0)

    def changes_since(self, before: Placement) -> str:
        """For the user: what is on other machines now."""
        if len(self.hosts) == len(before.hosts):
            new = [host for host, old in zip(self.hosts, before.hosts, strict=True) if host != old]
            return f"instead, ranks are on {listed(list(dict.fromkeys(new)))}"
        if self.split is None:
            return f"the layers are planned again for {listed(self.hosts)}"
        parts = []
        if self.hosts[: self.n_target] != before.hosts[: before.n_target]:
            stages = zip(self.split.shares, _stages(self.split.sizes), strict=True)
            shares = [f"{share:.3g} on {'+'.join(self.hosts[i] for i in ranks)}" for share, ranks in stages]
            parts.append(f"shares of the layers are now {listed(shares)}")
        draft = self.hosts[self.n_target :]
        if draft != before.hosts[before.n_target :]:
            parts.append(f"the draft model is now on {listed(draft or self.hosts[:1])}")
        return "; ".join(parts)

    def without(self, away: Collection[str], spare: Sequence[str] = ()) -> Placement:
        """Ranks on the machines that are left.

        A rank on a machine that is away goes to one of `spare`, as long as there are any. Else the others get its
        layers, in proportion to their shares; layers of the draft go to other draft ranks. A group goes on with fewer
        ranks, and each keeps its part of the model in proportion to the others'. Without a rank of its own the draft
        has none, and without a rank of the target the draft's get the target's layers.
        Raises LaunchError when no machine is left.
        """
        free = [host for host in spare if host not in away and host not in self.hosts]
        hosts = [free.pop(0) if host in away and free else host for host in self.hosts]
        kept = [rank for rank, host in enumerate(hosts) if host not in away]
        if not kept:
            raise LaunchError("none of the machines of `hostfile` can be reached")
        split = self._split_among(kept) if self.split is not None else None
        sizes = split.sizes + split.draft_sizes if split is not None else ()
        return Placement(
            hosts=tuple(hosts[rank] for rank in kept),
            split=split,
            threads=_of_ranks(self.threads, kept),
            threads_batch=_of_ranks(self.threads_batch, kept),
            tensor_split=self.tensor_split if len(self.tensor_split) in sizes else (),
        )

    def _split_among(self, ranks: Sequence[int]) -> Split:
        assert self.split is not None
        if ranks[0] >= self.n_target:
            return Split(_scaled([1.0] * len(ranks)))
        before = self.split
        shares, group_sizes = self._among(ranks, fill_up(before.shares), before.sizes, 0)
        draft_shares, draft_group_sizes = self._among(ranks, before.draft_shares, before.draft_sizes, self.n_target)
        return Split(shares, draft_shares, group_sizes, draft_group_sizes)

    def _among(
        self, ranks: Sequence[int], shares: Sequence[float], sizes: Sequence[int], first: int
    ) -> tuple[tuple[float, ...], tuple[int, ...]]:
        """Shares and group sizes of the stages from rank `first` on that have a rank among `ranks`."""
        kept_shares, kept_sizes = [], []
        for share, stage in zip(shares, _stages(sizes, first), strict=True):
            parts = zip(stage, part_shares(len(stage), self.tensor_split), strict=True)
            weights = [weight for rank, weight in parts if rank in ranks]
            if weights:
                kept_shares.append(share * sum(weights))
                kept_sizes.append(len(weights))
        return _scaled(kept_shares), tuple(kept_sizes) if max(kept_sizes, default=1) > 1 else ()


def _stages(sizes: Sequence[int], first: int = 0) -> list[range]:
    """The ranks of each stage."""
    return [range(a, b) for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=first))]


def _scaled(shares: Sequence[float]) -> tuple[float, ...]:
    """The same proportions, adding up to 1."""
    total = sum(shares)
    return tuple(share / total for share in shares) if total else (1.0,) * len(shares)


def _of_ranks(values: tuple[int, ...], ranks: Sequence[int]) -> tuple[int, ...]:
    return values if len(values) == 1 else tuple(values[rank] for rank in ranks)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
