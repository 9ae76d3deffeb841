"""Which rank is on which machine, and what is left of that when machines are away."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from ggpipe.core.layout import fill_up
from ggpipe.errors import LaunchError


@dataclass(frozen=True, kw_only=True)
class Placement:
    """All ranks, the target's first: their machines, and what they have of the models and the cores."""

    hosts: tuple[str, ...]
    """The machine of each rank."""
    shares: tuple[float, ...] | None
    """Of the target's layers, for each of its ranks; None: all ranks are the target's, or what a plan makes them."""
    draft_shares: tuple[float, ...] = ()
    """Of the draft's layers, for each rank behind the target's."""
    threads: tuple[int, ...] = (-1,)
    """One value for all ranks, or one for each."""
    threads_batch: tuple[int, ...] = (-1,)

    @classmethod
    def on(
        cls,
        slots: Sequence[str],
        shares: tuple[float, ...] | None,
        draft_shares: tuple[float, ...],
        threads: tuple[int, ...],
        threads_batch: tuple[int, ...],
    ) -> Placement:
        """Ranks on the machines of a hostfile, in its order (see `hosts_of`). Further ranks begin with the first
        again."""
        n_ranks = len(slots) if shares is None else len(shares) + len(draft_shares)
        hosts = tuple(slots[rank % len(slots)] for rank in range(n_ranks))
        return cls(hosts=hosts, shares=shares, draft_shares=draft_shares, threads=threads, threads_batch=threads_batch)

    @property
    def split_text(self) -> str:
        """As on the command line."""
        if self.shares is None:
            return "auto"
        return "/".join(",".join(map(repr, half)) for half in (self.shares, self.draft_shares) if half)

    @property
    def n_target(self) -> int:
        """Ranks of the target."""
        return len(self.hosts) - len(self.draft_shares)

    def changes_since(self, before: Placement) -> str:
        """For the user: what is on other machines now."""
        if len(self.hosts) == len(before.hosts):
            new = [host for host, old in zip(self.hosts, before.hosts, strict=True) if host != old]
            return f"instead, ranks are on {listed(list(dict.fromkeys(new)))}"
        if self.shares is None:
            return f"the layers are planned again for {listed(self.hosts)}"
        parts = []
        if self.hosts[: self.n_target] != before.hosts[: before.n_target]:
            shares = [f"{share:.3g} on {host}" for share, host in zip(self.shares, self.hosts, strict=False)]
            parts.append(f"shares of the layers are now {listed(shares)}")
        draft = self.hosts[self.n_target :]
        if draft != before.hosts[before.n_target :]:
            parts.append(f"the draft model is now on {listed(draft or self.hosts[:1])}")
        return "; ".join(parts)

    def without(self, away: Collection[str], spare: Sequence[str] = ()) -> Placement:
        """Ranks on the machines that are left.

        A rank on a machine that is away goes to one of `spare`, as long as there are any. Else the others get its
        layers, in proportion to their shares; layers of the draft go to other draft ranks. Without one the draft has
        no rank of its own, and without a rank of the target the draft's get the target's layers.
        Raises LaunchError when no machine is left.
        """
        free = [host for host in spare if host not in away and host not in self.hosts]
        hosts = [free.pop(0) if host in away and free else host for host in self.hosts]
        kept = [rank for rank, host in enumerate(hosts) if host not in away]
        if not kept:
            raise LaunchError("none of the machines of `hostfile` can be reached")
        shares, draft_shares = self.shares, self.draft_shares
        if shares is not None:
            n_target = len(shares)
            draft = [rank for rank in kept if rank >= n_target]
            if kept[0] < n_target:
                shares = _scaled([share for rank, share in enumerate(fill_up(shares)) if rank in kept])
                draft_shares = _scaled([draft_shares[rank - n_target] for rank in draft])
            else:
                shares, draft_shares = _scaled([1.0] * len(draft)), ()
        return Placement(
            hosts=tuple(hosts[rank] for rank in kept),
            shares=shares,
            draft_shares=draft_shares,
            threads=_of_ranks(self.threads, kept),
            threads_batch=_of_ranks(self.threads_batch, kept),
        )


def _scaled(shares: Sequence[float]) -> tuple[float, ...]:
    """The same proportions, adding up to 1."""
    total = sum(shares)
    return tuple(share / total for share in shares) if total else (1.0,) * len(shares)


def _of_ranks(values: tuple[int, ...], ranks: Sequence[int]) -> tuple[int, ...]:
    return values if len(values) == 1 else tuple(values[rank] for rank in ranks)


def listed(names: Sequence[str]) -> str:
    """`a, b and c`."""
    return " and ".join(filter(None, (", ".join(names[:-1]), *names[-1:])))
