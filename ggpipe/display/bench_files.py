"""What a bench found, as files: CSV, JSON, plots, timelines."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from ggpipe.display import plots
from ggpipe.display.bench import median_run, summarise
from ggpipe.display.files import write_text
from ggpipe.display.summary import csv_numbers, request_object
from ggpipe.display.trace import write_trace
from ggpipe.display.wording import human_rate
from ggpipe.runtime.stats import Measured, Spread

CSV_COLUMNS = ("prefill_tokens_per_s", "decode_tokens_per_s", "itl_s", "ttft_s", "mode", "round", "prompt")
"""PipeInfer's first, in its order."""

_SHOWN_TOKENS = 40  # in the timeline: more would be too fine to see


def begin_bench_csv(path: Path) -> None:
    """A new file with the columns' names. Raises UsageError when it cannot be written, as all here do."""
    write_text(path, _line(CSV_COLUMNS))


def append_bench_csv(path: Path, run: Measured) -> None:
    """A run's line: to be written as soon as it is there, so that a long bench that breaks leaves what it had."""
    write_text(path, _line([*csv_numbers(run.stats), run.mode, run.round, run.prompt]), "a")


def _line(cells: Iterable[object]) -> str:
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerow(cells)
    return text.getvalue()


def write_bench_json(path: Path, runs: Sequence[Measured], modes: Sequence[str], extra: Mapping[str, Any]) -> None:
    """One object: `extra`, `summary` with an object for each mode, `runs` with each run's as `generate --json` has it.

    Spreads are objects with `low`, `middle` and `high`: quartiles and median.
    """
    summaries = []
    for summary in summarise(runs, modes):
        named = {name: value._asdict() if isinstance(value, Spread) else value for name, value in vars(summary).items()}
        summaries.append(named)
    objects = [
        {**request_object(run.stats, run.ranks), "mode": run.mode, "round": run.round, "prompt": run.prompt}
        for run in runs
    ]
    everything = {**extra, "summary": summaries, "runs": objects}
    write_text(path, json.dumps(everything, indent=2, default=str) + "\n")


def write_plots(folder: Path, ending: str, runs: Sequence[Measured], modes: Sequence[str]) -> list[Path]:
    """Bars of t/s, TTFT and ITL; the median run's timeline; acceptance by position. Returns the files."""
    prompts = list(dict.fromkeys(run.prompt for run in runs))
    of = {
        prompt: {s.mode: s for s in summarise([run for run in runs if run.prompt == prompt], modes)}
        for prompt in prompts
    }
    shown = [mode for mode in modes if any(mode in by_mode for by_mode in of.values())]
    written = []
    for name, field, scale, title, unit in (
        ("speed", "tokens_per_s", 1, "Generation speed", "tokens/s"),
        ("ttft", "ttft_s", 1e3, "Time to first token", "ms"),
        ("itl", "itl_s", 1e3, "Inter-token latency, mean", "ms"),
    ):
        series = {
            mode: [_scaled(getattr(of[prompt].get(mode), field, None), scale) for prompt in prompts] for mode in shown
        }
        written.append(folder / f"{name}.{ending}")
        plots.bars(written[-1], prompts, series, title=title, unit=unit)
    guessing = [mode for mode in shown if mode in ("async", "speculative")]
    run = median_run(runs, "async" if "async" in shown else (guessing or shown)[-1])
    if run is not None and run.stats.token_times:
        times = run.stats.token_times
        first, last = (times[i] - run.stats.arrived for i in (0, min(_SHOWN_TOKENS, len(times)) - 1))
        window = max(first - 0.1 * (last - first), 0.0), last
        written.append(folder / f"occupancy.{ending}")
        title = f"{run.mode}, after {run.prompt}: {human_rate(run.stats.decode_tps)}"
        plots.occupancy_timeline(written[-1], run.stats, run.ranks, title=title, window_s=window)
    if guessing:
        written.append(folder / f"acceptance.{ending}")
        by_lead = {mode: _by_lead([run for run in runs if run.mode == mode]) for mode in guessing}
        plots.acceptance_by_position(written[-1], by_lead, title="Acceptance")
    return written


def write_traces(folder: Path, runs: Sequence[Measured], modes: Sequence[str]) -> list[Path]:
    """Each mode's median run as a timeline for Perfetto. Returns the files."""
    written = []
    for mode in modes:
        run = median_run(runs, mode)
        if run is not None:
            written.append(folder / f"{mode}.json")
            write_trace(written[-1], run.stats, run.ranks)
    return written


def _scaled(spread: Spread | None, scale: float) -> plots.Value:
    return None if spread is None else (scale * spread.low, scale * spread.middle, scale * spread.high)


def _by_lead(runs: Sequence[Measured]) -> dict[int, list[int]]:
    total: dict[int, list[int]] = {}
    for run in runs:
        for lead, (submitted, accepted) in run.stats.counters.by_lead.items():
            counts = total.setdefault(lead, [0, 0])
            counts[0] += submitted
            counts[1] += accepted
    return total
