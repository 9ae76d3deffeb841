"""Flags that several commands take: the groups, and how a command takes them.

A group is a frozen dataclass whose fields are options. A command names the groups that it takes next to its own
options, `@takes_flags()` shows typer one flat list, and the command gets the groups filled in. A group checks its own
values; `cli/settings.py` makes the engine's settings of them.
"""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, get_args, get_type_hints

import typer

from ggpipe.config import ContextConfig, LoadMode, Mode, Numa, SamplingConfig, SpeculationConfig
from ggpipe.errors import UsageError

MODEL, PROMPT, COMPUTE, RANKS, SPECULATION, SAMPLING, ROPE, OUTPUT = PANELS = (
    "Model", "Prompt", "Compute", "Ranks", "Speculation", "Sampling", "RoPE and YaRN", "Output",
)  # fmt: skip
"""Panels of --help, in this order; a command's own panels come before them."""

_CONTEXT, _SAMPLING, _SPECULATION = ContextConfig(), SamplingConfig(), SpeculationConfig()


@dataclass(frozen=True)
class After:
    """Beside an option in `Annotated`: in --help it stands behind the option of this field, where a command has it."""

    name: str


def option(*names: str, panel: str, help: str, metavar: str | None = None) -> typer.models.OptionInfo:
    """An option for a field of a group or a parameter of a command."""
    info: typer.models.OptionInfo = typer.Option(*names, help=help, metavar=metavar, rich_help_panel=panel)
    return info


def takes_flags(
    *, leave_out: Collection[str] = (), **defaults: object
) -> Callable[[Callable[..., int]], Callable[..., int]]:
    """Make a command whose parameters may be groups one that typer reads: a parameter for each field.

    `defaults`: other defaults for this command, by field. `leave_out`: fields that this command has no option for;
    its groups hold their defaults. Raises TypeError when a field is unknown, named twice, or left out without a default.
    """

    def decorate(command: Callable[..., int]) -> Callable[..., int]:
        groups: dict[str, tuple[type, list[str]]] = {}
        flat: dict[str, inspect.Parameter] = {}
        known: set[str] = set()
        for parameter in inspect.signature(command, eval_str=True).parameters.values():
            group: Any = parameter.annotation
            is_group = dataclasses.is_dataclass(group)
            fields = _options_of(group) if is_group else [parameter]
            kept = [f for f in fields if f.name not in leave_out]
            if is_group:
                groups[parameter.name] = (group, [f.name for f in kept])
            for f in fields:
                if f.name in known or (f not in kept and f.default is f.empty):
                    raise TypeError(f"{command.__name__}: {f.name} is there twice, or left out without a default")
                known.add(f.name)
            for f in kept:
                default = defaults.get(f.name, f.default)
                flat[f.name] = f.replace(kind=inspect.Parameter.KEYWORD_ONLY, default=default)
        if unknown := {*leave_out, *defaults} - known:
            raise TypeError(f"{command.__name__} has no {', '.join(sorted(unknown))}")

        @functools.wraps(command)
        def run(**values: Any) -> int:
            made = {name: group(**{f: values.pop(f) for f in names}) for name, (group, names) in groups.items()}
            return command(**made, **values)

        ordered = _in_order_of_help(list(flat.values()))
        run.__signature__ = inspect.Signature(ordered, return_annotation=int)  # type: ignore[attr-defined]
        run.__annotations__ = {parameter.name: parameter.annotation for parameter in ordered} | {"return": int}
        return run

    return decorate


@functools.cache  # evaluating annotations takes a while, and every command would do it again
def _options_of(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            f.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if f.default is dataclasses.MISSING else f.default,
            annotation=hints[f.name],
        )
        for f in dataclasses.fields(group)
    ]


def _in_order_of_help(parameters: list[inspect.Parameter]) -> list[inspect.Parameter]:
    def panel(parameter: inspect.Parameter) -> int:
        panels = [getattr(extra, "rich_help_panel", None) for extra in get_args(parameter.annotation)[1:]]
        return max((PANELS.index(name) for name in panels if name in PANELS), default=-1)

    ordered = sorted(parameters, key=panel)
    for parameter in tuple(ordered):
        for extra in get_args(parameter.annotation)[1:]:
            names = [p.name for p in ordered if p is not parameter]
            if isinstance(extra, After) and extra.name in names:
                ordered.remove(parameter)
                ordered.insert(names.index(extra.name) + 1, parameter)
    return ordered


