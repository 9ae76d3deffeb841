"""Prints and writes the results of `bench`: medians and quartiles, as tables, CSV, JSON, plots and timelines."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ggpipe.display.figures import plots
from ggpipe.display.figures.trace import write_trace
from ggpipe.display.files import csv_text, write_json, write_text
from ggpipe.display.format import counted, harmless, human_rate, human_seconds, percent, three_digits
from ggpipe.display.live.terminal import Terminal
from ggpipe.display.tables.columns import Column, columns_table, plain_text, print_below
from ggpipe.display.tables.summary import csv_numbers, request_object
from ggpipe.stats.records import Spread
from ggpipe.stats.summary import BenchRun, BenchSummary, base_case, median_run, summarise

CSV_COLUMNS = ("prefill_tokens_per_s", "decode_tokens_per_s", "itl_s", "ttft_s", "mode", "round", "prompt")
"""The first four are PipeInfer's columns, in its order."""

_SHOWN_TOKENS = 40  # in the timeline, for legibility
_GAP = 2


def print_bench(
    terminal: Terminal | None, write: Callable[[str], object], runs: Sequence[BenchRun], cases: Sequence[str]
) -> None:
    """Print the tables on the terminal if stdout is shown there as well, or else `write` them as plain text."""

    def tables(width: int) -> Group:
        return bench_tables(runs, cases, width)

    if terminal is not None and terminal.stdout_shared:
        print_below(terminal, tables)
    else:
        write(plain_text(tables))


def bench_tables(runs: Sequence[BenchRun], cases: Sequence[str], width: int) -> Group:
    """All cases in one table, then the speed for each prompt, and a line on whether the outputs are the same."""
    summaries = summarise(runs, cases)
    base = base_case(cases)
    parts: list[RenderableType] = []
    if summaries:
        parts.append(columns_table(_columns(summaries, base), width, _GAP))
    prompts = {run.prompt: run.stats.n_prompt for run in runs}
    if len(prompts) > 1:
        table = columns_table(_prompt_columns(runs, cases, base, prompts), width, _GAP)
        parts.append(Padding(table, (1, 0, 0, 0)))
    parts.append(Padding(Text(_verdict(runs, summaries, base)), (1, 0, 0, 0)))
    return Group(*parts)


def begin_bench_csv(path: Path, compares_layouts: bool = False) -> None:
    """Write a new file with the names of the columns. Raises UsageError if that fails."""
    write_text(path, csv_text([(*CSV_COLUMNS, "layout") if compares_layouts else CSV_COLUMNS]))


def append_bench_csv(path: Path, run: BenchRun) -> None:
    """Append the line of a run that has just ended, so that a benchmark that fails keeps its results so far.

    Raises UsageError if the file cannot be written.
    """
    layout = [run.layout] if run.layout else []
    write_text(path, csv_text([[*csv_numbers(run.stats), run.mode, run.round, run.prompt, *layout]]), "a")


def write_bench_json(path: Path, runs: Sequence[BenchRun], cases: Sequence[str], extra: Mapping[str, Any]) -> None:
    """Write one object: `extra`, `summary` with an object per case, and `runs` with each run as in `generate --json`.

    Spreads are objects with `low`, `middle` and `high`: the quartiles and the median. Raises UsageError if the file
    cannot be written.
    """
    summaries = [_summary_object(summary) for summary in summarise(runs, cases)]
    objects = [
        {
            **request_object(run.stats, run.ranks),
            **_case_object(run),
            "round": run.round,
            "prompt": run.prompt,
        }
        for run in runs
    ]
    write_json(path, {**extra, "summary": summaries, "runs": objects}, indent=2)


def write_plots(folder: Path, ending: str, runs: Sequence[BenchRun], cases: Sequence[str]) -> list[Path]:
    """Plot speed, TTFT and ITL, the timeline of the median run, and acceptance by position. Returns the files."""
    prompts = list(dict.fromkeys(run.prompt for run in runs))
    of = {
        prompt: {s.case: s for s in summarise([run for run in runs if run.prompt == prompt], cases)}
        for prompt in prompts
    }
    shown = {case: run.mode for case in cases for run in runs if run.case == case}
    written = []
    for name, field, scale, title, unit in (
        ("speed", "tokens_per_s", 1, "Generation speed", "tokens/s"),
        ("ttft", "ttft_s", 1e3, "Time to first token", "ms"),
        ("itl", "itl_s", 1e3, "Inter-token latency, mean", "ms"),
    ):
        series = {
            case: [_scaled(getattr(of[prompt].get(case), field, None), scale) for prompt in prompts] for case in shown
        }
        written.append(folder / f"{name}.{ending}")
        plots.bars(written[-1], prompts, series, title=title, unit=unit)
    speculative = [case for case, mode in shown.items() if mode in ("async", "speculative")]
    asynchronous = [case for case, mode in shown.items() if mode == "async"]
    run = median_run(runs, asynchronous[0] if asynchronous else (speculative or list(shown))[-1])
    if run is not None and run.stats.token_times:
        times = run.stats.token_times
        first, last = (times[i] - run.stats.arrived for i in (0, min(_SHOWN_TOKENS, len(times)) - 1))
        window = max(first - 0.1 * (last - first), 0.0), last
        written.append(folder / f"occupancy.{ending}")
        title = f"{run.case}, after {run.prompt}: {human_rate(run.stats.decode_tps)}"
        plots.occupancy_timeline(written[-1], run.stats, run.ranks, title=title, window_s=window)
    if speculative:
        written.append(folder / f"acceptance.{ending}")
        by_lead = {case: _by_lead([run for run in runs if run.case == case]) for case in speculative}
        plots.acceptance_by_position(written[-1], by_lead, title="Acceptance")
    return written


