"""Which rank is on which machine, and what is left of that when machines are away."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ggpipe.core.layout import Shares, Split, fill_up, part_shares
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
        n_ranks = len(slots) if split is None else split.n_ranks
        hosts = tuple(slots[rank % len(slots)] for rank in range(n_ranks))
        return cls(hosts=hosts, split=split, threads=threads, threads_batch=threads_batch, tensor_split=tensor_split)

    @property
    def split_text(self) -> str:
        """As on the command line."""
        return "auto" if self.split is None else str(self.split)

    @property
    def n_target(self) -> int:
        """Ranks of the target."""
        return len(self.hosts) - (self.split.n_draft_ranks if self.split is not None else 0)

    def changes_since(self, before: Placement) -> str:
        """For the user: what is on other machines now."""
        if len(self.hosts) == len(before.hosts):
            new = [host for host, old in zip(self.hosts, before.hosts, strict=True) if host != old]
            return f"instead, ranks are on {listed(list(dict.fromkeys(new)))}"
        if self.split is None:
            return f"the layers are planned again for {listed(self.hosts)}"
        parts = []
        if self.hosts[: self.n_target] != before.hosts[: before.n_target]:
            stages = zip(self.split.target.shares, _stages(self.split.target.sizes), strict=True)
            shares = [f"{share:.3g} on {'+'.join(self.hosts[i] for i in ranks)}" for share, ranks in stages]
            parts.append(f"shares of the layers are now {listed(shares)}")
        drafts = list(itertools.zip_longest(before._draft_hosts, self._draft_hosts, fillvalue=()))
        for i, (was_on, now_on) in enumerate(drafts, start=1):
            if now_on != was_on:
                name = f"draft model {i}" if len(drafts) > 1 else "the draft model"
                parts.append(f"{name} is now on {listed(now_on or self.hosts[:1])}")
        return "; ".join(parts)

    @property
    def _draft_hosts(self) -> list[tuple[str, ...]]:
        """The machines of each draft model that the split names."""
        drafts = self.split.drafts if self.split is not None else ()
        return [self.hosts[ranks.start : ranks.stop] for ranks in _stages([d.n_ranks for d in drafts], self.n_target)]

    def without(self, away: Collection[str], spare: Sequence[str] = ()) -> Placement:
        """Ranks on the machines that are left.

        A rank on a machine that is away goes to one of `spare`, as long as there are any. Else the others get its
        layers, in proportion to their shares; layers of a draft go to other ranks of that draft. A group goes on with
        fewer ranks, and each keeps its part of the model in proportion to the others'. A draft that loses all of its
        ranks has none, and without a rank of the target those of drafts get the target's layers.
        Raises LaunchError when no machine is left.
        """
        free = [host for host in spare if host not in away and host not in self.hosts]
        hosts = [free.pop(0) if host in away and free else host for host in self.hosts]
        kept = [rank for rank, host in enumerate(hosts) if host not in away]
        if not kept:
            raise LaunchError("none of the machines of `hostfile` can be reached")
        split = self._split_among(kept) if self.split is not None else None
        sizes = split.sizes if split is not None else ()
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
            return Split(Shares(_scaled([1.0] * len(ranks))))
        before = self.split
        target = before.target._replace(shares=fill_up(before.target.shares))
        firsts = itertools.accumulate((draft.n_ranks for draft in before.drafts), initial=self.n_target)
        drafts = [self._among(ranks, draft, first) for draft, first in zip(before.drafts, firsts, strict=False)]
        while drafts and not drafts[-1].shares:
            drafts.pop()
        return Split(self._among(ranks, target, 0), tuple(drafts))

    def _among(self, ranks: Sequence[int], before: Shares, first: int) -> Shares:
        """What is left of a model's stages, which begin with rank `first`, on those ranks of theirs that are among
        `ranks`."""
        kept_shares, kept_sizes = [], []
        for share, stage in zip(before.shares, _stages(before.sizes, first), strict=True):
            parts = zip(stage, part_shares(len(stage), self.tensor_split), strict=True)
            weights = [weight for rank, weight in parts if rank in ranks]
            if weights:
                kept_shares.append(share * sum(weights))
                kept_sizes.append(len(weights))
        return Shares(_scaled(kept_shares), tuple(kept_sizes) if max(kept_sizes, default=1) > 1 else ())


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