# The groups. One option a line reads better than five.
# fmt: off


@dataclass(frozen=True, kw_only=True)
class OptionalModelFlags:
    """The target model, for a command that can do without, and how weights get into memory."""

    model: Annotated[Path | None, option("-m", "--model", panel=MODEL, metavar="FILE", help="The GGUF file; of a split one the first part.")] = None
    load_mode: Annotated[str, option("-lm", "--load-mode", panel=MODEL, metavar="MODE", help="auto, none, mmap, mlock, mmap+mlock or dio.")] = "auto"
    mmap: Annotated[bool, option("--mmap/--no-mmap", panel=MODEL, help="Map weights from the file, or read this rank's layers into memory.")] = True
    mlock: Annotated[bool, option("--mlock", panel=MODEL, help="Keep weights in RAM.")] = False
    repack: Annotated[bool, option("--repack/--no-repack", " /-nr", panel=MODEL, help="Let ggml repack weights for this CPU.")] = True
    numa: Annotated[str | None, option("--numa", panel=MODEL, metavar="TYPE", help="distribute (also when bare), isolate or numactl.")] = None
    override_kv: Annotated[list[str] | None, option("--override-kv", panel=MODEL, metavar="KEY=TYPE:VALUE", help="Override metadata of the model.")] = None
    lora: Annotated[list[str] | None, option("--lora", panel=MODEL, metavar="FILE", help="Apply a LoRA adapter.")] = None
    lora_scaled: Annotated[list[str] | None, option("--lora-scaled", panel=MODEL, metavar="FILE:SCALE", help="Apply a LoRA adapter, scaled.")] = None

    def __post_init__(self) -> None:
        if self.load_mode not in ("auto", *get_args(LoadMode)):
            raise UsageError(f"--load-mode {self.load_mode}: known modes are auto, {', '.join(get_args(LoadMode))}")
        if self.numa is not None and self.numa not in get_args(Numa):
            raise UsageError(f"--numa {self.numa}: known strategies are {', '.join(get_args(Numa))}")


@dataclass(frozen=True, kw_only=True)
class ModelFlags(OptionalModelFlags):
    """The target model, and how weights get into memory."""

    model: Annotated[Path, option("-m", "--model", panel=MODEL, metavar="FILE", help="The GGUF file; of a split one the first part.")] = field()


@dataclass(frozen=True, kw_only=True)
class PromptFlags:
    """What to continue, and how far."""

    prompt: Annotated[str | None, option("-p", "--prompt", panel=PROMPT, metavar="TEXT", help="Text to continue.")] = None
    file: Annotated[Path | None, option("-f", "--file", panel=PROMPT, metavar="FILE", help="Read the prompt from a file.")] = None
    escape: Annotated[bool, option("-e/ ", "--escape/--no-escape", panel=PROMPT, help=r"Process \\n, \\t, \\xHH … in the prompt.")] = True
    n_predict: Annotated[int, option("-n", "--predict", "--n-predict", panel=PROMPT, metavar="N", help="Tokens to generate; -1: until the text ends or the context is full.")] = -1

    def __post_init__(self) -> None:
        _check_natural(self.n_predict)


