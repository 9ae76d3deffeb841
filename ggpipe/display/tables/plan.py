"""A plan as a page (ranks and their memory, speed by mode, the command to copy) and as JSON."""

from __future__ import annotations

import itertools
import shlex
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.recording import Recording
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.layer_split import text_of
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.layout import layer_range
from ggpipe.display.files import write_json
from ggpipe.display.format import counted, harmless, human_bytes, human_seconds, percent, streamed_text, three_digits
from ggpipe.display.stdout import page_console, print_page
from ggpipe.display.tables.columns import Column, columns_table
from ggpipe.launch.hostfile import hostfile_lines
from ggpipe.launch.placement import listed
from ggpipe.planning.drafters import DrafterCandidate, DrafterPlan
from ggpipe.planning.plan import Plan, Prediction
from ggpipe.planning.run_lengths import LongerRuns
from ggpipe.sim.simulation_spec import SyntheticText
from ggpipe.sim.virtual_cluster import VirtualPlacement

_GAP = 2
_HOSTS = Path("hosts")
_MOST_NAMES = 4
_MUCH_SOONER = 0.8  # ratio of TTFTs that is worth mentioning
_LINK_BYTES = 32 << 10  # message size for comparing links: a row of 8,192 floats
_FLAGS = (("--draft", "n_draft"), ("-pa", "p_accept"), ("-np", "n_parallel"))


@dataclass(frozen=True, kw_only=True)
class GenerateCommand:
    """The parts of the command that are known before planning."""

    model: Path | str
    """A file, or a repository on the Hugging Face Hub."""
    drafters: Sequence[str]
    """How the command names the plan's drafters: `-md FILE`."""
    extras: Sequence[str]
    """The user's own flags."""
    hosts: Sequence[str]
    """Machine of each measured rank, as named in the hostfile."""
    hostfile: Path | None


def print_plan(
    spec: ClusterSpec,
    target: ModelShape,
    candidates: Sequence[DrafterCandidate],
    tokens: SyntheticText | Recording,
    made: DrafterPlan,
    command: GenerateCommand,
    longer: LongerRuns | None = None,
) -> None:
    """Print a plan on stdout. `candidates`: the drafters that it could use. `longer`: runs that the command asks
    for."""
    console, plan = page_console(), made.plan
    parts: list[RenderableType] = [
        _heading(spec, target, candidates, tokens, plan),
        Text(),
        _ranks_table(plan, console.width),
        Text(),
        _modes_table(plan, console.width),
        *map(Text, _streamed_line(plan)),
        *map(Text, _draft_line(plan)),
        *map(Text, _choice(made)),
        *map(Text, _reasons(spec, plan)),
        *map(Text, _longer_line(longer)),
        *map(Text, _remarks(spec, plan)),
        Text(),
    ]
    line, hostfile, hosts = command_line(spec, plan, command)
    parts.append(Text(line, style="bold"))
    if hosts:
        parts += [Text(), Text(f"Save this as {hostfile}:", style="dim"), *map(Text, hosts)]
    print_page(console, *parts)


def command_line(spec: ClusterSpec, plan: Plan, command: GenerateCommand) -> tuple[str, Path | None, list[str]]:
    """The command, the hostfile that it names, and the lines to save in a hostfile that does not exist yet."""
    hostfile, hosts = _hosts(spec, plan, command)
    words = ["ggpipe", "generate", "-hf" if isinstance(command.model, str) else "-m", str(command.model)]
    words += command.drafters
    if len(plan.ranks) > 1 or hostfile is not None:
        words += ["--mpi-layer-split", text_of(plan.placement.layer_splits)]
    if plan.placement.tensor_split:
        words += ["--tensor-split", ",".join(f"{share:g}" for share in plan.placement.tensor_split)]
    if plan.placement.tensor_wire != "f32":
        words += ["--tensor-wire", plan.placement.tensor_wire]
    words += [*threads_flags(plan.placement), *_speculation_flags(plan.best), *command.extras]
    if hostfile is not None:
        words += ["--hostfile", str(hostfile)]
    return shlex.join([*words, "-f", "prompt.txt"]), hostfile, hosts


