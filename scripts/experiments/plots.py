"""The figures of `scripts/experiments/run`."""

from __future__ import annotations

import textwrap
from pathlib import Path

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.display.figures.plots import Value, bars, heat, lines, occupancy_timeline
from ggpipe.display.format import human_seconds, percent
from scripts.experiments.places import SITES
from scripts.experiments.simulations import Job
from scripts.experiments.studies import (
    ASYNC,
    HEAT_ACCEPTANCES,
    LATENCY_TOKENS_S,
    N_NODES,
    VARIANTS,
    Findings,
    PairResult,
)

_TOKENS_SHOWN = 24


def plot_all(folder: Path, found: Findings) -> None:
    """All figures, SVG. Raises UsageError when one cannot be written."""
    _pairs(folder / "pairs.svg", found.main)
    _nodes(folder / "nodes.svg", found)
    _bound(folder / "bound.svg", found)
    _acceptance(folder / "acceptance.svg", found)
    _parts(folder / "parts.svg", found)
    _latency(folder / "latency.svg", found)
    for a in HEAT_ACCEPTANCES:
        _costs(folder / f"costs-{100 * a:.0f}.svg", found, a)
    first = found.main[0]
    _timeline(folder / "timeline-speculative.svg", found, first, first.best_waiting)
    _timeline(folder / "timeline-async.svg", found, first, ASYNC)


def _pairs(path: Path, results: list[PairResult]) -> None:
    groups = [r.place.pair.name.replace(" / ", "\n") + f"\n{percent(r.acceptance)}" for r in results]
    series: dict[str, list[Value]] = {
        "speculative": [r.gain(r.best_waiting) for r in results],
        "async": [r.gain(r.best_async) for r in results],
    }
    bars(path, groups, series, title=f"Simulated: {N_NODES} nodes", unit="speed, iterative = 1")


def _nodes(path: Path, found: Findings) -> None:
    series: dict[str, list[Value]] = {}
    for pair in found.scale.pairs:
        cells = [r for r in found.pairs if r.place.pair == pair and r.place.site == SITES[0]]
        series[pair.name] = [r.over_waiting(r.best_async) for r in cells]
    title = f"async over the best synchronous setting: {SITES[0].name}"
    lines(path, found.scale.n_nodes, series, title=title, x_label="nodes", unit="speed, synchronous = 1", log_x=True)


def _bound(path: Path, found: Findings) -> None:
    series: dict[str, list[Value]] = {}
    limits = []
    for a in found.scale.bound_acceptances:
        limits.append(f"1/(1-{a:g})")
        series[limits[-1]] = [1 / (1 - a)] * len(found.scale.bound_nodes)
        series[f"a = {a:g}"] = [found.bound[a, n] for n in found.scale.bound_nodes]
    lines(
        path, found.scale.bound_nodes, series, title="Chains and their bound, agreement a", x_label="equal stages",
        unit="speed, iterative = 1", log_x=True, bounds=limits,
    )  # fmt: skip


def _acceptance(path: Path, found: Findings) -> None:
    cells = list(found.acceptance.values())
    series: dict[str, list[Value]] = {
        "1/(1-a)": [1 / (1 - c.acceptance) for c in cells],
        "async": [c.default for c in cells],
        "speculative": [c.waiting for c in cells],
        "iterative": [1.0] * len(cells),
    }
    lines(
        path, [c.acceptance for c in cells], series, title="Seven equal stages, draft 5 %, rows 10 %",
        x_label="agreement, a", unit="speed, iterative = 1", bounds=["1/(1-a)"],
        top=1.15 * max(c.default for c in cells),
    )  # fmt: skip


def _parts(path: Path, found: Findings) -> None:
    names = [name for name in VARIANTS if name != "neither" and not name.startswith("-pa")]
    series: dict[str, list[Value]] = {
        f"{c.pair.name}, agreement {percent(c.pair.acceptance)}": [by_name[name].gain for name in names]
        for c, by_name in found.parts.items()
        if c.site == SITES[0] and c.confidence == "calibrated"
    }
    groups = [textwrap.fill(name, 12) for name in names]
    bars(path, groups, series, unit="speed, iterative = 1")


def _latency(path: Path, found: Findings) -> None:
    latencies = found.scale.latencies_s
    series: dict[str, list[Value]] = {}
    for t in LATENCY_TOKENS_S:
        cells = [found.latency[t, x] for x in latencies]
        series[f"{human_seconds(t)} per token"] = [c.default / c.waiting for c in cells]
    us = [x * 1e6 for x in latencies]
    title = "async over the best synchronous setting, agreement 70 %"
    lines(path, us, series, title=title, x_label="latency of a link, µs", unit="speed, synchronous = 1", log_x=True)


def _costs(path: Path, found: Findings, a: float) -> None:
    rows, drafts = found.scale.row_shares, found.scale.draft_shares
    cells = [[found.costs[a, d, r] for r in rows] for d in drafts]
    heat(
        path, [percent(r) for r in rows], [percent(d) for d in drafts],
        [[c.default / c.waiting for c in line] for line in cells],
        title=f"async / best synchronous: agreement {percent(a)}",
        x_label="a further row, of the first", y_label="draft's token, of target's",
    )  # fmt: skip


def _timeline(path: Path, found: Findings, result: PairResult, setting: SpeculationConfig) -> None:
    (stats,) = Job(result.place, result.acceptance, setting, found.scale.n_text, found.scale.seeds[:1]).requests()
    start = stats.token_times[0]
    end = start + _TOKENS_SHOWN * stats.decode_s / max(stats.n_generated - 1, 1)
    title = f"{result.place.pair.name}: {setting.mode}"
    occupancy_timeline(path, stats, stats.ranks, title=title, window_s=(start, end))
