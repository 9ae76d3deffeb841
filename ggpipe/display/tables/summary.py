"""Prints and writes the figures of a finished request: as a table, as PipeInfer's CSV, and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group
from rich.padding import Padding
from rich.table import Table

from ggpipe.display.files import write_text
from ggpipe.display.format import counted, harmless, human_bytes, human_rate, human_seconds, percent
from ggpipe.display.live.terminal import Terminal
from ggpipe.display.tables.columns import Column, columns_table, print_below
from ggpipe.stats.activity import (
    drafters_of,
    layer_texts,
    part,
    parts_of,
    speculates,
    taking_part,
    wasted_s,
    with_work,
)
from ggpipe.stats.records import RankStats, RequestStats, percentile

_GAP = 3
_LOG_WIDTH = 100
_BY_KEY = ("rejected_rows", "by_lead", "by_drafter", "paused_tokens")  # counters that are tables


def summary_table(stats: RequestStats, ranks: Sequence[RankStats], now: float, width: int) -> Group:
    """The request's figures and, below them, those of each rank.

    A rank's identity, loading and memory come from `ranks`; its work comes from `stats.ranks` if that is filled in.
    `width`: in cells. Columns that do not fit are omitted.
    """
    ranks = taking_part(stats, ranks)
    parts: list[Table | Padding] = [_request_table(stats, ranks, width)]
    if ranks:
        parts.append(Padding(ranks_table(stats, ranks, now, width), (1, 0, 0, 0)))
    return Group(*parts)


def print_summary(terminal: Terminal | None, stats: RequestStats, ranks: Sequence[RankStats], now: float) -> None:
    """Print the table below the output: on the terminal, or as plain text on stderr if there is none."""
    if terminal is not None:
        terminal.console.print()
    print_below(terminal, lambda width: summary_table(stats, ranks, now, width), _LOG_WIDTH)


def append_csv(path: Path, stats: RequestStats) -> None:
    """Append PipeInfer's line: prefill tokens/s, decode tokens/s, mean ITL in s, TTFT in s; `nan` for unknown figures.

    Raises UsageError if the file cannot be written.
    """
    write_text(path, ",".join(csv_numbers(stats)) + "\n", "a")


def csv_numbers(stats: RequestStats) -> list[str]:
    """PipeInfer's four figures."""
    numbers = (stats.prefill_tps, stats.decode_tps, _mean(stats.itl_s), stats.ttft_s)
    return ["nan" if n is None else f"{n:.6g}" for n in numbers]


