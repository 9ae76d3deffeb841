"""What simulations found: modes side by side, sweeps as tables, as CSV and as plots."""

from __future__ import annotations

import csv
import io
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ggpipe.display.columns import Column, columns_table
from ggpipe.display.files import write_text
from ggpipe.display.page import page_console, print_page
from ggpipe.display.wording import harmless, human_bytes, human_seconds, percent, three_digits
from ggpipe.display.work import speculates, wasted_s
from ggpipe.runtime.stats import RankStats, RequestStats, percentile

_GAP = 3
_BEST = "best"


@dataclass(frozen=True, slots=True)
class Figures:
    """Of one mode's requests, all together. None is what they do not have."""

    tokens_per_s: float | None
    """After the first token."""
    gain: float | None
    """Of `tokens_per_s`, relative to iterative."""
    ttft_s: float
    itl_mean_s: float | None
    itl_p99_s: float | None
    accepted_share: float | None
    """Accepted guesses of those submitted."""
    accepted_per_run: float | None
    """Of the runs with guesses that came back."""
    cancelled_runs: int | None
    occupancy: float
    """Busy share of the target's stages, on average."""
    wasted: float | None
    """Of the time that they decoded: runs that were cancelled, and rows that were wrong."""
    draft_occupancy: float | None
    """Busy share of the draft's stages, on average."""
    sent_bytes_per_token: float
    """From stage to stage, and to the head."""


@dataclass(frozen=True, slots=True)
class Line:
    """One combination of a sweep's values; none where nothing was swept."""

    values: Mapping[str, float]
    by_mode: Mapping[str, Figures]


def figures_of(stats: Sequence[RequestStats]) -> Figures:
    """`gain` is not known here, see `with_gain`."""
    waits_s = [wait for request in stats for wait in request.itl_s]
    stages = _stages(stats, False)
    compute_s = sum(rank.compute_s for _, rank in stages)
    lost_s = sum(seconds for request in stats for (_, draft), seconds in wasted_s(request).items() if not draft)
    counters = [request.counters for request in stats]
    submitted, verified = sum(c.submitted_tokens for c in counters), sum(c.verified_runs for c in counters)
    accepted, guesses = sum(c.accepted_tokens for c in counters), any(map(speculates, stats))
    n_tokens = sum(request.n_generated for request in stats)
    return Figures(
        len(waits_s) / sum(waits_s) if waits_s else None,
        None,
        sum(request.ttft_s or 0.0 for request in stats) / len(stats),
        sum(waits_s) / len(waits_s) if waits_s else None,
        percentile(waits_s, 0.99),
        accepted / submitted if submitted else None,
        accepted / verified if verified else None,
        sum(c.cancelled_runs for c in counters) if guesses else None,
        _occupancy(stages),
        lost_s / compute_s if guesses and compute_s else None,
        _occupancy(_stages(stats, True)) if guesses else None,
        sum(rank.sent_bytes for _, rank in stages) / n_tokens,
    )


def with_gain(by_mode: Mapping[str, Figures]) -> dict[str, Figures]:
    """Each mode's figures, compared with iterative."""
    base = by_mode["iterative"].tokens_per_s
    gains = {mode: own.tokens_per_s / base if own.tokens_per_s and base else None for mode, own in by_mode.items()}
    return {mode: replace(own, gain=gains[mode]) for mode, own in by_mode.items()}


def print_modes(heading: Sequence[str], by_mode: Mapping[str, Figures]) -> None:
    """The modes side by side, on stdout."""
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    for mode in by_mode:
        table.add_column(mode, justify="right", no_wrap=True)
    rows = {name: [cell(own) for own in by_mode.values()] for name, cell in _ROWS.items()}
    for name, cells in rows.items():
        if set(cells) != {"-"}:
            table.add_row(name, *cells)
    _print(heading, table)


def print_sweep(heading: Sequence[str], lines: Sequence[Line], modes: Sequence[str], main: str) -> None:
    """A row for each combination, on stdout: the speed of each of `modes`, and what else there is to say of `main`."""
    best = best_of(lines, main)
    columns = [Column(name, [_short(line.values[name]) for line in lines], 0) for name in lines[0].values]
    for mode in modes:
        speeds = [_rate(line.by_mode[mode].tokens_per_s) for line in lines]
        columns.append(Column(f"{mode} t/s" if len(modes) > 1 else "t/s", speeds, 0 if mode == main else 1))
    needs = {"x iterative": 0, "TTFT": 3, "ITL p99": 5, "accepted": 2, "per run": 6, "occupied": 4, "wasted": 4}
    for name, need in needs.items():
        cells = [_ROWS[name](line.by_mode[main]) for line in lines]
        if set(cells) != {"-"}:
            columns.append(Column(name, cells, need))
    columns.append(Column("", [_BEST if line is best else "" for line in lines], 0, "left"))
    console = page_console()
    table = columns_table(columns, console.width, 2)
    table.row_styles = ["bold" if line is best else "" for line in lines]
    _print([*heading, f"x iterative and what follows it: {main}"] if len(modes) > 1 else heading, table, console)