@dataclass(frozen=True, kw_only=True)
class ComputeFlags:
    """The context, how it is computed and by how many threads, and how positions are encoded."""

    ctx_size: Annotated[int, option("-c", "--ctx-size", panel=COMPUTE, metavar="N", help="Context in tokens; 0: the model's own.")] = _CONTEXT.n_ctx
    batch_size: Annotated[int, option("-b", "--batch-size", panel=COMPUTE, metavar="N", help="Prompt tokens in a batch.")] = _CONTEXT.n_batch
    ubatch_size: Annotated[int, option("-ub", "--ubatch-size", panel=COMPUTE, metavar="N", help="Prompt tokens in a run: one run is in each stage.")] = _CONTEXT.n_ubatch
    threads: Annotated[str, option("-t", "--threads", panel=COMPUTE, metavar="LIST", help="Threads; one value, or one for each rank (6,32,20). -1: the machine's cores.")] = "-1"
    threads_batch: Annotated[str, option("-tb", "--threads-batch", panel=COMPUTE, metavar="LIST", help="Threads for prompts; -1: as -t.")] = "-1"
    flash_attn: Annotated[str, option("-fa", "--flash-attn", panel=COMPUTE, metavar="on|off|auto", help="Flash attention.")] = _CONTEXT.flash_attn
    cache_type_k: Annotated[str, option("-ctk", "--cache-type-k", panel=COMPUTE, metavar="TYPE", help="KV cache type of K.")] = _CONTEXT.cache_type_k
    cache_type_v: Annotated[str, option("-ctv", "--cache-type-v", panel=COMPUTE, metavar="TYPE", help="KV cache type of V.")] = _CONTEXT.cache_type_v
    exact: Annotated[bool, option("--exact", panel=COMPUTE, help="Reference kernels: the same bits for every split, mode and number of threads. Slower.")] = False
    rope_scaling: Annotated[str | None, option("--rope-scaling", panel=ROPE, metavar="KIND", help="none, linear or yarn. Default: the model's.")] = None
    rope_scale: Annotated[float, option("--rope-scale", panel=ROPE, metavar="X", help="Stretch the context X times.")] = 0.0
    rope_freq_base: Annotated[float, option("--rope-freq-base", panel=ROPE, metavar="X", help="Base frequency.")] = 0.0
    rope_freq_scale: Annotated[float, option("--rope-freq-scale", panel=ROPE, metavar="X", help="Frequency scale: 1/X of --rope-scale.")] = 0.0
    yarn_orig_ctx: Annotated[int, option("--yarn-orig-ctx", panel=ROPE, metavar="N", help="Context that the model was trained with.")] = 0
    yarn_ext_factor: Annotated[float, option("--yarn-ext-factor", panel=ROPE, metavar="X", help="Extrapolation mix.")] = -1.0
    yarn_attn_factor: Annotated[float, option("--yarn-attn-factor", panel=ROPE, metavar="X", help="Magnitude scale.")] = -1.0
    yarn_beta_slow: Annotated[float, option("--yarn-beta-slow", panel=ROPE, metavar="X", help="High correction dimension.")] = -1.0
    yarn_beta_fast: Annotated[float, option("--yarn-beta-fast", panel=ROPE, metavar="X", help="Low correction dimension.")] = -1.0

    def __post_init__(self) -> None:
        check_on_off_auto(self.flash_attn)


@dataclass(frozen=True, kw_only=True)
class RankFlags:
    """Which ranks there are, and what each holds."""

    mpi_layer_split: Annotated[str | None, option("--mpi-layer-split", panel=RANKS, metavar="LIST", help="Share of the layers for each rank, head first (0.1,0.4,0.5). Without mpirun, that many ranks are started. auto: as a quick measurement suggests. Default: even.")] = None
    hostfile: Annotated[Path | None, option("--hostfile", panel=RANKS, metavar="FILE", help="Machines to start ranks on, as mpirun reads it.")] = None


@dataclass(frozen=True, kw_only=True)
class DraftFlags:
    """The draft model, and its threads."""

    model_draft: Annotated[Path | None, option("-md", "--model-draft", "--spec-draft-model", panel=SPECULATION, metavar="FILE", help="A smaller model of the same family that guesses ahead. It runs on the ranks behind the / of --mpi-layer-split, else inside the first rank.")] = None
    threads_draft: Annotated[int, option("-td", "--threads-draft", panel=SPECULATION, metavar="N", help="Threads of the draft; -1: as -t."), After("parallel")] = -1
    threads_batch_draft: Annotated[int, option("-tbd", "--threads-batch-draft", panel=SPECULATION, metavar="N", help="Threads of the draft for prompts; -1: as -td."), After("threads_draft")] = -1


