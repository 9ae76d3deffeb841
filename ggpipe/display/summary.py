"""The numbers of a finished request: for people, as PipeInfer's line of CSV, and in full as JSON."""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from rich.console import Console, Group
from rich.padding import Padding
from rich.table import Table

from ggpipe.display.terminal import Terminal
from ggpipe.display.wording import harmless, human_bytes, human_rate, human_seconds, layer_range, percent
from ggpipe.errors import UsageError
from ggpipe.runtime.stats import RankStats, RequestStats, percentile

_LOG_WIDTH = 100
_GAP = 3


def summary_table(stats: RequestStats, ranks: Sequence[RankStats], now: float, width: int = _LOG_WIDTH) -> Group:
    """The request's numbers and, below them, each rank's.

    Who a rank is, its loading and its memory come from `ranks`, its work from `stats.ranks` (this request's)
    when that is filled in. `width`, in cells: columns that do not fit are left out.
    """
    parts: list[Table | Padding] = [_request_table(stats, ranks, width)]
    if ranks:
        parts.append(Padding(_ranks_table(stats, ranks, now, width), (1, 0, 0, 0)))
    return Group(*parts)


def print_summary(terminal: Terminal | None, stats: RequestStats, ranks: Sequence[RankStats], now: float) -> None:
    """Print the table below the answer: on the terminal, or as plain text on stderr when there is none."""
    if terminal is not None:
        terminal.measure()
        console = terminal.console
        console.print()
        console.print(summary_table(stats, ranks, now, console.width))
        return
    plain = io.StringIO()
    Console(file=plain, width=_LOG_WIDTH, color_system=None, force_terminal=False, markup=False).print(
        summary_table(stats, ranks, now)
    )
    print("\n".join(line.rstrip() for line in plain.getvalue().splitlines()), file=sys.stderr)


def check_writable(path: Path) -> None:
    """To be called before a long run. Raises UsageError when the file cannot be written."""
    try:
        if path.is_dir():
            raise UsageError(f"cannot write to {path}: it is a directory")
        if path.exists():
            ok = os.access(path, os.W_OK)
        elif path.parent.is_dir():
            ok = os.access(path.parent, os.W_OK | os.X_OK)
        else:
            raise UsageError(f"cannot write to {path}: there is no directory {path.parent}")
    except OSError as e:
        raise _cannot_write(path, e) from e
    if not ok:
        raise UsageError(f"cannot write to {path}: permission denied")


def append_csv(path: Path, stats: RequestStats) -> None:
    """Append PipeInfer's line: prefill tokens/s, decode tokens/s, mean ITL in s, TTFT in s; `nan` for none.

    Raises UsageError when the file cannot be written.
    """
    numbers = (stats.prefill_tps, stats.decode_tps, _mean(stats.itl_s), stats.ttft_s)
    try:
        with path.open("a", encoding="utf-8") as file:
            file.write(",".join("nan" if n is None else f"{n:.6g}" for n in numbers) + "\n")
    except OSError as e:
        raise _cannot_write(path, e) from e


def write_json(
    path: Path, stats: RequestStats, ranks: Sequence[RankStats], extra: Mapping[str, Any] | None = None
) -> None:
    """Write all that was measured as one JSON object; what is not known is null.

    `extra` is merged in at the top, below our own keys. What JSON does not know becomes a string.
    Raises UsageError when the file cannot be written.
    """
    itl_s = stats.itl_s
    everything = {
        **(extra or {}),
        "n_prompt_tokens": stats.n_prompt,
        "n_generated_tokens": stats.n_generated,
        "finish": stats.finish,
        "seed": stats.seed,
        "load_s": _load_s(ranks),
        "elapsed_s": None if stats.ended is None else stats.ended - stats.arrived,
        "prefill_tokens_per_s": stats.prefill_tps,
        "ttft_s": stats.ttft_s,
        "decode_s": stats.decode_s,
        "decode_tokens_per_s": stats.decode_tps,
        "itl_mean_s": _mean(itl_s),
        "itl_p50_s": percentile(itl_s, 0.5),
        "itl_p99_s": percentile(itl_s, 0.99),
        "token_times_s": [t - stats.arrived for t in stats.token_times],
        "ranks": [_rank_object(r, work) for r, work in _with_work(stats, ranks)],
    }
    try:
        path.write_text(json.dumps(everything, indent=2, default=str) + "\n", encoding="utf-8")
    except OSError as e:
        raise _cannot_write(path, e) from e


