"""`ggpipe bench`: the modes of `generate`, and one process alone, measured side by side."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import ggpipe
from ggpipe.cli.flags import (
    OUTPUT,
    PROMPT,
    SPECULATION,
    ComputeFlags,
    DraftFlags,
    LogFlags,
    ModelFlags,
    PromptFlags,
    RankFlags,
    SamplingFlags,
    SpeculationFlags,
    check_on_off_auto,
    option,
    takes_flags,
)
from ggpipe.cli.ranks import run_this_rank, start_ranks
from ggpipe.cli.settings import engine_config, read_prompt, sampling_config, speculation_config, warnings_of
from ggpipe.config import EngineConfig, SamplingConfig, SpeculationConfig
from ggpipe.display.bench import print_bench
from ggpipe.display.bench_files import (
    append_bench_csv,
    begin_bench_csv,
    write_bench_json,
    write_plots,
    write_traces,
)
from ggpipe.display.bench_progress import BenchProgress
from ggpipe.display.canvas import check_plottable
from ggpipe.display.files import check_writable, make_folder
from ggpipe.display.live import LiveDisplay
from ggpipe.display.terminal import Terminal, open_answer, open_terminal
from ggpipe.errors import GgpipeError, RunError, UsageError
from ggpipe.runtime.launch import rank_in_environment

if TYPE_CHECKING:
    from ggpipe.runtime.bench import BenchMode, Work
    from ggpipe.runtime.session import Session
    from ggpipe.runtime.stats import Measured

_MODES = ("iterative", "speculative", "async", "single")
_GUESSING = ("speculative", "async")


@dataclass(frozen=True, kw_only=True)
class BenchFlags:
    """What is measured, and where the numbers go."""

    # fmt: off
    files: Annotated[list[Path] | None, option("-f", "--file", panel=PROMPT, metavar="FILE", help="A prompt; may be repeated. Default: those of ggpipe's prompts/.")] = None
    modes: Annotated[str | None, option("--modes", panel=SPECULATION, metavar="LIST", help="Of iterative, speculative, async and single (the whole model in one process). Default: all that are possible.")] = None
    rounds: Annotated[int, option("--rounds", panel=PROMPT, metavar="N", help="How often each mode has its turn.")] = 5
    full_length: Annotated[bool, option("--ignore-eos/--no-ignore-eos", panel=PROMPT, help="Never end a text before -n tokens.")] = True
    color: Annotated[str, option("--color", panel=OUTPUT, metavar="on|off|auto", help="Progress and colour; off: no colour.")] = "auto"
    csv: Annotated[Path | None, option("--csv", panel=OUTPUT, metavar="FILE", help="Write a line for each run: prefill t/s, decode t/s, ITL s, TTFT s, mode, round, prompt.")] = None
    json: Annotated[Path | None, option("--json", panel=OUTPUT, metavar="FILE", help="Write all measurements.")] = None
    plots: Annotated[Path | None, option("--plots", panel=OUTPUT, metavar="FOLDER", help="Draw speed, TTFT, ITL, a timeline, and acceptance by position.")] = None
    plot_format: Annotated[str, option("--plot-format", panel=OUTPUT, metavar="svg|png|pdf", help="Of --plots.")] = "svg"
    trace: Annotated[Path | None, option("--trace", panel=OUTPUT, metavar="FOLDER", help="Write the timeline of each mode's median run, for Perfetto or chrome://tracing.")] = None
    # fmt: on

    def __post_init__(self) -> None:
        check_on_off_auto(self.color)
        if self.rounds < 1:
            raise UsageError(f"--rounds is 1 or more, not {self.rounds}")
        if self.plot_format not in ("svg", "png", "pdf"):
            raise UsageError(f"--plot-format {self.plot_format}: known formats are svg, png and pdf")


@takes_flags(leave_out=("prompt", "file", "mode", "ignore_eos"), n_predict=128, seed=1)
def bench(
    model: ModelFlags,
    prompt: PromptFlags,
    compute: ComputeFlags,
    ranks: RankFlags,
    draft: DraftFlags,
    speculation: SpeculationFlags,
    sampling: SamplingFlags,
    log: LogFlags,
    flags: BenchFlags,
) -> int:
    """Measure all modes side by side: they take turns in one job, after the same prompts and with the same seed.

    Models are loaded once. Each mode warms up; then come the rounds. Ctrl-C ends it, and shows what there is.
    """
    config = engine_config(model, compute, ranks, draft, speculation)
    modes = _modes(flags.modes, config)
    if prompt.n_predict < 2:
        raise UsageError(f"-n {prompt.n_predict}: a speed takes 2 tokens or more")
    if flags.plots is not None:
        check_plottable(Path(f"speed.{flags.plot_format}"))
    texts = _texts(flags.files, prompt) if rank_in_environment() in (None, 0) else {}
    code = start_ranks(config, ranks.hostfile)
    if code is not None:
        return code
    task = _Task(
        config,
        texts,
        modes,
        flags.rounds,
        prompt.n_predict,
        replace(sampling_config(sampling), ignore_eos=flags.full_length),
        speculation_config(speculation, compute.exact),
    )
    return run_this_rank(config, _head(task, flags, warnings_of(compute, draft, speculation)), log.verbose)


@dataclass(frozen=True)
class _Task:
    config: EngineConfig
    texts: dict[str, str]
    """By name."""
    modes: tuple[str, ...] | None
    """None: all that are possible."""
    rounds: int
    n_predict: int
    sampling: SamplingConfig
    speculation: SpeculationConfig


def _modes(names: str | None, config: EngineConfig) -> tuple[str, ...] | None:
    if names is None:
        return None
    modes = tuple(dict.fromkeys(name.strip() for name in names.split(",")))
    for mode in modes:
        if mode not in _MODES:
            raise UsageError(f"--modes {names}: known modes are {', '.join(_MODES)}")
        if mode in _GUESSING and config.draft is None:
            raise UsageError(f"--modes {names}: {mode} guesses with a draft model; name one with -md")
    return modes


def _texts(files: Sequence[Path] | None, flags: PromptFlags) -> dict[str, str]:
    if not files:
        package = Path(ggpipe.__file__).parent
        folders = (package / "prompts", package.parent / "prompts")  # an installed package's, or a checkout's
        found = next((paths for folder in folders if (paths := list(folder.glob("*.txt")))), [])
        files = sorted(found, key=lambda path: path.stat().st_size)
        if not files:
            raise UsageError("this installation has no prompts of its own: name some with -f")
    names = [path.stem for path in files]
    unique = [path.stem if names.count(path.stem) == 1 else str(path) for path in files]
    return {name: read_prompt(replace(flags, file=path)) for name, path in zip(unique, files, strict=True)}


def _head(task: _Task, flags: BenchFlags, warnings: Sequence[str]) -> Callable[[Session], int]:
    def head(session: Session) -> int:
        for path in (flags.csv, flags.json):
            if path is not None:
                check_writable(path)
        for folder in (flags.plots, flags.trace):
            if folder is not None:
                make_folder(folder)
        terminal = open_terminal(flags.color)  # type: ignore[arg-type]
        runs: list[Measured] = []
        failure: GgpipeError | None = None
        with contextlib.ExitStack() as stack:
            _load(session, terminal)
            for warning in (*warnings, *session.warnings):
                _say(f"warning: {warning}")
            modes = task.modes or tuple(mode for mode in _MODES if mode not in _GUESSING or task.config.draft)
            if not session.can_speculate:
                modes = tuple(mode for mode in modes if mode not in _GUESSING)
            work = _work(task, modes, session, own_choice=not flags.files)
            modes, single = _open_single(work.modes, task, session, terminal, stack)
            work = replace(work, modes=modes)
            try:
                _measure(session, single, work, terminal, flags.csv, runs)
            except GgpipeError as e:
                if not runs:
                    raise
                failure = e  # what was measured stays, and is summed up
            if failure is None and (flags.trace is not None or flags.plots is not None):
                session.align_clocks()
        _report(task, flags, terminal, runs, modes)
        if failure is not None:
            raise failure
        return 0

    return head


def _load(session: Session, terminal: Terminal | None) -> None:
    display = LiveDisplay(terminal, session.ranks) if terminal is not None else None
    try:
        if display:
            display.loading()
        session.load()
    finally:
        if display:
            display.stop()


def _work(task: _Task, modes: Sequence[str], session: Session, own_choice: bool) -> Work:
    """What there is to measure. Of ggpipe's own prompts (`own_choice`) those that do not fit are left out."""
    from ggpipe.runtime.bench import Work, check_room

    prompts: dict[str, tuple[int, ...]] = {}
    for name, text in task.texts.items():
        prompt = session.vocab.tokenize(text)
        try:
            check_room(name, prompt, task.n_predict, session.n_ctx)
            session.check_prompt(prompt)
            prompts[name] = prompt
        except UsageError as e:
            if not own_choice:
                raise
            _say(f"{e}; left out")
    if not prompts:
        raise UsageError(f"no prompt fits into a context of {session.n_ctx} tokens with -n {task.n_predict}: raise -c")
    return Work(
        prompts,
        cast("tuple[BenchMode, ...]", tuple(modes)),
        task.rounds,
        task.n_predict,
        task.sampling,
        task.speculation,
    )


