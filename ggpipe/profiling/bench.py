"""Benchmarks: the same prompts in several modes and layouts, which take turns so that each round compares them at the
same time."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal, cast, get_args

from ggpipe.channel.client import EngineClient
from ggpipe.cluster.memory import stage_memory
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import TARGET
from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.core.layout import lay_out
from ggpipe.core.request import Finish
from ggpipe.core.request_spec import RequestSpec
from ggpipe.engine import wiring
from ggpipe.engine.head import Head
from ggpipe.engine.process import tune
from ggpipe.errors import Setting, UsageError, Wording
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import context_of_group
from ggpipe.llama.model_shape import shape_of
from ggpipe.stats.records import RequestStats
from ggpipe.stats.summary import BenchRun, case_name
from ggpipe.transport.local import LocalWorld

BenchMode = Literal["iterative", "speculative", "async", "single"]
"""How an output is generated: in one of the engine's modes, or by the whole model in one process."""
MODES: tuple[BenchMode, ...] = get_args(BenchMode)
SPECULATIVE_MODES: tuple[BenchMode, ...] = ("speculative", "async")

_SETTLE_S = 0.1  # for ranks to become idle between requests


@dataclass(frozen=True, kw_only=True)
class BenchSpec:
    """What the user wants to measure."""

    config: EngineConfig
    """The settings; if layouts are compared, those of the first one."""
    layouts: tuple[str, ...] = ("",)
    """The layer splits to compare; a single empty name if there is only one."""
    texts: Mapping[str, str]
    """Prompts by name."""
    may_skip_texts: bool
    """Skip prompts that do not fit, instead of raising an error."""
    modes: tuple[BenchMode, ...] | None
    """None: all possible modes, or the fastest possible mode if layouts are compared."""
    rounds: int
    n_predict: int
    sampling: SamplingConfig
    speculation: SpeculationConfig


@dataclass(frozen=True, kw_only=True)
class BenchWork:
    """What is measured."""

    prompts: Mapping[str, tuple[int, ...]]
    """Tokens of each prompt by name, in the order in which prompts take turns."""
    modes: tuple[BenchMode, ...]
    layouts: tuple[str, ...] = ("",)
    rounds: int
    n_predict: int
    sampling: SamplingConfig
    speculation: SpeculationConfig
    """The settings of both speculative modes; its `mode` is not used."""

    @property
    def cases(self) -> list[str]:
        """Names of the cases that are compared, in order."""
        return [case_name(layout, mode) for layout, mode in _cases(self.modes, self.layouts)]


@dataclass(frozen=True, slots=True)
class BenchTurn:
    """One request of a benchmark."""

    mode: BenchMode
    round: int
    """Number of the round; round 0 warms up and is not counted."""
    prompt: str
    layout: str = ""

    @property
    def case(self) -> str:
        """See `case_name`."""
        return case_name(self.layout, self.mode)


def work_of(spec: BenchSpec, engine: EngineClient, say: Callable[[str | Wording], None]) -> BenchWork:
    """The part of `spec` that is possible with a loaded engine. `say` gets a line about everything that is skipped.

    Raises UsageError if no prompt or no mode remains.
    """
    prompts: dict[str, tuple[int, ...]] = {}
    for name, text in spec.texts.items():
        prompt = engine.tokenize(text)
        try:
            check_room(name, prompt, spec.n_predict, engine.n_ctx)
            engine.check_prompt(prompt)
            prompts[name] = prompt
        except UsageError as e:
            if not spec.may_skip_texts:
                raise
            say(Wording(e, "; left out"))
    if not prompts:
        raise UsageError(
            f"no prompt fits into a context of {engine.n_ctx} tokens with ",
            Setting("n_predict"),
            f" {spec.n_predict}: raise ",
            Setting("n_ctx"),
        )
    modes = spec.modes or tuple(mode for mode in MODES if mode not in SPECULATIVE_MODES or spec.config.drafts)
    if not engine.can_speculate:
        modes = tuple(mode for mode in modes if mode not in SPECULATIVE_MODES)
    if len(spec.layouts) > 1 and spec.modes is None:
        modes = ("async",) if "async" in modes else ("iterative",)
    if "single" in modes and (why := why_not_single(spec.config, engine)):
        say(f"mode single is left out: {why}")
        modes = tuple(mode for mode in modes if mode != "single")
    if not modes:
        raise UsageError(f"there is nothing to measure: mode {', '.join(spec.modes or ())} is left out")
    return BenchWork(
        prompts=prompts,
        modes=modes,
        layouts=spec.layouts,
        rounds=spec.rounds,
        n_predict=spec.n_predict,
        sampling=spec.sampling,
        speculation=spec.speculation,
    )


def turns(
    prompts: Sequence[str], modes: Sequence[BenchMode], rounds: int, layouts: Sequence[str] = ("",)
) -> list[BenchTurn]:
    """All requests in order: each case once to warm up, then all cases for each prompt in each round, starting with
    another case each time."""
    cases = _cases(modes, layouts)
    order = [BenchTurn(mode, 0, prompts[0], layout) for layout, mode in cases]
    for i in range(rounds):
        for j, prompt in enumerate(prompts):
            first = (i + j) % len(cases)
            order += [BenchTurn(mode, i + 1, prompt, layout) for layout, mode in (*cases[first:], *cases[:first])]
    return order


