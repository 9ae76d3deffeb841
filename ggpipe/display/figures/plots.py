"""Plots: bars, lines, heat maps, timelines of requests, acceptance rates.

Each function writes one file, and raises UsageError if that fails, see `canvas.check_plottable`.
"""

from __future__ import annotations

import collections
import itertools
import math
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ggpipe.core.layout import layer_range
from ggpipe.display.figures.canvas import BLUE, GREEN, INK, MUTED, ORANGE, RED, colours_of, figure, short
from ggpipe.display.format import percent
from ggpipe.stats.activity import rejected_share, speculates, taking_part
from ggpipe.stats.records import RankStats, RequestStats

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Value = float | tuple[float, float, float] | None
"""A number, (lower quartile, median, upper quartile), or None."""

_MARKERS = "os^Dvp*X"


def bars(
    path: Path,
    groups: Sequence[str],
    series: Mapping[str, Sequence[Value]],
    *,
    title: str = "",
    unit: str = "",
) -> None:
    """A bar per group and series, with its value above it and quartiles as whiskers.

    `series`: one value per group, by name.
    """
    alone = len(groups) == 1
    n_bars = len(groups) * len(series)
    with figure(path, max(5.0, 0.62 * n_bars + 0.4 * len(groups) + 1.2), 3.6) as canvas:
        axes = canvas.add_subplot()
        colours = colours_of(series)
        width = 0.84 / len(series)
        tops = []
        for place, (name, values) in enumerate(series.items()):
            for group, value in enumerate(values):
                if value is None:
                    continue
                low, middle, high = _spread(value)
                x = group + (place - (len(series) - 1) / 2) * width
                label = name if group == 0 and not alone else None
                axes.bar(x, middle, 0.9 * width, color=colours[name], label=label)
                if high > low:
                    axes.vlines(x, low, high, color=INK, linewidth=1)
                tops.append((x, max(middle, high), middle))
        reach = max((top for _, top, _ in tops), default=0.0) or 1.0
        for x, top, middle in tops:
            axes.text(x, top + 0.015 * reach, short(middle), ha="center", va="bottom", fontsize=8)
        axes.set_ylim(0, 1.1 * reach)
        if alone:
            n = len(series)
            axes.set_xticks([(place - (n - 1) / 2) * width for place in range(n)], list(series))
        else:
            axes.set_xticks(range(len(groups)), groups)
            axes.legend(loc="lower right", bbox_to_anchor=(1, 1), ncols=len(series), frameon=False, borderaxespad=0.2)
        axes.set_xlim(-0.5, len(groups) - 0.5)
        axes.tick_params(axis="x", length=0)
        axes.yaxis.grid(True)
        axes.set_title(title)
        axes.set_ylabel(unit)


def lines(
    path: Path,
    x: Sequence[float],
    series: Mapping[str, Sequence[Value]],
    *,
    title: str = "",
    x_label: str = "",
    unit: str = "",
    log_x: bool = False,
    bounds: Collection[str] = (),
    top: float | None = None,
) -> None:
    """A line per series, with its name at the right end and quartiles as a band. `bounds`: series to draw dashed."""
    with figure(path, 6.6, 3.9) as canvas:
        axes = canvas.add_subplot()
        colours = colours_of([name for name in series if name not in bounds])
        markers = itertools.cycle(_MARKERS)
        ends: list[_End] = []
        for name, values in series.items():
            points = [(at, *_spread(value)) for at, value in zip(x, values, strict=True) if value is not None]
            if not points:
                continue
            at, low, middle, high = zip(*points, strict=True)
            colour = colours.get(name, MUTED)
            if name in bounds:
                axes.plot(at, middle, color=colour, linewidth=1, linestyle=(0, (5, 3)))
            else:
                axes.plot(at, middle, color=colour, linewidth=1.8, marker=next(markers), markersize=4.5, clip_on=False)
            if low != high:
                axes.fill_between(at, low, high, color=colour, alpha=0.15, linewidth=0)
            ends.append((at[-1], middle[-1], name, colour))
        _scale(axes, x, log_x)
        if top is not None:
            axes.set_ylim(top=top)
        axes.grid(True, axis="y")
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(unit)
        _label_ends(axes, ends)