@dataclass(frozen=True, kw_only=True)
class SpeculationFlags:
    """How a draft model guesses ahead."""

    mode: Annotated[str | None, option("--mode", panel=SPECULATION, metavar="MODE", help="async: drafting and verifying overlap (default with -md). speculative: draft, verify, repeat. iterative: no guesses.")] = None
    draft: Annotated[int, option("--draft", "--draft-max", "--draft-n", "--spec-draft-n-max", panel=SPECULATION, metavar="N", help="Guesses in a micro-batch, at most.")] = _SPECULATION.n_draft
    draft_min: Annotated[int, option("--draft-min", "--spec-draft-n-min", panel=SPECULATION, metavar="N", help="Send no micro-batch with fewer guesses.")] = _SPECULATION.n_min
    p_accept: Annotated[float, option("-pa", "--p-accept", "--draft-p-min", "--spec-draft-p-min", panel=SPECULATION, metavar="P", help="Guess no further than the draft's probability of a token is this.")] = _SPECULATION.p_accept
    p_split: Annotated[float, option("-ps", "--p-split", "--draft-p-split", "--spec-draft-p-split", panel=SPECULATION, metavar="P", help="Split a branch for a further token with this probability.")] = _SPECULATION.p_split
    p_recovery: Annotated[float, option("-pr", "--p-recovery", panel=SPECULATION, metavar="P", help="Raise -pa and -ps by this for each micro-batch since the last accepted token.")] = _SPECULATION.p_recovery
    p_decay: Annotated[float, option("-pd", "--p-decay", panel=SPECULATION, metavar="P", help="Lower them by this for each attempt since then that found nothing.")] = _SPECULATION.p_decay
    parallel: Annotated[int, option("-np", "--parallel", panel=SPECULATION, metavar="N", help="Branches that are guessed side by side.")] = _SPECULATION.n_parallel
    cancel: Annotated[bool, option("--cancel/--no-cancel", panel=SPECULATION, help="Stop runs that turned out wrong while they are in flight.")] = True
    continuous: Annotated[bool, option("--continuous/--no-continuous", panel=SPECULATION, help="Guess on while guesses are in flight.")] = True

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in get_args(Mode):
            raise UsageError(f"--mode {self.mode}: known modes are {', '.join(get_args(Mode))}")


@dataclass(frozen=True, kw_only=True)
class SamplingFlags:
    """llama.cpp's sampler chain."""

    temp: Annotated[float, option("--temp", "--temperature", panel=SAMPLING, metavar="T", help="Temperature; 0 or less: greedy.")] = _SAMPLING.temp
    top_k: Annotated[int, option("--top-k", panel=SAMPLING, metavar="N", help="Keep the N best; 0: all.")] = _SAMPLING.top_k
    top_p: Annotated[float, option("--top-p", panel=SAMPLING, metavar="P", help="Keep the best that add up to P.")] = _SAMPLING.top_p
    min_p: Annotated[float, option("--min-p", panel=SAMPLING, metavar="P", help="Keep what has at least P of the best's probability.")] = _SAMPLING.min_p
    repeat_last_n: Annotated[int, option("--repeat-last-n", panel=SAMPLING, metavar="N", help="Tokens that penalties look back on; 0: off, -1: all.")] = _SAMPLING.repeat_last_n
    repeat_penalty: Annotated[float, option("--repeat-penalty", panel=SAMPLING, metavar="X", help="Penalise repeated tokens; 1: off.")] = _SAMPLING.repeat_penalty
    presence_penalty: Annotated[float, option("--presence-penalty", panel=SAMPLING, metavar="X", help="Penalise tokens that occurred; 0: off.")] = _SAMPLING.presence_penalty
    frequency_penalty: Annotated[float, option("--frequency-penalty", panel=SAMPLING, metavar="X", help="Penalise tokens by how often they occurred; 0: off.")] = _SAMPLING.frequency_penalty
    seed: Annotated[int, option("-s", "--seed", panel=SAMPLING, metavar="N", help="Seed; -1: random.")] = _SAMPLING.seed
    ignore_eos: Annotated[bool, option("--ignore-eos", panel=SAMPLING, help="Never end the text before -n tokens.")] = False

    def __post_init__(self) -> None:
        _check_natural(self.seed)


@dataclass(frozen=True, kw_only=True)
class LogFlags:
    """What is said beside the result."""

    verbose: Annotated[bool, option("-v", "--verbose", panel=OUTPUT, help="Show libllama's messages.")] = False


# fmt: on


def check_on_off_auto(value: str) -> None:
    """Raises UsageError unless -fa's or --color's value is one that they take."""
    if value not in ("on", "off", "auto"):
        raise UsageError("-fa and --color take on, off or auto")


def _check_natural(number: int) -> None:
    if number < -1:
        raise UsageError("-s and -n are numbers from 0 up, or -1")
