"""Converts profiles to the nodes and links of a cluster."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields, replace

from ggpipe.cluster.links import LOCAL_SUMS, NETWORK_SKEW, SUM_HEAD_BYTES, Link, Overheads, Skew, SumTimes
from ggpipe.cluster.model_shape import FLOAT_BYTES
from ggpipe.cluster.profile import LinkProfile, MeasuredLayers, Point, Profile, RankProfile, SumPoint
from ggpipe.cluster.spec import TURNS, ClusterSpec, NodeSpec

_SLOWEST = 0.05  # least value of `crowd`, since measurements are noisy


def spec_from_profile(profile: Profile, title: str) -> ClusterSpec:
    """The profiled cluster, with one node per host, and with its ranks and links."""
    hosts = list(dict.fromkeys(rank.host for rank in profile.ranks))
    nodes = []
    for host in hosts:
        most = max(_on(profile, host), key=lambda rank: rank.weight_bytes)
        nodes.append(profiled_node(profile, most.rank, host))
    links = measured_links([(profile, rank.rank) for rank in profile.ranks])
    local = usual_link([profile], True) or Link(60e-6, 5e9)
    return ClusterSpec(
        title=title,
        nodes=tuple(nodes),
        target_on=tuple(hosts.index(rank.host) for rank in profile.ranks),
        draft_on=(),
        target=None,
        draft=None,
        network=usual_link([profile], False) or local,
        local=local,
        threads=tuple(rank.threads for rank in profile.ranks),
        links=links,
        overheads=measured_overheads((profile, rank.rank) for rank in profile.ranks),
        network_skew=measured_skew([profile], False),
        local_sums=replace(LOCAL_SUMS, skew=measured_skew([profile], True)),
        sums=measured_sums([(profile, next(r.rank for r in profile.ranks if r.host == host)) for host in hosts]),
    )


def profiled_node(profile: Profile, rank: int, name: str) -> NodeSpec:
    """The machine of a rank, with the mean times of its ranks that measured the same layers. `name`: of the node."""
    own = profile.ranks[rank]
    mates = _on(profile, own.host)
    own = _averaged(own, [mate for mate in mates if (mate.threads, mate.layers) == (own.threads, own.layers)])
    return NodeSpec(
        name=name,
        cores=max(mate.cores for mate in mates),
        memory_bytes=max(mate.memory_bytes for mate in mates),
        disk_bytes_per_s=max(mate.disk_bytes_per_s for mate in mates),
        crowd=crowd_of(mates),
        turns=turns_of(mates),
        guest=next((mate.guest for mate in mates if mate.guest is not None), None),
        profile=own,
        of_experts=profile.model.n_expert > 0,
    )


def _averaged(own: RankProfile, alike: Sequence[RankProfile]) -> RankProfile:
    """The rank with the mean times of `alike`, the ranks that measured the same on its machine."""
    return replace(
        own,
        alone=_mean_points(own.alone, [mate.alone for mate in alike]),
        drafts=tuple(
            None if draft is None else _averaged_draft(draft, [mate.drafts[i] for mate in alike])
            for i, draft in enumerate(own.drafts)
        ),
        change_s=statistics.fmean(mate.change_s for mate in alike),
        fixed_s=statistics.fmean(mate.fixed_s for mate in alike),
    )


def _averaged_draft(own: MeasuredLayers, alike: Sequence[MeasuredLayers | None]) -> MeasuredLayers:
    measured = [part for part in alike if part is not None]
    change_s = statistics.fmean(part.change_s for part in measured)
    return replace(own, alone=_mean_points(own.alone, [part.alone for part in measured]), change_s=change_s)


def _mean_points(own: Sequence[Point], alike: Sequence[Sequence[Point]]) -> tuple[Point, ...]:
    """The points of a rank, each with its mean time in `alike`."""
    found: dict[tuple[int, int], list[float]] = {}
    for point in itertools.chain.from_iterable(alike):
        found.setdefault((point.rows, point.n_past), []).append(point.seconds)
    return tuple(Point(p.rows, p.n_past, statistics.fmean(found[p.rows, p.n_past])) for p in own)


def crowd_of(mates: Sequence[RankProfile]) -> float:
    """The value of `Cores.crowd` with which a machine's ranks slow each other down as measured; 1 for a single rank.

    The slowdown from threads beyond the number of cores, which share cores, is not part of it.
    """
    n_cores, n_threads = max(mate.cores for mate in mates), sum(mate.threads for mate in mates)
    guest = next((mate.guest for mate in mates if mate.guest is not None), 0.0)  # it used a share of the cores
    share = min((n_cores - guest) / n_threads, 1.0)
    found = []
    for mate in mates:
        own = mate.threads * share
        crowding = (min(n_cores, n_threads) - own) / (n_cores - own) if own < n_cores else 0.0
        together = {(point.rows, point.n_past): point.seconds for point in mate.together}
        rates = [
            point.seconds / together[point.rows, point.n_past]
            for point in mate.alone
            if (point.rows, point.n_past) in together
        ]
        if rates and crowding > 0:
            found.append(1 - (1 - min(statistics.median(rates) / share, 1.0)) / crowding)
    return max(statistics.fmean(found), _SLOWEST) if found else 1.0


def turns_of(mates: Sequence[RankProfile]) -> float:
    """The value of `NodeSpec.turns` for a machine with these ranks."""
    found = [mate.turns for mate in mates if mate.turns is not None]
    return statistics.fmean(found) if found else TURNS


def measured_links(places: Sequence[tuple[Profile, int] | None]) -> Mapping[tuple[int, int], Link]:
    """Links between ranks that correspond to ranks of one profile. `places`: profile and rank of each of our ranks."""
    links = {}
    for (a, first), (b, second) in itertools.permutations(enumerate(places), 2):
        if first is not None and second is not None and first[0] is second[0]:
            found = first[0].link(first[1], second[1])
            if found is not None:
                links[a, b] = Link(found.latency_s, found.bytes_per_s)
    return links


def measured_sums(places: Sequence[tuple[Profile, int] | None]) -> Mapping[tuple[int, int], SumTimes]:
    """Sums between, and within, nodes that correspond to machines of one profile. `places`: the profile and one of the
    machine's ranks, for each node."""
    found = {}
    for (a, first), (b, second) in itertools.combinations_with_replacement(enumerate(places), 2):
        if first is None or second is None or first[0] is not second[0]:
            continue
        profile, hosts = first[0], {first[0].ranks[rank].host for rank in (first[1], second[1])}
        if a != b and len(hosts) == 1:  # two nodes that correspond to the same machine
            continue
        for sums in profile.sums:
            if {profile.ranks[rank].host for rank in sums.ranks} == hosts and len(sums.f32) > 1:
                width = profile.model.n_embd
                points = _by_bytes(sums.f32, width * FLOAT_BYTES), _by_bytes(sums.f16, width * 2)
                found[a, b] = SumTimes(*points, skew=measured_skew([profile], len(hosts) == 1))
    return found


