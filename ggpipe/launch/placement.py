"""Which rank is on which machine, also after machines have become unreachable."""

from __future__ import annotations

import itertools
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ggpipe.config.layer_split import LayerSplit, LayerSplits, n_ranks_of
from ggpipe.core.layout import part_shares
from ggpipe.errors import LaunchError, Setting


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All ranks, the target's first: their machines, layers and threads."""

    hosts: tuple[str, ...]
    """Machine of each rank."""
    splits: LayerSplits | None
    """How the layers are divided. None: all ranks are the target's, or as planned."""
    threads: tuple[int, ...] = (-1,)
    """One value for all ranks, or one per rank."""
    threads_batch: tuple[int, ...] = (-1,)
    tensor_split: tuple[float, ...] = ()
    """Proportions in which the ranks of a group divide each tensor, for groups of that many ranks."""

    @classmethod
    def on(
        cls,
        slots: Sequence[str],
        splits: LayerSplits | None,
        threads: tuple[int, ...] = (-1,),
        threads_batch: tuple[int, ...] = (-1,),
        tensor_split: tuple[float, ...] = (),
    ) -> Placement:
        """Ranks on the machines of a hostfile, in its order (see `hosts_of`). Once all slots are used, the first one
        is used again, and so on."""
        n_ranks = len(slots) if splits is None else n_ranks_of(splits)
        hosts = tuple(slots[rank % len(slots)] for rank in range(n_ranks))
        return cls(hosts=hosts, splits=splits, threads=threads, threads_batch=threads_batch, tensor_split=tensor_split)

    @property
    def n_target(self) -> int:
        """Number of ranks of the target."""
        return len(self.hosts) if self.splits is None else n_ranks_of(self.splits[:1])

    def changes_since(self, before: Placement) -> str:
        """For the user: what is on different machines now."""
        if len(self.hosts) == len(before.hosts):
            new = [host for host, old in zip(self.hosts, before.hosts, strict=True) if host != old]
            return f"instead, ranks are on {listed(list(dict.fromkeys(new)))}"
        if self.splits is None:
            return f"the layers are planned again for {listed(self.hosts)}"
        parts = []
        if self.hosts[: self.n_target] != before.hosts[: before.n_target]:
            target = _of_target(self.splits)
            stages = zip(target.shares, _stages(target.sizes), strict=True)
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
        """The machines of each draft model that has ranks in the split."""
        n_ranks = [split.n_ranks if split is not None else 0 for split in (self.splits or ())[1:]]
        return [self.hosts[ranks.start : ranks.stop] for ranks in _stages(n_ranks, self.n_target)]

    def without(self, away: Collection[str], spare: Sequence[str] = ()) -> Placement:
        """The placement on the remaining machines.

        A rank on an unreachable machine moves to one of `spare` while there are any. Otherwise, the other ranks of its
        model get its layers, in proportion to their shares. A group continues with fewer ranks, whose parts keep their
        proportions. A draft model that loses all its ranks is left without ranks. If the target loses all its ranks,
        those of the draft models get its layers. Raises LaunchError if no machine is left.
        """
        free = [host for host in spare if host not in away and host not in self.hosts]
        hosts = [free.pop(0) if host in away and free else host for host in self.hosts]
        kept = [rank for rank, host in enumerate(hosts) if host not in away]
        if not kept:
            raise LaunchError("none of the machines of ", Setting("hostfile"), " can be reached")
        splits = self._splits_among(kept) if self.splits is not None else None
        sizes = {size for split in splits or () if split is not None for size in split.sizes}
        return Placement(
            hosts=tuple(hosts[rank] for rank in kept),
            splits=splits,
            threads=_of_ranks(self.threads, kept),
            threads_batch=_of_ranks(self.threads_batch, kept),
            tensor_split=self.tensor_split if len(self.tensor_split) in sizes else (),
        )

    def _splits_among(self, ranks: Sequence[int]) -> LayerSplits:
        assert self.splits is not None
        if ranks[0] >= self.n_target:
            return (LayerSplit(_scaled([1.0] * len(ranks))),)
        drafts = self.splits[1:]
        firsts = itertools.accumulate(
            (split.n_ranks if split is not None else 0 for split in drafts), initial=self.n_target
        )
        left = [self._among(ranks, split, first) for split, first in zip(drafts, firsts, strict=False)]
        while left and left[-1] is None:
            left.pop()
        return (self._among(ranks, _of_target(self.splits).filled, 0), *left)

    def _among(self, ranks: Sequence[int], before: LayerSplit | None, first: int) -> LayerSplit | None:
        """The split of a model after its ranks, which start with `first`, are reduced to those in `ranks`. None if none
        is left."""
        if before is None:
            return None
        kept_shares, kept_sizes = [], []
        for share, stage in zip(before.shares, _stages(before.sizes, first), strict=True):
            parts = zip(stage, part_shares(len(stage), self.tensor_split), strict=True)
            weights = [weight for rank, weight in parts if rank in ranks]
            if weights:
                kept_shares.append(share * sum(weights))
                kept_sizes.append(len(weights))
        if not kept_shares:
            return None
        return LayerSplit(_scaled(kept_shares), tuple(kept_sizes) if max(kept_sizes) > 1 else ())


def _of_target(splits: LayerSplits) -> LayerSplit:
    target = splits[0]
    assert target is not None
    return target


def _stages(sizes: Sequence[int], first: int = 0) -> list[range]:
    """The ranks of each stage."""
    return [range(a, b) for a, b in itertools.pairwise(itertools.accumulate(sizes, initial=first))]


def _scaled(shares: Sequence[float]) -> tuple[float, ...]:
    """The same proportions, scaled to add up to 1."""
    total = sum(shares)
    return tuple(share / total for share in shares) if total else (1.0,) * len(shares)


def _of_ranks(values: tuple[int, ...], ranks: Sequence[int]) -> tuple[int, ...]:
    return values if len(values) == 1 else tuple(values[rank] for rank in ranks)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