def threads_flags(placement: VirtualPlacement) -> list[str]:
    """-t, and -td if a draft model inside the head has a different number of threads."""
    threads = placement.threads
    words = ["-t", ",".join(map(str, threads if len(set(threads)) > 1 else threads[:1]))]
    if placement.draft_threads is not None and placement.draft_threads != threads[0]:
        words += ["-td", str(placement.draft_threads)]
    return words


def write_plan(path: Path, spec: ClusterSpec, made: DrafterPlan, command: GenerateCommand) -> None:
    """Write a plan as JSON. Raises UsageError if the file cannot be written."""
    plan = made.plan
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
        "group_sizes": [len(stage.ranks) for stage in placement.layout.stages] if placement.layout else [],
        "tensor_split": list(placement.tensor_split),
        "tensor_wire": placement.tensor_wire,
        "with_floats": asdict(plan.with_floats) if plan.with_floats is not None else None,
        "alternative": _alternative_object(plan),
        "draft_rate": asdict(plan.draft_rate) if plan.draft_rate is not None else None,
        "drafters": [own.shape.name for own in made.used],
        "drafters_tried": [
            {"drafters": [own.shape.name for own in trial.used], "tokens_per_s": trial.tokens_per_s}
            for trial in made.trials
        ],
        "best": plan.best.mode,
        "modes": {mode: asdict(prediction) for mode, prediction in plan.predictions.items()},
        "simulations": plan.n_simulations,
        **({"users": plan.users} if plan.users is not None else {}),
    }
    write_json(path, content)


def _alternative_object(plan: Plan) -> dict[str, Any] | None:
    if plan.alternative is None:
        return None
    placement, prediction = plan.alternative
    return {"stages": stages_text(placement), **asdict(prediction)}


def _heading(
    spec: ClusterSpec,
    target: ModelShape,
    candidates: Sequence[DrafterCandidate],
    tokens: SyntheticText | Recording,
    plan: Plan,
) -> Group:
    models = "; ".join([f"target {_model(target)}", *(f"draft {_model(own.shape)}" for own in candidates)])
    if isinstance(tokens, Recording):
        request = f"{counted(len(tokens.prompts), 'recorded prompt')}, agreement {percent(tokens.agreement)}"
    else:
        request = f"prompt of {counted(tokens.n_prompt, 'token')}"
        shares = [tokens.agreement if own.agreement is None else own.agreement for own in candidates]
        request += f", agreement {' and '.join(map(percent, dict.fromkeys(shares)))}" if shares else ""
    if plan.users is not None:
        request += f"; {counted(plan.users, 'user')} at the same time, compared by total tokens per second"
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


def _streamed_line(plan: Plan) -> list[str]:
    """Which weights are not in memory."""
    streamed = Counter[str]()
    for rank in plan.ranks:
        if rank.memory.streamed:
            streamed[rank.node] += round(rank.memory.streamed)
    return ["", streamed_text(streamed)] if streamed else []


def _draft_line(plan: Plan) -> list[str]:
    """Where the draft runs and how fast, and what to do if it is slower than a stage."""
    rate = plan.draft_rate
    uses_draft = plan.draft_inside or any(rank.drafts for rank in plan.ranks)
    if rate is None or (rate.token_s <= rate.stage_s and not uses_draft):
        return []
    place = f"in the head on {harmless(rate.node)}" if rate.inside else f"on {harmless(rate.node)}"
    token, stage = human_seconds(rate.token_s), human_seconds(rate.stage_s)
    if rate.token_s <= rate.stage_s:
        return ["", f"draft model {place}: {token} per token, while the slowest stage takes {stage} per row"]
    return [
        "",
        f"draft model {place}: {token} per token, which is slower than a stage ({stage} per row): use a smaller draft "
        "model, or run it on a faster machine",
    ]


def _choice(made: DrafterPlan) -> list[str]:
    """What was compared, of several drafters: each set of them once, at its best place."""
    best: dict[str, float] = {}
    for trial in made.trials:
        name = " and ".join(harmless(own.shape.name) for own in trial.used)
        best[name] = max(best.get(name, 0.0), trial.tokens_per_s)
    if not best:
        return []
    tried = ", ".join(f"{name} {three_digits(speed)} t/s" for name, speed in best.items())
    used = " and ".join(harmless(own.shape.name) for own in made.used) or "none"
    return ["", f"drafters compared by short simulations: {tried}; the plan uses {used}"]