def measured_skew(profiles: Iterable[Profile], within: bool) -> Skew:
    """The mean skew of sums within hosts, or between hosts; the default if none was measured."""
    found = [
        sums.in_decodes.wait_s
        for profile in profiles
        for sums in profile.sums
        if sums.in_decodes is not None and (len({profile.ranks[rank].host for rank in sums.ranks}) == 1) == within
    ]
    default = LOCAL_SUMS.skew if within else NETWORK_SKEW
    return Skew(statistics.fmean(found)) if found else default


def _by_bytes(points: Sequence[SumPoint], row_bytes: int) -> tuple[tuple[float, float], ...]:
    return tuple(sorted((SUM_HEAD_BYTES + float(point.rows * row_bytes), point.seconds) for point in points))


def usual_link(profiles: Iterable[Profile], within: bool) -> Link | None:
    """The median of the links within hosts, or between hosts; None if none was measured."""
    found: list[LinkProfile] = []
    for profile in profiles:
        ranks = profile.ranks
        found += [x for x in profile.links if (ranks[x.source].host == ranks[x.target].host) == within]
    if not found:
        return None
    return Link(statistics.median(x.latency_s for x in found), statistics.median(x.bytes_per_s for x in found))


def measured_overheads(places: Iterable[tuple[Profile, int] | None]) -> Overheads:
    """The mean overheads of the ranks that were measured; the defaults if there are none."""
    found = [place[0].ranks[place[1]].overheads for place in places if place is not None]
    if not found:
        return Overheads()
    names = [field.name for field in fields(Overheads)]
    return Overheads(**{name: statistics.fmean(getattr(overheads, name) for overheads in found) for name in names})


def _on(profile: Profile, host: str) -> list[RankProfile]:
    return [rank for rank in profile.ranks if rank.host == host]
