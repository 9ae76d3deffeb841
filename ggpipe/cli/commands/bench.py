"""`ggpipe bench`: compares modes, a single process, and layouts."""

from __future__ import annotations

import contextlib
import functools
import itertools
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

from ggpipe.channel.client import EngineClient, StartedRanks
from ggpipe.cli.launching import check_model_files, run_command, run_side_by_side
from ggpipe.cli.messages import print_past_mpirun, show, warn
from ggpipe.cli.receipts import Surroundings, check_receipt, measure_surroundings, write_receipt
from ggpipe.display.figures.canvas import check_plottable
from ggpipe.display.files import check_writable, make_folder
from ggpipe.display.live.live import LiveDisplay
from ggpipe.display.live.terminal import Terminal, open_terminal
from ggpipe.display.progress import CountProgress
from ggpipe.display.stdout import Stdout
from ggpipe.display.tables.bench import (
    append_bench_csv,
    begin_bench_csv,
    print_bench,
    write_bench_json,
    write_plots,
    write_traces,
)
from ggpipe.engine.session import LocalRanks
from ggpipe.errors import GgpipeError, Interrupted, RunError, Setting, SettingError, UsageError, Wording
from ggpipe.llama import libllama
from ggpipe.options import lists
from ggpipe.options.engine_config import (
    check_draft,
    engine_config,
    speculation_config,
    warnings_of,
)
from ggpipe.options.option import Options
from ggpipe.options.sampling import SamplingOf, sampling_config
from ggpipe.options.settings import (
    BenchSettings,
    DisplaySettings,
    LogSettings,
    PromptSettings,
    RankSettings,
)
from ggpipe.profiling.bench import (
    SPECULATIVE_MODES,
    BenchMode,
    BenchSpec,
    BenchTurn,
    BenchWork,
    check_layout,
    measure,
    open_single,
    turns,
    work_of,
)
from ggpipe.stats.summary import BenchRun


def run(options: Options) -> int:
    """Start the ranks, or be one of them. Returns the exit code."""
    prompt, settings = options[PromptSettings], options[BenchSettings]
    splits = {text: replace(options[RankSettings], layer_split=lists.layer_split(text)) for text in settings.layouts}
    layouts = {text: options.having(split) for text, split in splits.items()} or {"": options}
    configs = {text: engine_config(own) for text, own in layouts.items()}
    config = next(iter(configs.values()))
    for mode in settings.modes:
        if mode in SPECULATIVE_MODES:
            check_draft(options, Wording(Setting("modes"), f" {mode}"))
    if prompt.n_predict < 2:
        raise SettingError("n_predict", f"must be 2 or more, got {prompt.n_predict}")
    if settings.plots is not None:
        check_plottable(Path(f"speed.{settings.plot_format}"))
    check_receipt(settings)
    texts = functools.cache(lambda: _texts(settings.files, prompt))
    log_level = 2 if options[LogSettings].verbose else 5

    def front_end(ranks: Iterable[StartedRanks]) -> int:
        spec = BenchSpec(
            config=config,
            layouts=tuple(layouts) if len(layouts) > 1 else ("",),
            texts=texts(),
            may_skip_texts=not settings.files,
            modes=cast("tuple[BenchMode, ...]", settings.modes) or None,
            rounds=settings.rounds,
            n_predict=prompt.n_predict,
            sampling=replace(sampling_config(options), ignore_eos=settings.full_length),
            speculation=speculation_config(options),
        )
        libllama.set_log_level(log_level)  # for a model in this process
        return _bench(ranks, spec, options, functools.partial(sampling_config, options), surroundings)

    surroundings: Surroundings | None = None
    if len(layouts) == 1:
        only = next(iter(layouts.values()))
        if settings.receipt is not None:
            texts()
            check_layout(config)
            check_model_files(config, only[RankSettings].hostfile)
            surroundings = measure_surroundings(config, only)
        return run_command(config, only, lambda ranks: front_end((ranks,)), prepare=texts)
    texts()
    for text, own in configs.items():
        try:
            check_layout(own)
        except UsageError as e:
            raise UsageError(f"layout {text}: ", e) from None
    return run_side_by_side(list(zip(configs.values(), layouts.values(), strict=True)), front_end)