def _rank_object(rank: RankStats, work: RankStats) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "host": rank.host,
        "layers": list(rank.layers),
        "threads": list(rank.threads),
        "load_bytes": rank.load_bytes,
        "load_s": rank.load_s,
        "resident_bytes": rank.resident_bytes,
        "runs": work.runs,
        "compute_s": work.compute_s,
        "busy_s": work.busy_s,
        "sent_bytes": work.sent_bytes,
    }


def _request_table(stats: RequestStats, ranks: Sequence[RankStats], width: int) -> Table:
    itl_s = stats.itl_s
    items = [
        ("prompt", f"{stats.n_prompt} tokens"),
        ("prefill", human_rate(stats.prefill_tps)),
        ("TTFT", human_seconds(stats.ttft_s)),
        ("load", human_seconds(_load_s(ranks))),
        ("answer", f"{stats.n_generated} tokens"),
        ("decode", human_rate(stats.decode_tps)),
        ("ITL p50", human_seconds(percentile(itl_s, 0.5))),
        ("ITL p99", human_seconds(percentile(itl_s, 0.99))),
        ("ended", stats.finish or "-"),
        ("seed", f"{stats.seed}"),
    ]
    n_pairs = 4 if width >= 86 else 2 if width >= 46 else 1
    table = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in range(n_pairs):
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
    for i in range(0, len(items), n_pairs):
        table.add_row(*(cell for item in items[i : i + n_pairs] for cell in item))
    return table


@dataclass(frozen=True)
class _Column:
    title: str
    cells: list[str]
    need: int
    """The least needed are left out first; 0 never."""
    justify: Literal["left", "right"] = "right"

    @property
    def width(self) -> int:
        return max(len(self.title), *map(len, self.cells)) + _GAP


def _ranks_table(stats: RequestStats, ranks: Sequence[RankStats], now: float, width: int) -> Table:
    elapsed_s = max(stats.elapsed_s(now), 0.0)
    both = _with_work(stats, ranks)
    columns = [
        _Column("rank", [f"{r.rank}" for r in ranks], 0),
        _Column("host", [harmless(r.host) for r in ranks], 3, "left"),
        _Column("layers", [layer_range(r.layers) for r in ranks], 1),
        _Column("threads", [_threads(r) for r in ranks], 5),
        _Column("compute", [human_seconds(w.compute_s) for _, w in both], 2),
        _Column("waiting", [human_seconds(max(elapsed_s - w.busy_s, 0.0)) for _, w in both], 4),
        _Column("busy", [percent(min(w.busy_s / elapsed_s, 1.0)) if elapsed_s else "-" for _, w in both], 0),
        _Column("sent/run", [human_bytes(w.sent_bytes / w.runs) if w.runs else "-" for _, w in both], 6),
        _Column("sent", [human_bytes(w.sent_bytes) for _, w in both], 3),
        _Column("memory", [human_bytes(r.resident_bytes) for r in ranks], 2),
    ]
    while sum(c.width for c in columns) - _GAP > width:
        least = max(columns, key=lambda c: c.need)
        if least.need == 0:
            break
        columns.remove(least)
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column.title, justify=column.justify, no_wrap=True)
    for cells in zip(*(c.cells for c in columns), strict=True):
        table.add_row(*cells)
    return table


def _with_work(stats: RequestStats, ranks: Sequence[RankStats]) -> list[tuple[RankStats, RankStats]]:
    """Each rank with what it did for the request."""
    work = {r.rank: r for r in stats.ranks}
    return [(r, work.get(r.rank, r)) for r in ranks]


def _threads(rank: RankStats) -> str:
    single, batch = rank.threads
    return f"{single}" if single == batch else f"{single}/{batch}"


def _load_s(ranks: Sequence[RankStats]) -> float | None:
    """Ranks load at the same time: the slowest counts."""
    return max((r.load_s for r in ranks), default=None)


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write to {path}: {error.strerror or error}")
