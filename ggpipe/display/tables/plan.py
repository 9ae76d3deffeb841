"""A plan as a page: ranks with their memory, speeds by mode, and the command line to paste; and as JSON."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from rich.console import Group, RenderableType
from rich.text import Text

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.recording import Recording
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config import SpeculationConfig
from ggpipe.core.layout import layer_range, shares_text
from ggpipe.display.files import write_text
from ggpipe.display.format import counted, harmless, human_bytes, human_seconds, percent, three_digits
from ggpipe.display.stdout import page_console, print_page
from ggpipe.display.tables.columns import Column, columns_table
from ggpipe.launch.hostfile import hostfile_lines
from ggpipe.planning.planner import Plan, Prediction
from ggpipe.sim.simulation_spec import SyntheticText
from ggpipe.sim.virtual_cluster import Placement

_GAP = 2
_HOSTS = Path("hosts")
_MOST_NAMES = 4
_FLAGS = (("--draft", "n_draft"), ("-pa", "p_accept"), ("-np", "n_parallel"))


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """The parts of the command line that are known before there is a plan."""

    model: Path
    draft: Path
    extras: Sequence[str]
    """Flags that the user gave."""
    hosts: Sequence[str]
    """The machine of each rank that was measured, as the hostfile calls it."""
    hostfile: Path | None


def print_plan(
    spec: ClusterSpec,
    target: ModelShape,
    draft: ModelShape | None,
    tokens: SyntheticText | Recording,
    plan: Plan,
    command: GenerateCommand,
) -> None:
    """Print a plan on stdout."""
    console = page_console()
    parts: list[RenderableType] = [
        _heading(spec, target, draft, tokens, plan),
        Text(),
        _ranks_table(plan, console.width),
        Text(),
        _modes_table(plan, console.width),
        *map(Text, _remarks(spec, plan)),
        Text(),
    ]
    line, hostfile, hosts = command_line(spec, plan, command)
    parts.append(Text(line, style="bold"))
    if hosts:
        parts += [Text(), Text(f"Save this as {hostfile}:", style="dim"), *map(Text, hosts)]
    print_page(console, *parts)


def command_line(spec: ClusterSpec, plan: Plan, command: GenerateCommand) -> tuple[str, Path | None, list[str]]:
    """The command, the hostfile that it names, and the lines to save in it where they are not there yet."""
    hostfile, hosts = _hosts(spec, plan, command)
    words = ["ggpipe", "generate", "-m", str(command.model)]
    if plan.best.mode != "iterative":
        words += ["-md", str(command.draft)]
    if len(plan.ranks) > 1 or hostfile is not None:
        assert plan.placement.layout is not None
        words += ["--mpi-layer-split", shares_text(plan.placement.layout, plan.placement.draft_layout)]
    words += [*threads_flags(plan.placement), *_speculation_flags(plan.best), *command.extras]
    if hostfile is not None:
        words += ["--hostfile", str(hostfile)]
    return shlex.join([*words, "-f", "prompt.txt"]), hostfile, hosts


def threads_flags(placement: Placement) -> list[str]:
    """-t, and -td where a draft inside the head has other threads."""
    threads = placement.threads
    words = ["-t", ",".join(map(str, threads if len(set(threads)) > 1 else threads[:1]))]
    if placement.draft_threads is not None and placement.draft_threads != threads[0]:
        words += ["-td", str(placement.draft_threads)]
    return words


def write_plan(path: Path, spec: ClusterSpec, plan: Plan, command: GenerateCommand) -> None:
    """Write a plan as JSON. Raises UsageError when the file cannot be written."""
    line, _, hosts = command_line(spec, plan, command)
    placement = plan.placement
    content = {
        "cluster": spec.title,
        "command": line,
        "hostfile": hosts or None,
        "ranks": [
            {
                "rank": i,
                "node": rank.node,
                "draft": rank.drafts,
                "layers": list(rank.layers),
                "threads": rank.threads,
                "memory_bytes": {name: round(n) for name, n in asdict(rank.memory).items()},
                "has_bytes": round(rank.has_bytes),
            }
            for i, rank in enumerate(plan.ranks)
        ],
        "draft_inside_threads": placement.draft_threads,
        "best": plan.best.mode,
        "modes": {mode: asdict(prediction) for mode, prediction in plan.predictions.items()},
        "simulations": plan.n_simulations,
        **({"users": plan.users} if plan.users is not None else {}),
    }
    write_text(path, json.dumps(content, indent=1) + "\n")


def _heading(
    spec: ClusterSpec, target: ModelShape, draft: ModelShape | None, tokens: SyntheticText | Recording, plan: Plan
) -> Group:
    models = f"target {_model(target)}"
    if draft is not None:
        models += f"; draft {_model(draft)}"
    if isinstance(tokens, Recording):
        request = f"{counted(len(tokens.takes), 'recorded prompt')}, agreement {percent(tokens.agreement)}"
    else:
        request = f"prompt of {counted(tokens.n_prompt, 'token')}"
        request += f", agreement {percent(tokens.agreement)}" if draft is not None else ""
    if plan.users is not None:
        request += f"; {counted(plan.users, 'user')} at the same time, by their tokens per second in total"
    request += f"; the best of {counted(plan.n_simulations, 'simulation')}"
    styles = ("bold", "dim", "dim")
    return Group(
        *(Text(harmless(line), style) for line, style in zip((spec.title, models, request), styles, strict=True))
    )


def _model(shape: ModelShape) -> str:
    return f"{shape.name} ({counted(shape.n_layer, 'layer')}, {human_bytes(shape.weight_bytes)})"


def _ranks_table(plan: Plan, width: int) -> RenderableType:
    ranks = plan.ranks
    needs = [rank.memory for rank in ranks]
    names = [f"{i}{' draft' if rank.drafts else ''}" for i, rank in enumerate(ranks)]
    if plan.draft_inside:
        names[0] += " + draft"
    threads = [f"{rank.threads}" for rank in ranks]
    if plan.placement.draft_threads is not None:
        threads[0] += f" + {plan.placement.draft_threads}"
    return columns_table(
        [
            Column("rank", names, 0, "left"),
            Column("machine", [harmless(rank.node) for rank in ranks], 0, "left"),
            Column("layers", [layer_range(rank.layers) for rank in ranks], 0),
            Column("threads", threads, 0),
            Column("weights", [human_bytes(need.weights) for need in needs], 1),
            Column("KV", [human_bytes(need.kv) for need in needs], 2),
            Column("compute", [human_bytes(need.compute) for need in needs], 3),
            Column("program", [human_bytes(need.process) for need in needs], 4),
            Column("total", [human_bytes(need.total) for need in needs], 0),
            Column("available", [human_bytes(rank.has_bytes) for rank in ranks], 0),
        ],
        width,
        _GAP,
    )


def _modes_table(plan: Plan, width: int) -> RenderableType:
    predictions = [plan.predictions[mode] for mode in ("iterative", "speculative", "async") if mode in plan.predictions]
    base = plan.predictions.get("iterative")
    return columns_table(
        [
            Column("mode", [prediction.mode for prediction in predictions], 0, "left"),
            Column(
                "t/s" if plan.users is None else "total t/s",
                [three_digits(prediction.tokens_per_s) for prediction in predictions],
                0,
            ),
            Column(
                "x iterative",
                ["-" if base is None else f"{p.tokens_per_s / base.tokens_per_s:.2f}" for p in predictions],
                2,
            ),
            Column("TTFT", [human_seconds(prediction.ttft_s) for prediction in predictions], 1),
            Column("flags", [" ".join(_speculation_flags(p, False)) for p in predictions], 1, "left"),
            Column("", ["best" if p is plan.best else "" for p in predictions], 0, "left"),
        ],
        width,
        _GAP,
    )


def _remarks(spec: ClusterSpec, plan: Plan) -> list[str]:
    """Lines on modes that would be faster with other ranks."""
    lines = []
    for mode, (placement, prediction) in plan.elsewhere.items():
        machines = [spec.nodes[node].name for node in dict.fromkeys(placement.node_of)]
        some = ", ".join(map(harmless, machines[:_MOST_NAMES])) + (", …" if len(machines) > _MOST_NAMES else "")
        ranks = counted(len(placement.node_of), "rank")
        speed = f"{three_digits(prediction.tokens_per_s)} t/s" + (" in total" if plan.users is not None else "")
        lines.append(f"{mode} would be fastest with {ranks} on {some}: {speed}")
    return ["", *lines] if lines else []


def _speculation_flags(prediction: Prediction, with_mode: bool = True) -> list[str]:
    if prediction.mode == "iterative":
        return []
    own, usual = prediction.speculation, SpeculationConfig()
    words = ["--mode", prediction.mode] if with_mode and prediction.mode != usual.mode else []
    for flag, name in _FLAGS:
        value = getattr(own, name)
        if value != getattr(usual, name):
            words += [flag, f"{value:g}"]
    return words


def _hosts(spec: ClusterSpec, plan: Plan, command: GenerateCommand) -> tuple[Path | None, list[str]]:
    """The hostfile, where one is needed; its lines, where it is a new one."""
    if command.hostfile is None:
        if len(spec.nodes) == 1:
            return None, []
        return _HOSTS, hostfile_lines([rank.node for rank in plan.ranks])
    named = {spec.target_on[i]: host for i, host in enumerate(command.hosts)}
    hosts = [named[place.node] if place.rank is None else command.hosts[place.rank] for place in plan.places]
    if hosts == list(command.hosts[: len(hosts)]):
        return command.hostfile, []
    return command.hostfile.with_name(f"{command.hostfile.name}.plan"), hostfile_lines(hosts, command.hostfile)
