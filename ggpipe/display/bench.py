"""What a bench found: medians with their spread, mode beside mode, and compared within the same round."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TextIO

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from ggpipe.display.columns import Column, columns_table
from ggpipe.display.terminal import Terminal
from ggpipe.display.wording import counted, harmless, human_seconds, percent, three_digits
from ggpipe.display.work import wasted_s
from ggpipe.runtime.stats import Measured, Spread, percentile, quartiles

_GAP = 2
_LOG_WIDTH = 120


@dataclass(frozen=True)
class ModeSummary:
    """One mode. None is what its runs do not have."""

    mode: str
    n_runs: int
    tokens_per_s: Spread | None
    """After the first token."""
    gain: Spread | None
    """Of `tokens_per_s`, relative to the base mode in the same round after the same prompt."""
    ttft_s: Spread | None
    itl_s: Spread | None
    """The runs' means."""
    itl_p50_s: float | None
    """Of all waits between tokens, in all runs."""
    itl_p99_s: float | None
    acceptance: float | None
    """Accepted guesses of those submitted; in all runs together, as what follows."""
    cancelled: float | None
    """Cancelled runs of those with guesses."""
    wasted: float | None
    """Of the time that the target's stages decoded: runs that were cancelled, and rows that were wrong."""
    occupancy: float | None
    """Busy share of the target's stages, on average."""
    n_differ: int
    """Texts that are not the base mode's of the same round."""


def base_mode(modes: Sequence[str]) -> str:
    """What the others are compared with."""
    return "iterative" if "iterative" in modes else modes[0]


def summarise(runs: Sequence[Measured], modes: Sequence[str]) -> list[ModeSummary]:
    """For each mode that has runs."""
    base = {(run.round, run.prompt): run for run in runs if run.mode == base_mode(modes)}
    of = {mode: [run for run in runs if run.mode == mode] for mode in modes}
    return [
        _summary(mode, own, [(run, base.get((run.round, run.prompt))) for run in own])
        for mode, own in of.items()
        if own
    ]


def _summary(mode: str, runs: Sequence[Measured], pairs: Sequence[tuple[Measured, Measured | None]]) -> ModeSummary:
    stats = [run.stats for run in runs]
    waits_s = [wait for s in stats for wait in s.itl_s]
    counters = [s.counters for s in stats]
    submitted, n_runs = sum(c.submitted_tokens for c in counters), sum(c.speculative_runs for c in counters)
    stages = [(s, rank) for s in stats for rank in s.ranks if not rank.draft and rank.layers[0] < rank.layers[1]]
    compute_s = sum(rank.compute_s for _, rank in stages)
    lost_s = sum(seconds for s in stats for (_, draft), seconds in wasted_s(s).items() if not draft)
    time_s = sum(s.elapsed_s(s.arrived) for s, _ in stages)
    gains = [_gain(run, base) for run, base in pairs if base is not None]
    return ModeSummary(
        mode,
        len(runs),
        quartiles(s.decode_tps for s in stats if s.decode_tps is not None),
        quartiles(gain for gain in gains if gain is not None),
        quartiles(s.ttft_s for s in stats if s.ttft_s is not None),
        quartiles(sum(s.itl_s) / len(s.itl_s) for s in stats if s.itl_s),
        percentile(waits_s, 0.5),
        percentile(waits_s, 0.99),
        sum(c.accepted_tokens for c in counters) / submitted if submitted else None,
        min(sum(c.cancelled_runs for c in counters) / n_runs, 1.0) if n_runs else None,
        lost_s / compute_s if n_runs and compute_s else None,
        sum(rank.busy_s for _, rank in stages) / time_s if time_s else None,
        sum(run.tokens != base.tokens for run, base in pairs if base is not None),
    )


def _gain(run: Measured, base: Measured) -> float | None:
    own, other = run.stats.decode_tps, base.stats.decode_tps
    return own / other if own is not None and other is not None else None