def _open_single(
    modes: tuple[BenchMode, ...],
    task: _Task,
    session: Session,
    terminal: Terminal | None,
    stack: contextlib.ExitStack,
) -> tuple[tuple[BenchMode, ...], Session | None]:
    """The session of mode `single`, loaded; or the modes without it, and a line that says why."""
    from ggpipe.engine.model_file import ModelFile
    from ggpipe.runtime.bench import open_single, why_not_single
    from ggpipe.sim.memory import stage_memory
    from ggpipe.sim.model_shape import shape_of

    if "single" not in modes:
        return modes, None
    context = task.config.context
    shape = shape_of(ModelFile.open(task.config.model.path), context.cache_type_k, context.cache_type_v)
    memory = stage_memory(shape, (0, shape.n_layer), session.n_ctx, context.n_ubatch)
    if why := why_not_single(task.config, session, memory.total):
        _say(f"mode single is left out: {why}")
        modes = tuple(mode for mode in modes if mode != "single")
        if not modes:
            raise UsageError("--modes single leaves nothing to measure")
        return modes, None
    single = stack.enter_context(open_single(task.config))
    _load(single, terminal)
    return modes, single


def _measure(
    session: Session,
    single: Session | None,
    work: Work,
    terminal: Terminal | None,
    csv: Path | None,
    runs: list[Measured],
) -> None:
    """Fills `runs`, and the file."""
    from ggpipe.runtime.bench import Turn, measure, turns

    n_turns = len(turns(list(work.prompts), work.modes, work.rounds))
    progress = BenchProgress(terminal, n_turns)

    def on_turn(turn: Turn) -> None:
        when = f"round {turn.round} of {work.rounds}" if turn.round else "warm-up"
        progress.turn(f"{when}, {turn.prompt}, {turn.mode}")

    if csv is not None:
        begin_bench_csv(csv)
    try:
        for run in measure(session, single, work, on_turn):
            runs.append(run)
            if csv is not None:
                append_bench_csv(csv, run)
    finally:
        progress.stop()
    if runs and len(runs) < n_turns - len(work.modes):
        _say("stopped; this is what was measured until then:")


def _report(
    task: _Task, flags: BenchFlags, terminal: Terminal | None, runs: Sequence[Measured], modes: Sequence[str]
) -> None:
    if not runs:
        raise RunError("stopped before anything was measured")
    print_bench(terminal, open_answer(), runs, modes)
    if flags.json is not None:
        settings = {
            "model": task.config.model.path.name,
            "draft_model": task.config.draft.model.path.name if task.config.draft else None,
            "rounds": task.rounds,
            "n_predict_tokens": task.n_predict,
            "sampling": vars(task.sampling),
        }
        write_bench_json(flags.json, runs, modes, settings)
    if flags.plots is not None:
        write_plots(flags.plots, flags.plot_format, runs, modes)
    if flags.trace is not None:
        write_traces(flags.trace, runs, modes)


def _say(text: str) -> None:
    print(f"ggpipe: {text}", file=sys.stderr)