def heat(
    path: Path,
    x: Sequence[float | str],
    y: Sequence[float | str],
    values: Sequence[Sequence[float | None]],
    *,
    title: str = "",
    x_label: str = "",
    y_label: str = "",
) -> None:
    """A cell per pair of values, `values[row of y][column of x]`. The highest one has a frame."""
    with figure(path, max(4.0, 0.62 * len(x) + 1.6), max(2.4, 0.42 * len(y) + 1.4)) as canvas:
        axes = canvas.add_subplot()
        known = [(value, row, column) for row, line in enumerate(values) for column, value in enumerate(line)]
        cells = [(value, row, column) for value, row, column in known if value is not None]
        grid = [[math.nan if value is None else value for value in line] for line in values]
        least, most = min((c[0] for c in cells), default=0.0), max((c[0] for c in cells), default=1.0)
        axes.pcolormesh(grid, cmap="cividis", vmin=least, vmax=most if most > least else least + 1)
        for value, row, column in cells:
            dark = value < (least + most) / 2
            colour = "white" if dark and most > least else INK
            axes.text(column + 0.5, row + 0.5, short(value), ha="center", va="center", fontsize=8, color=colour)
        if cells:
            from matplotlib.patches import Rectangle

            _, row, column = max(cells, key=lambda cell: cell[0])
            axes.add_patch(Rectangle((column, row), 1, 1, fill=False, edgecolor=RED, linewidth=2, clip_on=False))
        axes.set_xticks([i + 0.5 for i in range(len(x))], [_tick(v) for v in x])
        axes.set_yticks([i + 0.5 for i in range(len(y))], [_tick(v) for v in y])
        axes.tick_params(length=0)
        axes.spines[:].set_visible(False)
        axes.set_title(title)
        axes.set_xlabel(x_label)
        axes.set_ylabel(y_label)


def occupancy_timeline(
    path: Path,
    stats: RequestStats,
    ranks: Sequence[RankStats],
    *,
    title: str = "",
    window_s: tuple[float, float] | None = None,
) -> None:
    """A timeline of tokens and of each rank's runs, with the share of time that the rank was busy.

    A run's bar is coloured by its rows: if a quarter of them were rejected, a quarter of the bar is orange. `ranks`:
    their names, and their clocks' offsets from the head's. `window_s`: start and end, in seconds since the request
    arrived. None: all of it.
    """
    lanes = taking_part(stats, ranks)
    end_s = stats.ended - stats.arrived if stats.ended is not None else _last_s(stats)
    start_s, end_s = window_s or (0.0, end_s)
    with figure(path, 9.0, 1.4 + min(0.42, 7 / max(len(lanes), 1)) * (len(lanes) + 1)) as canvas:
        axes = canvas.add_subplot()
        for y, rank in enumerate(lanes, start=1):
            pieces = _pieces(stats, rank)
            for (colour, low, high), spans in _bars(pieces).items():
                axes.broken_barh(spans, (y - 0.4 + 0.8 * low, 0.8 * (high - low)), color=colour, linewidth=0)
            busy_s = sum(max(min(at + s, end_s) - max(at, start_s), 0.0) for at, s, *_ in pieces)
            share = min(busy_s / (end_s - start_s), 1.0) if end_s > start_s else 0.0
            axes.annotate(percent(share), (1.01, y), xycoords=("axes fraction", "data"), va="center", fontsize=9)
        for colour, drafted in ((INK, False), (BLUE, True)):
            kinds = itertools.zip_longest(stats.token_times, stats.drafted, fillvalue=False)
            times = [at - stats.arrived for at, was_drafted in kinds if was_drafted == drafted]
            axes.vlines(times, -0.35, 0.35, color=colour, linewidth=1)
        axes.set_yticks(range(len(lanes) + 1), ["tokens", *(_lane_name(rank) for rank in lanes)])
        axes.set_ylim(len(lanes) + 0.6, -0.6)
        axes.set_xlim(start_s, end_s)
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.spines["left"].set_visible(False)
        axes.set_xlabel("seconds since the request arrived", loc="left")
        axes.set_title(title)
        _key(canvas, stats)


def acceptance_by_position(
    path: Path, by_lead: Mapping[str, Mapping[int, Sequence[int]]], *, title: str = "", least: int = 10
) -> None:
    """Acceptance rate by how far ahead of the last accepted token a draft token was submitted.

    `by_lead`: `Counters.by_lead` of each series, [submitted, accepted] by tokens ahead. The band is the 95 % confidence
    interval. Distances with fewer than `least` draft tokens are omitted.
    """
    known = {name: {lead: n for lead, n in of.items() if n[0] >= least} for name, of in by_lead.items()}
    leads = sorted({lead for of in known.values() for lead in of})
    series = {
        name: [tuple(100 * share for share in _wilson(*of[lead])) if lead in of else None for lead in leads]
        for name, of in known.items()
    }
    labels = {"x_label": "tokens ahead of the last accepted one", "unit": "acceptance rate, %"}
    lines(path, leads, series, title=title, top=100, **labels)  # type: ignore[arg-type]