def median_run(runs: Sequence[Measured], mode: str) -> Measured | None:
    """The mode's run whose speed is in the middle."""
    own = sorted((run for run in runs if run.mode == mode), key=lambda run: run.stats.decode_tps or 0.0)
    return own[len(own) // 2] if own else None


def print_bench(terminal: Terminal | None, out: TextIO, runs: Sequence[Measured], modes: Sequence[str]) -> None:
    """Print the tables: on the terminal where `out` shows up there too, else as plain text."""
    if terminal is not None and terminal.stdout_shared:
        terminal.measure()
        terminal.console.print(bench_tables(runs, modes, terminal.console.width))
        return
    plain = io.StringIO()
    Console(file=plain, width=_LOG_WIDTH, color_system=None, force_terminal=False, markup=False).print(
        bench_tables(runs, modes, _LOG_WIDTH)
    )
    print("\n".join(line.rstrip() for line in plain.getvalue().splitlines()), file=out, flush=True)


def bench_tables(runs: Sequence[Measured], modes: Sequence[str], width: int) -> Group:
    """All modes side by side; below, the speed after each prompt, and a line on the texts."""
    summaries = summarise(runs, modes)
    base = base_mode(modes)
    parts: list[RenderableType] = []
    if summaries:
        parts.append(columns_table(_columns(summaries, base), width, _GAP))
    prompts = {run.prompt: run.stats.n_prompt for run in runs}
    if len(prompts) > 1:
        table = columns_table(_prompt_columns(runs, modes, base, prompts), width, _GAP)
        parts.append(Padding(table, (1, 0, 0, 0)))
    parts.append(Padding(Text(_verdict(runs, summaries, base)), (1, 0, 0, 0)))
    return Group(*parts)


def _columns(summaries: Sequence[ModeSummary], base: str) -> list[Column]:
    def column(title: str, cells: list[str], need: int) -> list[Column]:
        return [Column(title, cells, need)] if any(cell != "-" for cell in cells) else []

    return [
        Column("mode", [s.mode for s in summaries], 0, "left"),
        *column("t/s", [_spread(s.tokens_per_s) for s in summaries], 0),
        *column(f"x {base}", [_spread(s.gain) if s.mode != base else "-" for s in summaries], 0),
        *column("TTFT", [human_seconds(s.ttft_s.middle if s.ttft_s else None) for s in summaries], 1),
        *column("ITL p50", [human_seconds(s.itl_p50_s) for s in summaries], 3),
        *column("ITL p99", [human_seconds(s.itl_p99_s) for s in summaries], 4),
        *column("accepted", [_share(s.acceptance) for s in summaries], 1),
        *column("cancelled", [_share(s.cancelled) for s in summaries], 5),
        *column("wasted", [_share(s.wasted) for s in summaries], 2),
        *column("occupied", [_share(s.occupancy) for s in summaries], 2),
    ]


def _prompt_columns(runs: Sequence[Measured], modes: Sequence[str], base: str, prompts: dict[str, int]) -> list[Column]:
    names = list(prompts)
    of = {name: {s.mode: s for s in summarise([run for run in runs if run.prompt == name], modes)} for name in names}
    columns = [
        Column("t/s after", [harmless(name) for name in names], 0, "left"),
        Column("tokens", [f"{prompts[name]}" for name in names], 1),
    ]
    for need, mode in enumerate(modes, start=2):
        cells = []
        for name in names:
            summary = of[name].get(mode)
            speed = _middle(summary.tokens_per_s if summary else None)
            ratio = f" ({_middle(summary.gain)}x)" if summary and summary.gain and mode != base else ""
            cells.append(speed + ratio)
        columns.append(Column(mode, cells, need))
    return columns


def _verdict(runs: Sequence[Measured], summaries: Sequence[ModeSummary], base: str) -> str:
    lengths = {run.stats.n_generated for run in runs}
    length = counted(min(lengths, default=0), "token")
    if len(lengths) > 1:
        length = f"{min(lengths)} to {counted(max(lengths), 'token')}"
    n_rounds = len({run.round for run in runs})
    n_prompts = len({run.prompt for run in runs})
    first = f"Medians [quartiles] of {counted(n_rounds, 'round')}, {counted(n_prompts, 'prompt')}, {length} each."
    n_differ = sum(s.n_differ for s in summaries)
    others = sum(s.n_runs for s in summaries if s.mode != base)
    if not others:
        return first
    if n_differ == 0:
        return f"{first} All texts are the same."
    return f"{first} {n_differ} of {counted(others, 'text')} differ from {base}'s: two tokens nearly tied, see --exact."


def _spread(spread: Spread | None) -> str:
    if spread is None:
        return "-"
    return f"{_middle(spread)} [{three_digits(spread.low)}-{three_digits(spread.high)}]"


def _middle(spread: Spread | None) -> str:
    return "-" if spread is None else three_digits(spread.middle)


def _share(share: float | None) -> str:
    return "-" if share is None else percent(share)