def _reasons(spec: ClusterSpec, plan: Plan) -> list[str]:
    """Lines on why groups, or stages, are better."""
    if plan.alternative is None:
        return []
    other, slower = plan.alternative
    unit = "t/s in total" if plan.users is not None else "t/s"
    line = (
        f"{stages_text(plan.placement)}, {_link_text(spec, plan)}: {three_digits(plan.best.tokens_per_s)} {unit} "
        f"estimated, against {three_digits(slower.tokens_per_s)} for {stages_text(other)}"
    )
    if slower.ttft_s < _MUCH_SOONER * plan.best.ttft_s:
        line += f" (TTFT {human_seconds(plan.best.ttft_s)} against {human_seconds(slower.ttft_s)})"
    return ["", line, *_wire_line(plan, unit)]


def _wire_line(plan: Plan, unit: str) -> list[str]:
    """What 16-bit sums gain, and how they affect the output."""
    if plan.with_floats is None:
        return []
    return [
        f"--tensor-wire f16 sends sums as 16-bit floats. Without it: {three_digits(plan.with_floats.tokens_per_s)} "
        f"{unit}, TTFT {human_seconds(plan.with_floats.ttft_s)}",
        "(rounding may occasionally change the choice between two almost equally likely tokens)",
    ]


def _longer_line(longer: LongerRuns | None) -> list[str]:
    """What longer runs gain."""
    if longer is None:
        return []
    return [
        "",
        f"-ub {longer.n_ubatch} computes more of a prompt at once: first token of a single request after "
        f"{human_seconds(longer.ttft_s)} instead of {human_seconds(longer.usual_s)}; this takes more memory",
    ]


def stages_text(placement: VirtualPlacement) -> str:
    """The target's stages: `4 stages`, `2 groups of 2`, `1 rank`, `3 stages of 2, 1 and 1 ranks`."""
    assert placement.layout is not None
    sizes = [len(stage.ranks) for stage in placement.layout.stages]
    if set(sizes) == {1}:
        return counted(len(sizes), "stage") if len(sizes) > 1 else "1 rank"
    if len(set(sizes)) == 1:
        return f"{counted(len(sizes), 'group')} of {sizes[0]}"
    return f"{len(sizes)} stages of {listed([str(size) for size in sizes])} ranks"


def _link_text(spec: ClusterSpec, plan: Plan) -> str:
    """The slowest link between the target's ranks."""
    nodes = [spec.nodes[node] for node in plan.placement.target_on]
    if len({node.host for node in nodes}) == 1:
        return "on one machine"
    ranks = [place.rank for place in plan.places[: len(nodes)]]
    pairs = [(a, b) for a, b in itertools.permutations(ranks, 2) if a is not None and b is not None]
    links = [spec.links[pair] for pair in pairs if pair in spec.links] or [spec.network]
    link = max(links, key=lambda own: own.latency_s + _LINK_BYTES / own.bytes_per_s)
    return f"{link.bytes_per_s * 8 / 1e9:.3g} Gbit/s and {link.latency_s * 1e6:.3g} µs between machines"


def _remarks(spec: ClusterSpec, plan: Plan) -> list[str]:
    """Lines on modes that would be faster on other ranks."""
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
    """The hostfile, if one is needed, and its lines, if it is a new one."""
    if command.hostfile is None:
        if len({node.host for node in spec.nodes}) == 1:
            return None, []
        return _HOSTS, hostfile_lines([spec.nodes[place.node].host for place in plan.places])
    named = {spec.target_on[i]: host for i, host in enumerate(command.hosts)}
    hosts = [named[place.node] if place.rank is None else command.hosts[place.rank] for place in plan.places]
    if hosts == list(command.hosts[: len(hosts)]):
        return command.hostfile, []
    return command.hostfile.with_name(f"{command.hostfile.name}.plan"), hostfile_lines(hosts, command.hostfile)