_Piece = tuple[float, float, float, bool, bool]
"""Start and duration in s, share of rejected rows, whether cancelled, whether a draft's."""


def _pieces(stats: RequestStats, rank: RankStats) -> list[_Piece]:
    """A rank's work, in the order of the runs' ends."""
    pieces = []
    for run in stats.draft_runs if rank.draft else stats.runs:
        if run.model != rank.model:
            continue
        rejected = stats.counters.rejected_rows.get(run.id, 0) if not rank.draft else 0
        for span in run.spans:
            if span.rank == rank.rank:
                share = rejected_share(run, span, rejected)
                at = span.start_s + rank.clock_offset_s - stats.arrived
                pieces.append((at, span.busy_s, share, run.cancelled, rank.draft))
    return pieces


def _bars(pieces: Sequence[_Piece]) -> dict[tuple[str, float, float], list[tuple[float, float]]]:
    """Starts and durations in s, by colour, upper edge and lower edge (0 to 1, downwards)."""
    spans: dict[tuple[str, float, float], list[tuple[float, float]]] = collections.defaultdict(list)
    for at, duration, rejected, cancelled, draft in pieces:
        if cancelled:
            spans[RED, 0.0, 1.0].append((at, duration))
            continue
        if rejected < 1:
            spans[GREEN if draft else BLUE, 0.0, 1.0 - rejected].append((at, duration))
        if rejected > 0:
            spans[ORANGE, 1.0 - rejected, 1.0].append((at, duration))
    return spans


def _last_s(stats: RequestStats) -> float:
    return max((at - stats.arrived for at in stats.token_times), default=1.0)


def _lane_name(rank: RankStats) -> str:
    layers = layer_range(rank.layers)
    what = "draft" if rank.draft else "coordinates" if layers == "-" else f"layers {layers}"
    return f"rank {rank.rank}: {what}"


def _key(canvas: Figure, stats: RequestStats) -> None:
    from matplotlib.patches import Patch

    kinds = {"useful": BLUE}
    if speculates(stats):
        kinds |= {"rejected": ORANGE, "cancelled": RED, "draft": GREEN}
    patches = [Patch(color=colour, label=name) for name, colour in kinds.items()]
    canvas.legend(
        handles=patches, loc="outside lower right", ncols=len(patches), frameon=False, handlelength=1,
        handleheight=0.8, columnspacing=1.2, borderaxespad=0.2,
    )  # fmt: skip


def _wilson(n: int, hits: int) -> tuple[float, float, float]:
    """The share of hits, and the ends of its 95 % confidence interval (Wilson score)."""
    z = 1.96
    share, scale = hits / n, 1 + z * z / n
    middle = (share + z * z / (2 * n)) / scale
    reach = z * math.sqrt(share * (1 - share) / n + z * z / (4 * n * n)) / scale
    return max(min(middle - reach, share), 0.0), share, min(max(middle + reach, share), 1.0)


def _spread(value: float | tuple[float, float, float]) -> tuple[float, float, float]:
    return (value[0], value[1], value[2]) if isinstance(value, tuple) else (value, value, value)


def _tick(value: float | str) -> str:
    return value if isinstance(value, str) else f"{value:g}"


def _scale(axes: Axes, x: Sequence[float], log_x: bool) -> None:
    if log_x:
        axes.set_xscale("log")
        axes.minorticks_off()
    axes.set_ylim(bottom=0)
    if len(x) <= 12:
        axes.set_xticks(list(x), [_tick(value) for value in x])


_End = tuple[float, float, str, str]
"""The end of a line: x, y, name, colour."""


def _label_ends(axes: Axes, ends: Sequence[_End]) -> None:
    """Put names next to the ends of lines. At the right edge, they are moved apart if they would overlap."""
    edge = max((x for x, *_ in ends), default=0.0)
    for x, y, name, colour in ends:
        if x < edge:
            axes.annotate(name, (x, y), (7, 4), textcoords="offset points", color=colour)
    to_axes = axes.transData + axes.transAxes.inverted()
    wanted = sorted((float(to_axes.transform((x, y))[1]), name, colour) for x, y, name, colour in ends if x == edge)
    gap = 0.065  # height of a line of text, as a share of the axes
    places: list[float] = []
    for place, _, _ in wanted:
        places.append(max(place, places[-1] + gap) if places else place)
    if places and places[-1] > 1:  # no room above: move them down
        places[-1] = 1.0
        for i in range(len(places) - 2, -1, -1):
            places[i] = min(places[i], places[i + 1] - gap)
    for place, (_, name, colour) in zip(places, wanted, strict=True):
        axes.annotate(name, (1.015, place), xycoords="axes fraction", color=colour, va="center", annotation_clip=False)
