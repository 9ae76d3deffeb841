"""Prints how far the simulator is off from a receipt, and writes it as JSON."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import RenderableType
from rich.text import Text

from ggpipe.cluster.receipt import Receipt
from ggpipe.display.files import write_json
from ggpipe.display.format import counted, harmless, human_seconds, three_digits
from ggpipe.display.stdout import page_console, print_page
from ggpipe.display.tables.columns import Column, columns_table
from ggpipe.sim.against_receipt import ComparedMode

_GAP = 2


def print_comparison(receipt: Receipt, found: Sequence[ComparedMode]) -> None:
    """Print what was measured, and for each mode the measured and the simulated speeds."""
    console = page_console()
    lines = [Text(harmless(line), style="dim" if i else "bold") for i, line in enumerate(_heading(receipt))]
    table = columns_table(_columns([own for own in found if own.prompt is None]), console.width, _GAP)
    parts: list[RenderableType] = [*lines, Text(), table]
    if any(own.prompt is not None for own in found):
        parts += [Text(), columns_table(_prompt_columns(receipt, found), console.width, _GAP)]
    print_page(console, *parts)


def write_comparison(path: Path, receipt: Receipt, found: Sequence[ComparedMode]) -> None:
    """Write all figures. Raises UsageError if the file cannot be written."""
    results = [
        {**asdict(own), "rounds": own.rounds._asdict(), "speed_ratio": own.speed_ratio, "gain_ratio": own.gain_ratio,
         "ttft_ratio": own.ttft_ratio}
        for own in found
    ]  # fmt: skip
    write_json(path, {"day": receipt.day, "command": receipt.command, "results": results})


def _heading(receipt: Receipt) -> list[str]:
    target, *drafts = receipt.models
    nodes = [f"{node.name}: {counted(node.cores, 'core')} of {node.cpu or 'an unknown CPU'}" for node in receipt.nodes]
    models = f"target {target.file}" + "".join(f"; draft {draft.file}" for draft in drafts)
    n_ranks, n_rounds = len(receipt.profile.ranks), len({run.round for run in receipt.runs})
    return [
        f"measured on {receipt.day} with ggpipe {receipt.versions.ggpipe}",
        *nodes,
        f"{models}; layer split {receipt.settings.layer_split}, {counted(n_ranks, 'rank')}",
        f"{counted(len(receipt.prompts), 'prompt')}, {counted(n_rounds, 'round')}, "
        f"{counted(receipt.settings.n_predict, 'token')} each",
    ]


def _columns(found: Sequence[ComparedMode]) -> list[Column]:
    measured = [
        f"{three_digits(own.rounds.middle)} [{three_digits(own.rounds.low)}-{three_digits(own.rounds.high)}]"
        for own in found
    ]
    return [
        Column("mode", [own.mode for own in found], 0, "left"),
        Column("measured t/s", measured, 0),
        Column("simulated", [three_digits(own.simulated.tokens_per_s) for own in found], 0),
        Column("off", [_off(own.speed_ratio) for own in found], 0),
        Column("x iterative", [three_digits(own.measured.gain) for own in found], 0),
        Column("simulated", [three_digits(own.simulated.gain) for own in found], 0),
        Column("off", [_off(own.gain_ratio) for own in found], 0),
        Column("TTFT", [human_seconds(own.measured.ttft_s) for own in found], 1),
        Column("simulated", [human_seconds(own.simulated.ttft_s) for own in found], 1),
    ]


def _prompt_columns(receipt: Receipt, found: Sequence[ComparedMode]) -> list[Column]:
    """A row per prompt: measured and simulated tokens per second of each mode, and how far they differ."""
    by_case = {(own.mode, own.prompt): own for own in found}

    def cell(own: ComparedMode | None) -> str:
        if own is None:
            return "-"
        measured, simulated = own.measured.tokens_per_s, own.simulated.tokens_per_s
        return f"{three_digits(measured)} {three_digits(simulated)} {_off(own.speed_ratio)}"

    columns = [Column("t/s after", [harmless(prompt) for prompt in receipt.prompts], 0, "left")]
    for need, mode in enumerate(receipt.modes, start=1):
        cells = [cell(by_case.get((mode, prompt))) for prompt in receipt.prompts]
        columns.append(Column(mode, cells, need))
    return columns


def _off(ratio: float | None) -> str:
    """`+12 %` if the simulated value is higher."""
    return "-" if ratio is None else f"{(ratio - 1) * 100:+.0f} %"
