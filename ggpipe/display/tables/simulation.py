"""Prints and writes the results of `simulate`: modes and sweeps as tables, CSV, JSON and plots."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.recording import Recording
from ggpipe.config.speculation import Mode
from ggpipe.display.files import csv_text, write_json, write_text
from ggpipe.display.format import counted, harmless, human_bytes, human_seconds, percent, streamed_text, three_digits
from ggpipe.display.stdout import page_console, print_page
from ggpipe.display.tables.columns import Column, columns_table
from ggpipe.display.tables.summary import ranks_table, request_object
from ggpipe.sim.arrivals import Traffic
from ggpipe.sim.simulation_spec import SimulationSpec, SyntheticText
from ggpipe.sim.sweep import Combination, ModeResult
from ggpipe.sim.text import SECOND_CHOICE
from ggpipe.stats.activity import taking_part
from ggpipe.stats.records import RequestStats, percentile
from ggpipe.stats.traffic import TrafficSummary

_GAP = 3
_BEST = "best"
_TOKENS_SHOWN = 32  # in the timeline of one simulation


def print_simulation(spec: SimulationSpec, found: Sequence[Combination], modes: Sequence[Mode]) -> None:
    """Print what was simulated, then a column per mode or, for a sweep, a row per combination of values.

    The table of a sweep shows the speed of all `modes`, and other figures of the last one.
    """
    heading = _heading(spec, found[0].values)
    if found[0].values:
        _print_sweep(heading, found, modes)
    else:
        _print_modes(heading, found[0], modes[-1] if spec.placement.group_sizes and spec.traffic is None else None)


def write_csv(path: Path, found: Sequence[Combination]) -> None:
    """Write a row per combination and mode. Raises UsageError if the file cannot be written."""
    first = next(iter(found[0].by_mode.values()))
    names = [name for name in _numbers(first) if name != "right"]  # which depends on the drafters
    rows = [[*found[0].values, "mode", *names]]
    for each in found:
        for mode, own in each.by_mode.items():
            numbers = _numbers(own)
            values = (numbers[name] for name in names)
            rows.append([*map(_exact, each.values.values()), mode, *map(_exact, values)])
    write_text(path, csv_text(rows))


def write_requests_csv(path: Path, only: Combination) -> None:
    """Write a row per mode and request. Raises UsageError if the file cannot be written."""
    names = ("arrived_s", "queue_s", "ttft_s", "itl_mean_s", "itl_p50_s", "itl_p99_s", "tokens_per_s", "ended_s")
    rows: list[list[object]] = [["mode", "request", "n_prompt_tokens", "n_generated_tokens", *names]]
    for mode, own in only.by_mode.items():
        for number, stats in enumerate(own.requests, 1):
            itl_s = stats.itl_s
            values = (
                stats.arrived, stats.queue_s, stats.ttft_s, sum(itl_s) / len(itl_s) if itl_s else None,
                percentile(itl_s, 0.5), percentile(itl_s, 0.99), stats.decode_tps, stats.ended,
            )  # fmt: skip
            rows.append([mode, number, stats.n_prompt, stats.n_generated, *map(_exact, values)])
    write_text(path, csv_text(rows))


def write_results(path: Path, spec: SimulationSpec, found: Sequence[Combination]) -> None:
    """Write what was simulated, the figures of each combination and mode and, without a sweep, those of each request.

    Raises UsageError if the file cannot be written.
    """
    results = []
    for each in found:
        for mode, own in each.by_mode.items():
            result = {"values": dict(each.values), "mode": mode, **_numbers(own)}
            if own.requests:
                shared = own.traffic is not None
                result["requests"] = [
                    _request(request, i if shared else None) for i, request in enumerate(own.requests, 1)
                ]
            results.append(result)
    write_json(path, {**_facts(spec), "results": results})


def _request(stats: RequestStats, number: int | None) -> dict[str, Any]:
    """`number`: of one of several requests that share the pipeline, from 1."""
    extra = None if number is None else {"request": number, "arrived_s": stats.arrived, "queue_s": stats.queue_s}
    return request_object(stats, stats.ranks, extra)


def plot_simulation(path: Path, spec: SimulationSpec, found: Sequence[Combination], modes: Sequence[Mode]) -> None:
    """Plot the timeline of the last of `modes`; for a sweep of one name, the speed of each mode; for a sweep of two
    names, the speed of the last mode as a heat map.

    Raises UsageError if the file cannot be written.
    """
    from ggpipe.display.figures.plots import Value, heat, lines, occupancy_timeline

    title, main = spec.cluster.title, modes[-1]
    axes = {name: sorted({each.values[name] for each in found}) for name in found[0].values}
    if not axes:
        request = found[0].by_mode[main].requests[0]
        times = request.token_times
        window_s = (0.0, times[-1]) if len(times) <= _TOKENS_SHOWN else (times[0], times[_TOKENS_SHOWN])
        occupancy_timeline(path, request, request.ranks, title=f"{title}: {main}", window_s=window_s)
    elif len(axes) == 1:
        ((name, _),) = axes.items()
        ordered = sorted(found, key=lambda each: each.values[name])
        series: dict[str, list[Value]] = {mode: [_speed(each, mode) for each in ordered] for mode in modes}
        lines(path, [each.values[name] for each in ordered], series, title=title, x_label=name, unit="tokens/s")
    else:
        (down, rows), (across, columns) = axes.items()
        speeds = {(each.values[down], each.values[across]): _speed(each, main) for each in found}
        values = [[speeds[y, x] for x in columns] for y in rows]
        heat(path, columns, rows, values, title=f"{title}: {main}, tokens/s", x_label=across, y_label=down)


def _heading(spec: SimulationSpec, swept: Collection[str]) -> list[str]:
    """What is simulated, except for the values that are swept."""
    models = f"target {_model(spec.target)} on {counted(len(spec.placement.target_on), 'rank')}"
    for number, draft in enumerate(spec.drafts):
        layout = spec.placement.draft_layout(number)
        where = f"on {counted(len(layout.ranks), 'rank')}" if layout is not None else "inside the head"
        models += f"; {'head' if draft.taps else 'draft'} {_model(draft)} {where}"
    tokens, n_predict, request = spec.tokens, spec.n_predict, []
    if isinstance(tokens, Recording):
        request.append(counted(len(tokens.prompts), "recorded prompt"))
        lengths = [len(recorded.text) if n_predict < 0 else n_predict for recorded in tokens.prompts]
        request.append(f"outputs of {' + '.join(map(str, lengths))} tokens")
        request.append(f"agreement {percent(tokens.agreement)}")
        if (second := tokens.second_agreement) is not None:
            request.append(f"second choice {percent(second)}")
    else:
        if "prompt-tokens" not in swept:
            request.append(f"prompt of {counted(tokens.n_prompt, 'token')}")
        request.append(f"output of {n_predict}")
        request += _agreements(spec, tokens, swept)
    lines = [spec.cluster.title, models, ", ".join(request)]
    if streamed_bytes := spec.streamed_bytes:
        streamed = Counter[str]()
        for node, n_bytes in zip(spec.placement.node_of, streamed_bytes, strict=True):
            streamed[spec.cluster.nodes[node].name] += round(n_bytes)
        lines.append(streamed_text(+streamed))
    if spec.traffic is not None:
        lines.append(_traffic(spec.traffic, swept))
    return lines


def _agreements(spec: SimulationSpec, tokens: SyntheticText, swept: Collection[str]) -> list[str]:
    words = []
    if "acceptance" not in swept and (spec.drafts or not tokens.repeats):
        others = [tokens.agreement if own is None else own for own in tokens.others]
        agreements = " and ".join(map(percent, (tokens.agreement, *others)))
        words += [f"agreement {agreements}", tokens.confidence]
        if tokens.second_choice != SECOND_CHOICE:
            words.append(f"second choice {percent(tokens.second_choice)}")
    if tokens.others and "overlap" not in swept:
        words.append(f"overlap {percent(tokens.overlap)}")
    if tokens.repeats:
        words.append(f"{percent(tokens.repeats)} repeated")
    return words


def _traffic(traffic: Traffic, swept: Collection[str]) -> str:
    words = []
    if traffic.users is not None and "users" not in swept:
        words.append(counted(traffic.users, "user"))
    if traffic.rate is not None and "rate" not in swept:
        words.append(f"{traffic.rate:g} requests per second")
    if not set(swept).intersection(("users", "rate")):
        words.append(counted(len(traffic.arrivals()), "request"))
        if "concurrent" not in swept:
            words.append(f"{traffic.at_a_time} at a time")
    return ", ".join(words) or "several requests"


def _model(shape: ModelShape) -> str:
    return f"{shape.name} ({counted(shape.n_layer, 'layer')})"


def _facts(spec: SimulationSpec) -> dict[str, object]:
    """What was simulated, for JSON."""
    tokens = spec.tokens
    return {
        "cluster": spec.cluster.title,
        "target": spec.target.name,
        "draft": ", ".join(draft.name for draft in spec.drafts) or None,
        "layers": spec.placement.layout.layers if spec.placement.layout else None,
        "speculation": asdict(spec.speculation),
        "tokens": {"agreement": tokens.agreement} if isinstance(tokens, Recording) else asdict(tokens),
        **({"traffic": asdict(spec.traffic)} if spec.traffic is not None else {}),
    }


def _print_modes(heading: Sequence[str], only: Combination, ranks_of: Mode | None) -> None:
    """`ranks_of`: the mode for whose first request to show the ranks."""
    table = Table(box=None, padding=(0, _GAP, 0, 0), pad_edge=False)
    table.add_column("", style="dim", no_wrap=True)
    for mode in only.by_mode:
        table.add_column(mode, justify="right", no_wrap=True)
    is_shared = any(own.traffic is not None for own in only.by_mode.values())
    own_rows = _TRAFFIC_ROWS if is_shared else _ROWS
    rows = {name: [cell(own) for own in only.by_mode.values()] for name, cell in own_rows.items()}
    for name, cells in rows.items():
        if set(cells) != {"-"}:
            table.add_row(name, *cells)
    parts: list[RenderableType] = [table]
    console = page_console()
    if ranks_of is not None:
        stats = only.by_mode[ranks_of].requests[0]
        parts += [Text(), Text(f"ranks in {ranks_of}", style="dim")]
        parts.append(ranks_table(stats, taking_part(stats, stats.ranks), stats.ended or 0.0, console.width))
    _print(heading, Group(*parts), console)


def _print_sweep(heading: Sequence[str], found: Sequence[Combination], modes: Sequence[Mode]) -> None:
    main = modes[-1]
    needs = {"x iterative": 0, "TTFT": 3, "ITL p99": 5, "accepted": 2, "per run": 6, "occupied": 4, "wasted": 4}
    rows, speed = _ROWS, "t/s"
    if found[0].by_mode[main].traffic is not None:
        needs = {"x iterative": 1, "t/s each": 0, "TTFT p50": 3, "TTFT p99": 2, "ITL p50": 4, "ITL p99": 2,
                 "queued p50": 6, "queued p99": 5, "accepted": 7, "occupied": 1, "wasted": 7}  # fmt: skip
        rows, speed = _TRAFFIC_ROWS, "total t/s"
    best = max(found, key=lambda each: _speed(each, main) or 0.0)
    columns = [Column(name, [_short(each.values[name]) for each in found], 0) for name in found[0].values]
    for mode in modes:
        speeds = [three_digits(_speed(each, mode)) for each in found]
        columns.append(Column(f"{mode} {speed}" if len(modes) > 1 else speed, speeds, 0 if mode == main else 1))
    for name, need in needs.items():
        cells = [rows[name](each.by_mode[main]) for each in found]
        if set(cells) != {"-"}:
            columns.append(Column(name, cells, need))
    columns.append(Column("", [_BEST if each is best else "" for each in found], 0, "left"))
    console = page_console()
    table = columns_table(columns, console.width, 2)
    table.row_styles = ["bold" if each is best else "" for each in found]
    _print([*heading, f"columns from x iterative on: {main}"] if len(modes) > 1 else heading, table, console)


def _speed(each: Combination, mode: Mode) -> float | None:
    return each.by_mode[mode].tokens_per_s


def _numbers(result: ModeResult) -> dict[str, Any]:
    return {**asdict(result.summary), **(asdict(result.traffic) if result.traffic else {}), "gain": result.gain}


def _two_digits(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


_ROWS: dict[str, Callable[[ModeResult], str]] = {
    "t/s": lambda own: three_digits(own.summary.tokens_per_s),
    "x iterative": lambda own: _two_digits(own.gain),
    "TTFT": lambda own: human_seconds(own.summary.ttft_s),
    "ITL mean": lambda own: human_seconds(own.summary.itl_mean_s),
    "ITL p99": lambda own: human_seconds(own.summary.itl_p99_s),
    "accepted": lambda own: percent(own.summary.acceptance),
    "per run": lambda own: _two_digits(own.summary.accepted_per_run),
    "cancelled runs": lambda own: "-" if own.summary.cancelled_runs is None else f"{own.summary.cancelled_runs}",
    "occupied": lambda own: percent(own.summary.occupancy),
    "wasted": lambda own: percent(own.summary.wasted),
    "draft occupied": lambda own: percent(own.summary.draft_occupancy),
    "draft paused": lambda own: percent(own.summary.draft_paused),
    "sent/token": lambda own: human_bytes(own.summary.sent_bytes_per_token),
}


def _of_traffic(cell: Callable[[TrafficSummary], str]) -> Callable[[ModeResult], str]:
    return lambda own: "-" if own.traffic is None else cell(own.traffic)


_TRAFFIC_ROWS: dict[str, Callable[[ModeResult], str]] = {
    "total t/s": lambda own: three_digits(own.tokens_per_s),
    "x iterative": lambda own: _two_digits(own.gain),
    "t/s each": lambda own: three_digits(own.summary.tokens_per_s),
    "requests/s": _of_traffic(lambda own: three_digits(own.requests_per_s)),
    "TTFT p50": _of_traffic(lambda own: human_seconds(own.ttft_p50_s)),
    "TTFT p90": _of_traffic(lambda own: human_seconds(own.ttft_p90_s)),
    "TTFT p99": _of_traffic(lambda own: human_seconds(own.ttft_p99_s)),
    "ITL p50": _of_traffic(lambda own: human_seconds(own.itl_p50_s)),
    "ITL p90": _of_traffic(lambda own: human_seconds(own.itl_p90_s)),
    "ITL p99": _of_traffic(lambda own: human_seconds(own.itl_p99_s)),
    "queued p50": _of_traffic(lambda own: human_seconds(own.queue_p50_s)),
    "queued p90": _of_traffic(lambda own: human_seconds(own.queue_p90_s)),
    "queued p99": _of_traffic(lambda own: human_seconds(own.queue_p99_s)),
    "accepted": _ROWS["accepted"],
    "occupied": _of_traffic(lambda own: percent(own.occupancy)),
    "wasted": _ROWS["wasted"],
    "draft occupied": _of_traffic(lambda own: percent(own.draft_occupancy)),
    "draft paused": _ROWS["draft paused"],
    "sent/token": _ROWS["sent/token"],
}


def _short(value: float) -> str:
    return f"{value:.4g}" if isinstance(value, float) else f"{value}"


def _exact(value: float | None) -> str:
    return "" if value is None else f"{value:.6g}"


def _print(heading: Sequence[str], table: RenderableType, console: Console | None = None) -> None:
    lines = Group(*(Text(harmless(line), style="dim" if i else "bold") for i, line in enumerate(heading)))
    print_page(console or page_console(), lines, Text(), table)
