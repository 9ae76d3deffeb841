"""A profile as tables: ranks, and the links between them."""

from __future__ import annotations

import statistics
from collections.abc import Iterable

from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from ggpipe.cluster.profile import LinkProfile, Profile, RankProfile, SumPoint, seconds_at
from ggpipe.core.layout import layer_range
from ggpipe.display.format import harmless, human_bytes, human_seconds
from ggpipe.display.tables.columns import Column, columns_table

_GAP = 2
_MOST_LINKS = 6
_ROWS = (1, 8, 32)


def profile_table(profile: Profile, width: int) -> Group:
    """Tables of a profile. Columns that do not fit into `width` cells are omitted."""
    parts: list[Table | Padding] = [_ranks_table(profile, width)]
    if profile.links:
        parts.append(Padding(_links_table(profile, width), (1, 0, 0, 0)))
    if profile.sums:
        parts.append(Padding(_sums_table(profile, width), (1, 0, 0, 0)))
    return Group(*parts)


def _ranks_table(profile: Profile, width: int) -> Table:
    """A line per rank, measured alone; with several ranks, a second line for all of them at the same time."""
    ranks, shared = profile.ranks, len(profile.ranks) > 1

    def lines(alone: Iterable[str], together: Iterable[str] | None = None) -> list[str]:
        if not shared:
            return list(alone)
        return [cell for both in zip(alone, together or [""] * len(ranks), strict=True) for cell in both]

    columns = [
        Column("rank", lines(f"{r.rank}" for r in ranks), 0, "left"),
        Column("host", lines(harmless(r.host) for r in ranks), 2, "left"),
        Column("threads", lines(_threads(r) for r in ranks), 5),
        Column("RAM", lines(human_bytes(r.memory_bytes) for r in ranks), 6),
        Column("read/s", lines(human_bytes(r.memory_bytes_per_s) for r in ranks), 1),
        Column("disk/s", lines(human_bytes(r.disk_bytes_per_s or None) for r in ranks), 2),
        Column("layers", lines(layer_range(r.layers) for r in ranks), 3),
        Column("weights", lines(human_bytes(r.weight_bytes) for r in ranks), 7),
    ]
    if shared:
        columns.append(Column("", ["alone", "together"] * len(ranks), 0))
    for n in _ROWS:
        cells = lines(
            (human_seconds(seconds_at(r.alone, n)) for r in ranks),
            (human_seconds(seconds_at(r.together, n)) for r in ranks),
        )
        columns.append(Column(f"{n} row{'s' * (n > 1)}", cells, 0))
    for number in range(len(profile.drafts)):
        drafts = [r.drafts[number] for r in ranks]
        cells = lines(human_seconds(seconds_at(draft.alone, 1) if draft else None) for draft in drafts)
        name = f"draft {number + 1}" if len(profile.drafts) > 1 else "draft"
        columns.append(Column(f"{name}, 1 row", cells, 0))
    columns.append(Column("run", lines(human_seconds(r.overheads.run_s + 2 * r.overheads.hand_s) for r in ranks), 4))
    return columns_table(columns, width, _GAP)


def _links_table(profile: Profile, width: int) -> Table:
    found: list[tuple[str, list[LinkProfile]]] = []
    if len(profile.links) <= _MOST_LINKS:
        found = [(f"{link.source} to {link.target}", [link]) for link in profile.links]
    else:
        hosts = [rank.host for rank in profile.ranks]
        for within, title in ((True, "on one machine"), (False, "between machines")):
            links = [link for link in profile.links if (hosts[link.source] == hosts[link.target]) == within]
            if links:
                last, thin = max(links, key=lambda x: x.latency_s), min(links, key=lambda x: x.bytes_per_s)
                found.append((f"{title}, median of {len(links)}", links))
                found.append((f"  longest latency: {last.source} to {last.target}", [last]))
                found.append((f"  fewest bytes/s: {thin.source} to {thin.target}", [thin]))
    columns = [
        Column("link", [title for title, _ in found], 0, "left"),
        Column("latency", [f"{statistics.median(x.latency_s for x in links) * 1e6:.0f} µs" for _, links in found], 0),
        Column("bytes/s", [human_bytes(statistics.median(x.bytes_per_s for x in links)) for _, links in found], 0),
    ]
    return columns_table(columns, width, _GAP)


def _sums_table(profile: Profile, width: int) -> Table:
    lines: list[tuple[str, dict[int, SumPoint]]] = []
    for sums in profile.sums[:_MOST_LINKS]:
        for wire, points in (("", sums.f32), (", f16", sums.f16)):
            if points:
                title = f"{sums.ranks[0]} and {sums.ranks[1]}{wire}"
                lines.append((title, {point.rows: point for point in points}))
    rows = sorted({n for _, points in lines for n in points})
    columns = [Column("sum over", [title for title, _ in lines], 0, "left")]
    for n in rows:
        cells = [f"{points[n].seconds * 1e6:.0f} µs" if n in points else "-" for _, points in lines]
        columns.append(Column(f"{n} row{'s' * (n > 1)}", cells, 0))
    inside = [sums.in_decodes for sums in profile.sums[:_MOST_LINKS] for points in (sums.f32, sums.f16) if points]
    if any(inside):
        waits = [f"{one.wait_s * 1e6:.0f} + {one.transfer_s * 1e6:.0f} µs" if one else "-" for one in inside]
        columns.append(Column("in decodes: wait + sum", waits, 0))
    return columns_table(columns, width, _GAP)


def _threads(rank: RankProfile) -> str:
    batch = "" if rank.threads == rank.threads_batch else f"/{rank.threads_batch}"
    return f"{rank.threads}{batch} of {rank.cores}"