def best_of(lines: Sequence[Line], mode: str) -> Line:
    """The combination that is fastest in this mode."""
    return max(lines, key=lambda line: line.by_mode[mode].tokens_per_s or 0.0)


def write_figures_csv(path: Path, lines: Sequence[Line]) -> None:
    """A row for each combination and mode. Raises UsageError when the file cannot be written."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow([*lines[0].values, "mode", *(field.name for field in fields(Figures))])
    for line in lines:
        for mode, own in line.by_mode.items():
            writer.writerow([*map(_exact, line.values.values()), mode, *map(_exact, asdict(own).values())])
    write_text(path, text.getvalue())


def write_figures_json(
    path: Path, setup: Mapping[str, Any], lines: Sequence[Line], requests: Mapping[str, Any] | None = None
) -> None:
    """The same with what was simulated, and, by mode, all that is known of the requests. Raises UsageError."""
    results = [
        {"values": dict(line.values), "mode": mode, **asdict(own)} | ({"requests": requests[mode]} if requests else {})
        for line in lines
        for mode, own in line.by_mode.items()
    ]
    write_text(path, json.dumps({**setup, "results": results}, indent=1) + "\n")


def plot_sweep(path: Path, lines: Sequence[Line], modes: Sequence[str], main: str, title: str) -> None:
    """Speed over one swept name (a line for each of `modes`), or over two (a cell for each pair, in mode `main`).

    Raises UsageError when it cannot be written.
    """
    from ggpipe.display.plots import heat
    from ggpipe.display.plots import lines as draw_lines

    axes = {name: sorted({line.values[name] for line in lines}) for name in lines[0].values}
    if len(axes) == 1:
        ((name, _),) = axes.items()
        ordered = sorted(lines, key=lambda line: line.values[name])
        series = {mode: [line.by_mode[mode].tokens_per_s for line in ordered] for mode in modes}
        draw_lines(path, [line.values[name] for line in ordered], series, title=title, x_label=name, unit="tokens/s")
        return
    (down, rows), (across, columns) = axes.items()
    found = {(line.values[down], line.values[across]): line.by_mode[main].tokens_per_s for line in lines}
    values = [[found[y, x] for x in columns] for y in rows]
    heat(path, columns, rows, values, title=f"{title}: {main}, tokens/s", x_label=across, y_label=down)


class Progress:
    """How many simulations are done, on a terminal's stderr, from the second second on."""

    def __init__(self) -> None:
        self._is_terminal = sys.stderr.isatty()
        self._begun_at = time.monotonic()
        self._shown = False

    def __call__(self, done: int, of: int) -> None:
        """So many of so many."""
        if self._is_terminal and (self._shown or time.monotonic() > self._begun_at + 1):
            self._shown = True
            print(f"\r{done} of {of} simulations", end="", file=sys.stderr, flush=True)

    def stop(self) -> None:
        """Take the line away."""
        if self._shown:
            print("\r\x1b[2K", end="", file=sys.stderr, flush=True)
            self._shown = False


def _rate(per_s: float | None) -> str:
    return "-" if per_s is None else three_digits(per_s)


def _percent(share: float | None) -> str:
    return "-" if share is None else percent(share)


_ROWS: dict[str, Callable[[Figures], str]] = {
    "t/s": lambda own: _rate(own.tokens_per_s),
    "x iterative": lambda own: "-" if own.gain is None else f"{own.gain:.2f}",
    "TTFT": lambda own: human_seconds(own.ttft_s),
    "ITL mean": lambda own: human_seconds(own.itl_mean_s),
    "ITL p99": lambda own: human_seconds(own.itl_p99_s),
    "accepted": lambda own: _percent(own.accepted_share),
    "per run": lambda own: "-" if own.accepted_per_run is None else f"{own.accepted_per_run:.2f}",
    "cancelled runs": lambda own: "-" if own.cancelled_runs is None else f"{own.cancelled_runs}",
    "occupied": lambda own: _percent(own.occupancy),
    "wasted": lambda own: _percent(own.wasted),
    "draft occupied": lambda own: _percent(own.draft_occupancy),
    "sent/token": lambda own: human_bytes(own.sent_bytes_per_token),
}


def _stages(stats: Sequence[RequestStats], draft: bool) -> list[tuple[RequestStats, RankStats]]:
    """Ranks that hold layers, each with its request."""
    return [(s, rank) for s in stats for rank in s.ranks if rank.draft == draft and rank.layers[0] < rank.layers[1]]


def _occupancy(stages: Sequence[tuple[RequestStats, RankStats]]) -> float:
    time_s = sum(request.elapsed_s(0.0) for request, _ in stages)
    return sum(rank.busy_s for _, rank in stages) / time_s if time_s else 0.0


def _short(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _print(heading: Sequence[str], table: RenderableType, console: Console | None = None) -> None:
    lines = Group(*(Text(harmless(line), style="dim" if i else "bold") for i, line in enumerate(heading)))
    print_page(console or page_console(), lines, Text(), table)