def write_traces(folder: Path, runs: Sequence[BenchRun], cases: Sequence[str]) -> list[Path]:
    """Write the timeline of each case's median run, for Perfetto. Returns the files."""
    written = []
    for case in cases:
        run = median_run(runs, case)
        if run is not None:
            written.append(folder / f"{re.sub(r'[^-.,a-z0-9]', '_', case)}.json")
            write_trace(written[-1], run.stats, run.ranks)
    return written


def _columns(summaries: Sequence[BenchSummary], base: str) -> list[Column]:
    def column(title: str, cells: list[str], need: int) -> list[Column]:
        return [Column(title, cells, need)] if any(cell != "-" for cell in cells) else []

    layouts = [s.layout for s in summaries if s.layout]
    prefills = column("prefill t/s", [_spread(s.prefill_tokens_per_s) for s in summaries], 1) if layouts else []
    return [
        *([Column("layout", layouts, 0, "left")] if layouts else []),
        Column("mode", [s.mode for s in summaries], 0, "left"),
        *column("t/s", [_spread(s.tokens_per_s) for s in summaries], 0),
        *column(
            "x first" if layouts else f"x {base}", [_spread(s.gain) if s.case != base else "-" for s in summaries], 0
        ),
        *prefills,
        *column("TTFT", [human_seconds(s.ttft_s.middle if s.ttft_s else None) for s in summaries], 1),
        *column("ITL p50", [human_seconds(s.pooled.itl_p50_s) for s in summaries], 3),
        *column("ITL p99", [human_seconds(s.pooled.itl_p99_s) for s in summaries], 4),
        *column("accepted", [percent(s.pooled.acceptance) for s in summaries], 1),
        *_right(summaries),
        *column("cancelled", [percent(s.pooled.cancelled) for s in summaries], 5),
        *column("wasted", [percent(s.pooled.wasted) for s in summaries], 2),
        *column("occupied", [percent(s.pooled.occupancy) for s in summaries], 2),
    ]


def _right(summaries: Sequence[BenchSummary]) -> list[Column]:
    """A column per drafter, if there are several."""
    labels = list(dict.fromkeys(label for s in summaries for label in s.pooled.right))
    return [
        Column(f"{label} right", [percent(s.pooled.right.get(label)) for s in summaries], 1)
        for label in (labels if len(labels) > 1 else ())
    ]


def _prompt_columns(runs: Sequence[BenchRun], cases: Sequence[str], base: str, prompts: dict[str, int]) -> list[Column]:
    names = list(prompts)
    of = {name: {s.case: s for s in summarise([run for run in runs if run.prompt == name], cases)} for name in names}
    columns = [
        Column("t/s after", [harmless(name) for name in names], 0, "left"),
        Column("tokens", [f"{prompts[name]}" for name in names], 1),
    ]
    for need, case in enumerate(cases, start=2):
        cells = []
        for name in names:
            summary = of[name].get(case)
            speed = _middle(summary.tokens_per_s if summary else None)
            ratio = f" ({_middle(summary.gain)}x)" if summary and summary.gain and case != base else ""
            cells.append(speed + ratio)
        columns.append(Column(case, cells, need))
    return columns


def _verdict(runs: Sequence[BenchRun], summaries: Sequence[BenchSummary], base: str) -> str:
    lengths = {run.stats.n_generated for run in runs}
    length = counted(min(lengths, default=0), "token")
    if len(lengths) > 1:
        length = f"{min(lengths)} to {counted(max(lengths), 'token')}"
    n_rounds = len({run.round for run in runs})
    n_prompts = len({run.prompt for run in runs})
    first = f"Medians [quartiles] of {counted(n_rounds, 'round')}, {counted(n_prompts, 'prompt')}, {length} each."
    n_differ = sum(s.n_differ for s in summaries)
    others = sum(s.pooled.n_requests for s in summaries if s.case != base)
    if not others:
        return first
    if n_differ == 0:
        return f"{first} All outputs are the same."
    return (
        f"{first} {n_differ} of {counted(others, 'output')} differ from {base}'s (two tokens nearly tied, see --exact)."
    )


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{_middle(spread)} [{three_digits(spread.low)}-{three_digits(spread.high)}]"


def _middle(spread: Spread | None) -> str:
    return three_digits(spread.middle if spread else None)


def _summary_object(summary: BenchSummary) -> dict[str, Any]:
    """The pooled figures, and the spread of those that have one."""
    spreads = {
        "tokens_per_s": summary.tokens_per_s,
        "prefill_tokens_per_s": summary.prefill_tokens_per_s,
        "gain": summary.gain,
        "ttft_s": summary.ttft_s,
        "itl_s": summary.itl_s,
    }
    named = {name: None if spread is None else spread._asdict() for name, spread in spreads.items()}
    return {**_case_object(summary), **asdict(summary.pooled), **named, "n_differ": summary.n_differ}


def _case_object(own: BenchRun | BenchSummary) -> dict[str, str]:
    return {"layout": own.layout, "mode": own.mode} if own.layout else {"mode": own.mode}


def _scaled(spread: Spread | None, scale: float) -> plots.Value:
    return None if spread is None else (scale * spread.low, scale * spread.middle, scale * spread.high)


def _by_lead(runs: Sequence[BenchRun]) -> dict[int, list[int]]:
    total: dict[int, list[int]] = {}
    for run in runs:
        for lead, (submitted, accepted) in run.stats.counters.by_lead.items():
            counts = total.setdefault(lead, [0, 0])
            counts[0] += submitted
            counts[1] += accepted
    return total