def _texts(files: Sequence[Path], prompt: PromptSettings) -> dict[str, str]:
    if not files:
        package = Path(__file__).parents[2]
        folders = (package / "prompts", package.parent / "prompts")  # of an installed package, or of a checkout
        found = next((paths for folder in folders if (paths := list(folder.glob("*.txt")))), [])
        files = sorted(found, key=lambda path: path.stat().st_size)
        if not files:
            raise UsageError("this installation has no bundled prompts: name files with ", Setting("files"))
    names = [path.stem for path in files]
    unique = [path.stem if names.count(path.stem) == 1 else str(path) for path in files]
    return {name: replace(prompt, file=path).read() for name, path in zip(unique, files, strict=True)}


def _bench(
    ranks: Iterable[StartedRanks],
    spec: BenchSpec,
    options: Options,
    sampling: SamplingOf,
    surroundings: Surroundings | None,
) -> int:
    settings = options[BenchSettings]
    check_writable(settings.csv, settings.json)
    for folder in (settings.plots, settings.trace):
        if folder is not None:
            make_folder(folder)
    terminal = open_terminal(options[DisplaySettings].color)
    runs: list[BenchRun] = []
    failure: GgpipeError | None = None
    with contextlib.ExitStack() as stack:
        for warning in warnings_of(options):
            warn(warning)
        engines = {}
        all_ranks = []
        for layout, own in zip(spec.layouts, ranks, strict=True):
            all_ranks.append(own)
            engines[layout] = _load(own, terminal)
            for warning in engines[layout].warnings:
                warn(Wording(f"{layout}: ", warning) if layout else warning)
        first = engines[spec.layouts[0]]
        spec = replace(spec, sampling=replace(sampling(first.sampling), ignore_eos=settings.full_length))
        work = work_of(spec, first, show)
        single = None
        if "single" in work.modes:
            single = _load(LocalRanks(stack.enter_context(open_single(spec.config))), terminal)
        try:
            _measure(engines, single, work, terminal, settings.csv, runs)
        except GgpipeError as e:
            if not runs:
                raise
            failure = e  # show what was measured
            print_past_mpirun(e)
        if failure is None and (settings.trace is not None or settings.plots is not None):
            for engine in engines.values():
                engine.align_clocks()
    if not runs:
        raise Interrupted("stopped before the first result")
    try:
        stdout = Stdout(sys.stdout)
        print_bench(terminal, lambda text: stdout.write(text, all_ranks[0].is_ending), runs, work.cases)
    except RunError as e:
        failure = failure or e
    _write_files(spec, settings, runs, work.cases)
    if settings.receipt is not None and surroundings is not None:
        write_receipt(settings.receipt, surroundings, spec.config, work, first, runs, terminal)
    if failure is not None:
        raise failure
    return 0


def _load(ranks: StartedRanks, terminal: Terminal | None) -> EngineClient:
    with LiveDisplay(terminal, ranks.ranks) as display:
        display.loading()
        return ranks.load()


def _measure(
    engines: Mapping[str, EngineClient],
    single: EngineClient | None,
    work: BenchWork,
    terminal: Terminal | None,
    csv: Path | None,
    runs: list[BenchRun],
) -> None:
    """Measure, adding to `runs` and to the CSV file."""
    n_turns = len(turns(list(work.prompts), work.modes, work.rounds, work.layouts))
    if csv is not None:
        begin_bench_csv(csv, len(engines) > 1)
    n_done = itertools.count()
    with CountProgress(terminal, n_turns, refreshes=False) as progress:  # drawing would slow down what is measured

        def on_turn(turn: BenchTurn) -> None:
            when = f"round {turn.round} of {work.rounds}" if turn.round else "warm-up"
            progress.show(next(n_done), f"{when}, {turn.prompt}, {turn.case}")

        for run in measure(engines, single, work, on_turn):
            runs.append(run)
            if csv is not None:
                append_bench_csv(csv, run)
    if runs and len(runs) < n_turns - len(work.cases):
        show("stopped. Results so far:")


def _write_files(spec: BenchSpec, settings: BenchSettings, runs: Sequence[BenchRun], cases: Sequence[str]) -> None:
    if settings.json is not None:
        facts = {
            "model": spec.config.model.path.name,
            "draft_model": ", ".join(draft.model.path.name for draft in spec.config.drafts) or None,
            **({"layouts": spec.layouts} if len(spec.layouts) > 1 else {}),
            "rounds": spec.rounds,
            "n_predict_tokens": spec.n_predict,
            "sampling": vars(spec.sampling),
        }
        write_bench_json(settings.json, runs, cases, facts)
    if settings.plots is not None:
        write_plots(settings.plots, settings.plot_format, runs, cases)
    if settings.trace is not None:
        write_traces(settings.trace, runs, cases)