def _cases(modes: Sequence[BenchMode], layouts: Sequence[str]) -> list[tuple[str, BenchMode]]:
    return [(layout, mode) for mode in modes for layout in layouts]


def measure(
    engines: Mapping[str, EngineClient],
    single: EngineClient | None,
    work: BenchWork,
    on_turn: Callable[[BenchTurn], None] = lambda _: None,
) -> Iterator[BenchRun]:
    """Serve all turns with the engines of their layouts, or with `single` in mode `single`. Ends early if an engine is
    stopped.

    `on_turn` is called before each turn. Raises RunError if a rank fails.
    """
    for turn in turns(list(work.prompts), work.modes, work.rounds, work.layouts):
        engine, mode = engines[turn.layout], cast(Mode, turn.mode)
        own = engine
        if turn.mode == "single":
            assert single is not None
            own, mode = single, "iterative"
        on_turn(turn)
        engine.idle(_SETTLE_S)
        stats = RequestStats()
        request = RequestSpec(
            prompt=work.prompts[turn.prompt],
            sampling=work.sampling,
            n_predict=work.n_predict,
            speculation=replace(work.speculation, mode=mode),
        )
        ids = tuple(token.id for token in own.stream(request, stats))
        if stats.finish is Finish.STOPPED:
            return
        if turn.round > 0:
            yield BenchRun(
                mode=turn.mode,
                layout=turn.layout,
                round=turn.round,
                prompt=turn.prompt,
                tokens=ids,
                stats=stats,
                ranks=own.ranks,
            )


def check_layout(config: EngineConfig) -> None:
    """Check a layout against the models, as far as this machine has their files, before any rank is started.

    Raises the UsageError that its ranks would raise.
    """
    pipeline = config.pipeline
    if pipeline.auto or pipeline.n_ranks is None:
        return
    config.check_ranks(pipeline.n_ranks + config.n_draft_ranks)
    parts = [(config.model.path, config.context, pipeline.layer_split)]
    parts += [(draft.model.path, draft.context, draft.layer_split) for draft in config.drafts]
    for path, context, split in parts:
        if path.exists() and split is not None:
            file = ModelFile.open(path)
            if lay_out(file.n_layer, split.n_ranks, split).group_sizes:
                context_of_group(file, context)


def check_room(name: str, prompt: tuple[int, ...], n_predict: int, n_ctx: int) -> None:
    """Raises UsageError if a prompt and `n_predict` tokens do not fit into the context. All modes must generate outputs
    of the same length."""
    if len(prompt) + n_predict > n_ctx:
        raise UsageError(
            f"{name} has {len(prompt)} tokens, ",
            Setting("n_predict"),
            f" is {n_predict}, and the context has room for {n_ctx}: raise ",
            Setting("n_ctx"),
            f" to {len(prompt) + n_predict}",
        )


# The whole model in one process


def single_config(config: EngineConfig) -> EngineConfig:
    """The settings for the whole target in the front end's process."""
    pipeline = replace(config.pipeline, layer_split=None, tensor_split=())
    return replace(config, drafts=(), context=replace(config.context, n_seq=1), pipeline=pipeline)


def why_not_single(config: EngineConfig, engine: EngineClient, free_bytes: int | None = None) -> str | None:
    """Why the whole target is not also run in this process: it would be the same, or there is not enough memory. None:
    it is run.

    `engine`: the loaded engine with all ranks. `free_bytes`: available memory; None: the machine's.
    """
    target = [rank for rank in engine.ranks if not rank.draft]
    if len(target) == 1 and target[0].threads == wiring.threads_of(config, LocalWorld(1).transports[0], TARGET):
        return "one rank already holds the whole model"
    context = config.context
    shape = shape_of(ModelFile.open(config.model.path), context.cache_type_k, context.cache_type_v)
    needed_bytes = stage_memory(shape, (0, shape.n_layer), engine.n_ctx, context.n_ubatch).total
    free_bytes = machine.available_bytes() if free_bytes is None else free_bytes
    if needed_bytes > free_bytes:
        return f"the whole model takes {needed_bytes / 1e9:.1f} GB, and this machine has {free_bytes / 1e9:.1f} GB left"
    return None


@contextlib.contextmanager
def open_single(config: EngineConfig) -> Iterator[Head]:
    """One rank in this process, with nothing loaded yet. Signals that stop the front end's ranks stop it as well."""
    tune()
    with (
        Head(LocalWorld(1).transports[0], single_config(config)) as head,
        _also({signal.SIGINT: head.stop, signal.SIGTERM: head.terminate}),
    ):
        yield head


@contextlib.contextmanager
def _also(actions: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Call these functions at signals, before the current handlers. Used by the main thread only."""
    before = {number: signal.getsignal(number) for number in actions}

    def on_signal(number: int, frame: FrameType | None) -> None:
        actions[signal.Signals(number)]()
        handler = before[signal.Signals(number)]
        if callable(handler):
            handler(number, frame)

    for number in actions:
        signal.signal(number, on_signal)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
