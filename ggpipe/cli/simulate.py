"""`ggpipe simulate`: the modes of `generate` on a cluster that need not be at hand."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from ggpipe.cli.flags import (
    OUTPUT,
    PROMPT,
    ComputeFlags,
    DraftFlags,
    OptionalModelFlags,
    RankFlags,
    SpeculationFlags,
    option,
    takes_flags,
)
from ggpipe.cli.settings import context_config, per_rank, speculation_config
from ggpipe.config import Mode, PipelineConfig
from ggpipe.core.layout import parse_shares
from ggpipe.display.files import check_writable
from ggpipe.display.wording import counted, percent
from ggpipe.errors import UsageError

if TYPE_CHECKING:
    from ggpipe.display.simulation import Figures, Line
    from ggpipe.runtime.stats import RequestStats
    from ggpipe.sim.build import Placement
    from ggpipe.sim.recording import Recording
    from ggpipe.sim.setup import MadeUp, Setup
    from ggpipe.sim.shapes import ModelShape
    from ggpipe.sim.spec import ClusterSpec
    from ggpipe.sim.sweep import Axis

_N_TEXT, _ACCEPTANCE = 256, 0.7
_CONFIDENCES = ("calibrated", "overconfident", "underconfident")  # as sim.tokens.Confidence
_TOKENS_SHOWN = 32  # in a plot of one simulation


@dataclass(frozen=True, kw_only=True)
class TextFlags:
    """The request, and how often the draft is right."""

    # fmt: off
    n_predict: Annotated[int, option("-n", "--predict", "--n-predict", panel=PROMPT, metavar="N", help="Tokens to generate; -1: 256, or as many as were recorded.")] = -1
    prompt_tokens: Annotated[int, option("--prompt-tokens", panel=PROMPT, metavar="N", help="Tokens of the prompt.")] = 128
    acceptance: Annotated[float | None, option("--acceptance", panel=PROMPT, metavar="P", help="How often the draft's best candidate is the target's token. Default: 0.7.")] = None
    confidence: Annotated[str, option("--confidence", panel=PROMPT, metavar="KIND", help="calibrated: the draft's probabilities mean what they say. overconfident, underconfident: it names higher, lower ones.")] = "calibrated"
    recording: Annotated[Path | None, option("--recording", panel=PROMPT, metavar="FILE", help="Instead: prompts, texts and candidates that `ggpipe record` wrote.")] = None
    seed: Annotated[int, option("-s", "--seed", panel=PROMPT, metavar="N", help="Seed of made-up text.")] = 0
    # fmt: on

    def __post_init__(self) -> None:
        if self.n_predict < 1 and self.n_predict != -1:
            raise UsageError(f"-n is 1 or more, or -1; {self.n_predict} is neither")
        if self.confidence not in _CONFIDENCES:
            raise UsageError(f"--confidence {self.confidence}: known kinds are {', '.join(_CONFIDENCES)}")


@dataclass(frozen=True, kw_only=True)
class ResultFlags:
    """What is varied, and where the numbers go."""

    # fmt: off
    sweep: Annotated[list[str] | None, option("--sweep", panel=OUTPUT, metavar="NAME=VALUES", help="Simulate with each of these values: draft=2..8, pa=0.05..0.6, np=1,2,4, latency-us=20..200/20. May be repeated: all combinations. Names: draft, draft-min, pa, ps, pr, pd, np, acceptance, prompt-tokens, latency-us, gbit.")] = None
    csv: Annotated[Path | None, option("--csv", panel=OUTPUT, metavar="FILE", help="Write the figures, a line for each mode and value.")] = None
    json: Annotated[Path | None, option("--json", panel=OUTPUT, metavar="FILE", help="Write all that is known.")] = None
    plot: Annotated[Path | None, option("--plot", panel=OUTPUT, metavar="FILE", help="Draw a sweep's speeds; without a sweep who works when. .png, .svg or .pdf.")] = None
    trace: Annotated[Path | None, option("--trace", panel=OUTPUT, metavar="FILE", help="Write a timeline of all ranks, for Perfetto or chrome://tracing.")] = None
    # fmt: on


@takes_flags(
    leave_out=(
        "load_mode", "mmap", "mlock", "repack", "numa", "override_kv", "lora", "lora_scaled",
        "threads_batch", "flash_attn", "exact", "rope_scaling", "rope_scale", "rope_freq_base", "rope_freq_scale",
        "yarn_orig_ctx", "yarn_ext_factor", "yarn_attn_factor", "yarn_beta_slow", "yarn_beta_fast",
        "hostfile", "threads_batch_draft",
    )
)  # fmt: skip
def simulate(
    cluster: Annotated[
        Path, typer.Argument(metavar="CLUSTER", help="A cluster file, a name of one that comes along, or a profile.")
    ],
    model: OptionalModelFlags,
    text: TextFlags,
    compute: ComputeFlags,
    ranks: RankFlags,
    draft: DraftFlags,
    speculation: SpeculationFlags,
    result: ResultFlags,
) -> int:
    """Simulate `generate` on a cluster: the scheduler and the draft as they are, on virtual time.

    Without --mode the three modes stand side by side. Models come from the cluster file, or with -m and -md from the
    headers of GGUF files.
    """
    from ggpipe.display.simulation import figures_of, print_modes, print_sweep
    from ggpipe.sim.sweep import parse_axis

    axes = [parse_axis(sweep) for sweep in result.sweep or ()]
    _check_files(result, len(axes))
    setup = _setup(cluster, model, text, compute, ranks, draft, speculation)
    modes = _modes(setup, speculation)
    heading = _heading(setup, [axis.name for axis in axes])
    if axes:
        lines = _sweep(setup, axes, modes)
        print_sweep(heading, lines, modes, modes[-1])
        _write(result, setup, lines, modes)
    else:
        requests: dict[str, list[RequestStats]] = {mode: setup.run(mode) for mode in _with_base(modes)}
        lines = [_line({}, {mode: figures_of(stats) for mode, stats in requests.items()}, modes)]
        print_modes(heading, lines[0].by_mode)
        _write(result, setup, lines, modes, requests)
    return 0


def _check_files(result: ResultFlags, n_axes: int) -> None:
    from ggpipe.display.canvas import check_plottable

    for path in (result.csv, result.json, result.plot, result.trace):
        if path is not None:
            check_writable(path)
    if result.plot is not None:
        check_plottable(result.plot)
        if n_axes > 2:
            raise UsageError(f"--plot draws sweeps of one or two names, not of {n_axes}: write a --csv instead")
    if result.trace is not None and n_axes:
        raise UsageError("--trace is of one simulation: leave out --sweep")


def _setup(
    cluster: Path,
    model: OptionalModelFlags,
    text: TextFlags,
    compute: ComputeFlags,
    ranks: RankFlags,
    draft: DraftFlags,
    speculation: SpeculationFlags,
) -> Setup:
    from ggpipe.sim.build import placement_of, with_split
    from ggpipe.sim.cluster_file import read_cluster
    from ggpipe.sim.setup import Setup
    from ggpipe.sim.simulator import Sizes

    spec = read_cluster(cluster)
    if ranks.mpi_layer_split is not None:
        spec = with_split(spec, *parse_shares(ranks.mpi_layer_split))
    target_shape = shape_from(model.model, compute) or spec.target
    draft_shape = shape_from(draft.model_draft, compute) or spec.draft
    if target_shape is None:
        raise UsageError(f"{cluster} describes no target model: name one with -m")
    placement = placement_of(spec, target_shape, draft_shape)
    placement = _with_threads(spec, placement, compute.threads, draft.threads_draft)
    context = context_config(compute)  # checks them
    sizes = Sizes(context.n_ctx, context.n_batch, context.n_ubatch)
    tokens = tokens_of(text)
    n_predict = text.n_predict if text.n_predict > 0 or text.recording is not None else _N_TEXT
    return Setup(spec, placement, target_shape, draft_shape, speculation_config(speculation), tokens, n_predict, sizes)


def shape_from(path: Path | None, compute: ComputeFlags) -> ModelShape | None:
    """The shape of a model file; None of none."""
    if path is None:
        return None
    from ggpipe.engine import libllama
    from ggpipe.engine.model_file import ModelFile
    from ggpipe.sim.model_shape import shape_of

    libllama.set_log_level(5)
    return shape_of(ModelFile.open(path), compute.cache_type_k, compute.cache_type_v, compute.flash_attn != "off")


def _with_threads(spec: ClusterSpec, placement: Placement, threads: str, threads_draft: int) -> Placement:
    """As -t and -td say; -1 stands for what the cluster says, or the cores."""
    from ggpipe.sim.build import threads_of

    n_ranks, n_target = len(placement.node_of), len(placement.target_on)
    given = PipelineConfig(threads=per_rank("-t", threads))
    if len(given.threads) not in (1, n_ranks):
        raise UsageError(f"-t {threads}: give one number, or one for each of the {n_ranks} ranks")
    own = [given.threads_of(rank, threads_of(spec, placement, rank))[0] for rank in range(n_ranks)]
    if threads_draft == 0 or threads_draft < -1:
        raise UsageError(f"-td is 1 or more, or -1 for the same as -t; {threads_draft} is neither")
    if threads_draft > 0:
        own[n_target:] = [threads_draft] * (n_ranks - n_target)
    return replace(placement, threads=tuple(own), draft_threads=threads_draft if threads_draft > 0 else None)


def tokens_of(text: TextFlags) -> MadeUp | Recording:
    """What is generated. Raises UsageError for flags that contradict each other, or a recording that is none."""
    from ggpipe.sim import recording
    from ggpipe.sim.setup import MadeUp
    from ggpipe.sim.tokens import Confidence

    if text.recording is None:
        return MadeUp(
            _ACCEPTANCE if text.acceptance is None else text.acceptance,
            text.prompt_tokens,
            cast("Confidence", text.confidence),
            text.seed,
        )
    if text.acceptance is not None:
        raise UsageError("a recording says how often the draft is right: leave out --recording or --acceptance")
    return recording.read(text.recording)


def _modes(setup: Setup, speculation: SpeculationFlags) -> list[Mode]:
    """What is shown; the last one is what sweeps, plots and traces are about."""
    if setup.draft is None:
        if speculation.mode in ("speculative", "async"):
            raise UsageError(f"--mode {speculation.mode} guesses with a draft model: name one with -md")
        print("ggpipe: no draft model, so nothing is guessed; name one with -md", file=sys.stderr)
        return ["iterative"]
    return [cast(Mode, speculation.mode)] if speculation.mode else list(get_args(Mode))


def _with_base(modes: Sequence[Mode]) -> list[Mode]:
    """With iterative, which the others are compared with."""
    return [mode for mode in get_args(Mode) if mode in ("iterative", *modes)]


def _sweep(setup: Setup, axes: Sequence[Axis], modes: Sequence[Mode]) -> list[Line]:
    from ggpipe.display.simulation import Progress, figures_of
    from ggpipe.sim.setup import GUESSING
    from ggpipe.sim.sweep import check_axes, sweep

    for axis in axes:
        if axis.name in GUESSING and modes == ["iterative"]:
            raise UsageError(f"--sweep {axis.name}=… makes no difference where nothing is guessed")
    everything = _with_base(modes)
    check_axes(axes, len(everything))
    progress = Progress()
    try:
        points = sweep(setup, axes, everything, figures_of, progress)
    finally:
        progress.stop()
    return [_line(point.values, point.by_mode, modes) for point in points]


def _line(values: Mapping[str, float], by_mode: Mapping[str, Figures], modes: Sequence[Mode]) -> Line:
    from ggpipe.display.simulation import Line, with_gain

    compared = with_gain(by_mode)
    return Line(values, {mode: compared[mode] for mode in modes})


def _heading(setup: Setup, swept: Sequence[str]) -> list[str]:
    """What is simulated, but for what is swept."""
    from ggpipe.sim.setup import MadeUp

    n_target, n_draft = len(setup.placement.target_on), len(setup.placement.draft_on)
    models = f"target {_model(setup.target)} on {counted(n_target, 'rank')}"
    if setup.draft is not None:
        where = f"on {counted(n_draft, 'rank')}" if n_draft else "inside the head"
        models += f"; draft {_model(setup.draft)} {where}"
    tokens, n_predict, request = setup.tokens, setup.n_predict, []
    if isinstance(tokens, MadeUp):
        if "prompt-tokens" not in swept:
            request.append(f"prompt of {counted(tokens.n_prompt, 'token')}")
        request.append(f"text of {n_predict}")
        if "acceptance" not in swept:
            request.append(f"draft right {percent(tokens.acceptance)} of the time, {tokens.confidence}")
    else:
        request.append(counted(len(tokens.takes), "recorded prompt"))
        lengths = [len(take.text) if n_predict < 0 else n_predict for take in tokens.takes]
        request.append(f"texts of {' + '.join(map(str, lengths))} tokens")
        request.append(f"draft right {percent(tokens.agreement)} of the time")
    return [setup.spec.title, models, ", ".join(request)]


def _model(shape: ModelShape) -> str:
    return f"{shape.name} ({counted(shape.n_layer, 'layer')})"


def _write(
    result: ResultFlags,
    setup: Setup,
    lines: Sequence[Line],
    modes: Sequence[Mode],
    requests: Mapping[str, Sequence[RequestStats]] | None = None,
) -> None:
    """`requests`: of a simulation without sweeps."""
    from ggpipe.display.plots import occupancy_timeline
    from ggpipe.display.simulation import plot_sweep, write_figures_csv, write_figures_json
    from ggpipe.display.summary import request_object
    from ggpipe.display.trace import write_trace

    main = modes[-1]
    if result.csv is not None:
        write_figures_csv(result.csv, lines)
    if result.json is not None:
        objects = {mode: [request_object(s, s.ranks) for s in stats] for mode, stats in (requests or {}).items()}
        write_figures_json(result.json, _facts(setup), lines, objects)
    if result.plot is not None:
        if requests is None:
            plot_sweep(result.plot, lines, modes, main, setup.spec.title)
        else:
            first = requests[main][0]
            times = first.token_times
            window_s = (0.0, times[-1]) if len(times) <= _TOKENS_SHOWN else (times[0], times[_TOKENS_SHOWN])
            occupancy_timeline(result.plot, first, first.ranks, title=f"{setup.spec.title}: {main}", window_s=window_s)
    if result.trace is not None and requests is not None:
        first = requests[main][0]
        write_trace(result.trace, first, first.ranks)


def _facts(setup: Setup) -> dict[str, object]:
    """What was simulated, for the JSON file."""
    from ggpipe.sim.setup import MadeUp

    tokens = setup.tokens
    return {
        "cluster": setup.spec.title,
        "target": setup.target.name,
        "draft": setup.draft.name if setup.draft else None,
        "layers": setup.placement.layout.layers if setup.placement.layout else None,
        "speculation": asdict(setup.speculation),
        "tokens": asdict(tokens) if isinstance(tokens, MadeUp) else {"agreement": tokens.agreement},
    }