def request_object(
    stats: RequestStats, ranks: Sequence[RankStats], extra: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """All measurements as a JSON object, with null for unknown figures. `extra`: further keys, placed first."""
    itl_s = stats.itl_s
    counters = asdict(stats.counters)
    wasted = wasted_s(stats)
    return {
        **(extra or {}),
        "mode": stats.speculation.mode,
        "speculation": asdict(stats.speculation),
        "n_prompt_tokens": stats.n_prompt,
        "n_generated_tokens": stats.n_generated,
        "finish": stats.finish.value if stats.finish else None,
        "seed": stats.seed,
        "load_s": _load_s(ranks),
        "elapsed_s": _elapsed_s(stats),
        "prefill_tokens_per_s": stats.prefill_tps,
        "ttft_s": stats.ttft_s,
        "decode_s": stats.decode_s,
        "decode_tokens_per_s": stats.decode_tps,
        "itl_mean_s": _mean(itl_s),
        "itl_p50_s": percentile(itl_s, 0.5),
        "itl_p99_s": percentile(itl_s, 0.99),
        **{name: n for name, n in counters.items() if name not in _BY_KEY},
        "acceptance": stats.counters.acceptance,
        "accepted_tokens_per_run": stats.counters.accepted_per_run,
        "by_lead": [
            {"lead": lead, "submitted_tokens": submitted, "accepted_tokens": accepted}
            for lead, (submitted, accepted) in sorted(stats.counters.by_lead.items())
        ],
        "drafters": [
            {
                "drafter": own.label,
                "judged_tokens": own.n_judged,
                "right_tokens": own.n_right,
                "paused_tokens": own.n_paused,
                "output_tokens": own.n_output,
            }
            for own in drafters_of(stats, ranks)
        ],
        "token_times_s": [t - stats.arrived for t in stats.token_times],
        "drafted": stats.drafted,
        "drafted_by": stats.drafted_by,
        "ranks": [
            _rank_object(r, work, _elapsed_s(stats), wasted.get(part(r), 0.0)) | own
            for (r, work), own in zip(with_work(stats, ranks), _group_objects(ranks), strict=True)
        ],
    }


def _group_objects(ranks: Sequence[RankStats]) -> list[dict[str, int]]:
    """The number of each rank's part of its group. Empty objects without groups."""
    numbers = parts_of(ranks)
    return [{"part": number} if any(numbers) else {} for number in numbers]


def _rank_object(rank: RankStats, work: RankStats, elapsed_s: float | None, wasted_s: float) -> dict[str, Any]:
    return {
        "rank": rank.rank,
        "draft": rank.draft,
        "model": rank.model,
        "host": rank.host,
        "layers": list(rank.layers),
        "threads": list(rank.threads),
        "load_bytes": rank.load_bytes,
        "load_s": rank.load_s,
        "resident_bytes": rank.resident_bytes,
        "runs": work.runs,
        "compute_s": work.compute_s,
        "busy_s": work.busy_s,
        "idle_s": None if elapsed_s is None else max(elapsed_s - work.busy_s, 0.0),
        "wasted_s": wasted_s,
        "sent_bytes": work.sent_bytes,
    }


def _request_table(stats: RequestStats, ranks: Sequence[RankStats], width: int) -> Table:
    itl_s = stats.itl_s
    items = [
        ("prompt", _prompt(stats)),
        ("prefill", human_rate(stats.prefill_tps)),
        ("TTFT", human_seconds(stats.ttft_s)),
        ("load", human_seconds(_load_s(ranks))),
        ("answer", f"{stats.n_generated} tokens"),
        ("decode", human_rate(stats.decode_tps)),
        ("ITL p50", human_seconds(percentile(itl_s, 0.5))),
        ("ITL p99", human_seconds(percentile(itl_s, 0.99))),
        *(_speculation_items(stats, ranks) if speculates(stats) else ()),
        ("ended", stats.finish.value if stats.finish else "-"),
        ("seed", f"{stats.seed}"),
    ]
    cells = [(len(name), len(value)) for name, value in items]
    n_pairs = next((n for n in (4, 2) if _pairs_width(cells, n) <= width), 1)
    table = Table.grid(padding=(0, _GAP, 0, 0))
    for _ in range(n_pairs):
        table.add_column(style="dim", no_wrap=True)
        table.add_column()
    for i in range(0, len(items), n_pairs):
        table.add_row(*(cell for item in items[i : i + n_pairs] for cell in item))
    return table


def _prompt(stats: RequestStats) -> str:
    cached = stats.counters.cached_tokens
    return f"{stats.n_prompt} tokens" + (f", {cached} cached" if cached else "")


def _pairs_width(cells: Sequence[tuple[int, int]], n_pairs: int) -> int:
    """Width of a table with `n_pairs` names and values per row, in cells."""
    columns = [cells[i::n_pairs] for i in range(n_pairs)]
    return sum(max(a for a, _ in c) + max(b for _, b in c) for c in columns) + (2 * n_pairs - 1) * _GAP


def _speculation_items(stats: RequestStats, ranks: Sequence[RankStats]) -> list[tuple[str, str]]:
    drafters = drafters_of(stats, ranks)
    counters = stats.counters
    acceptance, per_run = counters.acceptance, counters.accepted_per_run
    return [
        ("mode", stats.speculation.mode),
        ("drafted", counted(counters.drafted_tokens, "token")),
        ("submitted", counted(counters.submitted_tokens, "token")),
        ("accepted", counted(counters.accepted_tokens, "token")),
        ("per run", "-" if per_run is None else f"{per_run:.2f} tokens"),
        ("submitted", counted(counters.speculative_runs, "run")),
        ("acceptance", percent(acceptance)),
        ("cancelled", counted(counters.cancelled_tokens, "token")),
        ("verified", counted(counters.verified_runs, "run")),
        ("cancelled", counted(counters.cancelled_runs, "run")),
        *((own.label, f"{own.n_right} of {own.n_judged} right") for own in (drafters if len(drafters) > 1 else ())),
        *((f"{own.label} paused", counted(own.n_paused, "token")) for own in drafters if own.n_paused),
    ]


def ranks_table(stats: RequestStats, ranks: Sequence[RankStats], now: float, width: int) -> Table:
    """A table with a line per rank."""
    elapsed_s = max(stats.elapsed_s(now), 0.0)
    both = with_work(stats, ranks)
    wasted = wasted_s(stats)
    columns = [
        Column("rank", [f"draft {r.rank}" if r.draft else f"{r.rank}" for r in ranks], 0),
        Column("host", [harmless(r.host) for r in ranks], 4, "left"),
        Column("layers", layer_texts(ranks), 1),
        Column("threads", [_threads(r) for r in ranks], 7),
        Column("compute", [human_seconds(w.compute_s) for _, w in both], 5),
        Column("busy", [human_seconds(w.busy_s) for _, w in both], 3),
        Column("idle", [human_seconds(max(elapsed_s - w.busy_s, 0.0)) for _, w in both], 4),
        Column("wasted", [human_seconds(wasted.get(part(r), 0.0)) for r in ranks], 1),
        Column("occupied", [percent(min(w.busy_s / elapsed_s, 1.0) if elapsed_s else None) for _, w in both], 0),
        Column("sent/run", [human_bytes(w.sent_bytes / w.runs if w.runs else None) for _, w in both], 8),
        Column("sent", [human_bytes(w.sent_bytes) for _, w in both], 6),
        Column("memory", [human_bytes(r.resident_bytes or None) for r in ranks], 2),
    ]
    if not speculates(stats):
        columns = [column for column in columns if column.title != "wasted"]
    return columns_table(columns, width, _GAP)


def _threads(rank: RankStats) -> str:
    single, batch = rank.threads
    return f"{single}" if single == batch else f"{single}/{batch}"


def _load_s(ranks: Sequence[RankStats]) -> float | None:
    """Time until the slowest rank has loaded; they load at the same time."""
    return max((r.load_s for r in ranks), default=None)


def _elapsed_s(stats: RequestStats) -> float | None:
    return None if stats.ended is None else stats.ended - stats.arrived


def _mean(values: Sequence[float]) -> float | None:
    return sum(values) / len(values) if values else None
