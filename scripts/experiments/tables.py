"""Numbers of `scripts/experiments/run` as Markdown tables, as words, and as CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence
from dataclasses import astuple, fields
from pathlib import Path

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.display.files import write_text
from ggpipe.display.format import percent
from ggpipe.stats.summary import Summary
from scripts.experiments.places import Pair
from scripts.experiments.studies import N_NODES, Findings

CSV_FILES = ("pairs.csv", "shares.csv", "bound.csv", "parts.csv", "costs.csv")


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A Markdown table, its first column to the left."""
    lines = [header, ["---", *["---:"] * (len(header) - 1)], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def named(setting: SpeculationConfig) -> str:
    """A setting as flags of `ggpipe generate`."""
    usual = SpeculationConfig(mode=setting.mode)
    flags = {"n_draft": "--draft", "p_accept": "-pa", "n_parallel": "-np", "p_split": "-ps"}
    words = [
        f"{flag} {getattr(setting, name):g}"
        for name, flag in flags.items()
        if getattr(setting, name) != getattr(usual, name) or (name == "n_draft" and setting.mode == "speculative")
    ]
    return " ".join(words) or "defaults"


def span(values: Iterable[float]) -> str:
    """`1.31 to 1.60`."""
    return _between(f"{x:.2f}" for x in sorted(values))


def percent_span(shares: Iterable[float]) -> str:
    """`-5 to 11 %`."""
    return _between(f"{100 * x:.0f}".replace("-0", "0") for x in sorted(shares)) + " %"


def maybe(share: float | None) -> str:
    """`12 %`, or a dash."""
    return "-" if share is None else percent(share)


def write_csv_files(folder: Path, found: Findings) -> None:
    """All `CSV_FILES`. Raises UsageError when one cannot be written."""
    names = [field.name for field in fields(Summary)]
    place = ["site", "nodes", "target", "draft", "acceptance"]

    def where(pair: Pair, site: str, n_nodes: int) -> list[object]:
        return [site, n_nodes, pair.target.name, pair.draft.name, pair.acceptance]

    for name, results in (("pairs", found.pairs), ("shares", found.shares)):
        rows: list[list[object]] = [
            [*where(r.place.pair, r.place.site.name, r.place.n_nodes), what, named(s), r.gain(s), *astuple(summary)]
            for r in results
            for what, s in r.shown.items()
            for summary in (r.figures[s],)
        ]
        header = [*place, "mode", "flags", "gain", *names]
        _write(folder / f"{name}.csv", header, rows)
    rows = [[a, n, gain, 1 / (1 - a)] for (a, n), gain in found.bound.items()]
    _write(folder / "bound.csv", ["acceptance", "stages", "gain", "bound"], rows)
    rows = [
        [*where(c.pair, c.site.name, N_NODES), c.confidence, name, own.gain, *astuple(own.summary)]
        for c, by_name in found.parts.items()
        for name, own in by_name.items()
    ]
    _write(folder / "parts.csv", [*place, "confidence", "variant", "gain", *names], rows)
    rows = [
        [*astuple(c.place), c.acceptance, c.waiting, c.default, c.overlapping]
        for c in (*found.acceptance.values(), *found.latency.values(), *found.costs.values())
    ]
    gains = ["gain_speculative_best", "gain_async", "gain_async_best"]
    header = ["stages", "token_s", "draft_share", "row_share", "latency_s", "acceptance", *gains]
    _write(folder / "costs.csv", header, rows)


def _between(texts: Iterable[str]) -> str:
    found = list(texts)
    return found[0] if found[0] == found[-1] else f"{found[0]} to {found[-1]}"


def _write(path: Path, header: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    for row in rows:
        writer.writerow("" if x is None else f"{x:.6g}" if isinstance(x, float) else x for x in row)
    write_text(path, text.getvalue())
