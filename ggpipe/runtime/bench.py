"""A bench: the same prompts in several modes, which take turns, so that each round compares them at the same time."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from types import FrameType
from typing import Literal, cast

from ggpipe.config import EngineConfig, Mode, SamplingConfig, SpeculationConfig
from ggpipe.core.events import Finish
from ggpipe.engine import machine
from ggpipe.errors import UsageError
from ggpipe.runtime import startup
from ggpipe.runtime.session import Session
from ggpipe.runtime.stats import Measured, RequestStats
from ggpipe.transport.local import LocalWorld

BenchMode = Literal["iterative", "speculative", "async", "single"]
"""How a text is written: the modes of speculation, or by the whole model in one process."""

_SETTLE_S = 0.1  # the last request's ranks get ready for the next


@dataclass(frozen=True)
class Work:
    """What is measured."""

    prompts: Mapping[str, tuple[int, ...]]
    """By name, in order."""
    modes: tuple[BenchMode, ...]
    rounds: int
    n_predict: int
    sampling: SamplingConfig
    speculation: SpeculationConfig
    """For all modes that guess; its own mode does not count."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One request."""

    mode: BenchMode
    round: int
    """0 warms up, and is not counted."""
    prompt: str


def turns(prompts: Sequence[str], modes: Sequence[BenchMode], rounds: int) -> list[Turn]:
    """Each mode once to warm up; then round by round, and in each prompt by prompt, another mode first every time."""
    order = [Turn(mode, 0, prompts[0]) for mode in modes]
    for i in range(rounds):
        for j, prompt in enumerate(prompts):
            first = (i + j) % len(modes)
            order += [Turn(mode, i + 1, prompt) for mode in (*modes[first:], *modes[:first])]
    return order


def measure(
    session: Session, single: Session | None, work: Work, on_turn: Callable[[Turn], None] = lambda _: None
) -> Iterator[Measured]:
    """Serve all turns; those of mode `single` by a session of its own. Ends early when a session is stopped.

    `on_turn` is called before each. Raises RunError when a rank breaks.
    """
    for turn in turns(list(work.prompts), work.modes, work.rounds):
        own, mode = session, cast(Mode, turn.mode)
        if turn.mode == "single":
            assert single is not None
            own, mode = single, "iterative"
        on_turn(turn)
        session.idle(_SETTLE_S)
        stats = RequestStats()
        speculation = replace(work.speculation, mode=mode)
        tokens = own.generate(work.prompts[turn.prompt], work.sampling, work.n_predict, stats, speculation)
        ids = tuple(token.id for token in tokens if token.id >= 0)
        if stats.finish == Finish.STOPPED.value:
            return
        if turn.round > 0:
            yield Measured(turn.mode, turn.round, turn.prompt, ids, stats, own.ranks)


def check_room(name: str, prompt: tuple[int, ...], n_predict: int, n_ctx: int) -> None:
    """All modes must write texts of the same length. Raises UsageError when the context is too small for that."""
    if len(prompt) + n_predict > n_ctx:
        raise UsageError(
            f"{name} has {len(prompt)} tokens, -n is {n_predict}, and the context has room for {n_ctx}: "
            f"raise -c to {len(prompt) + n_predict}"
        )


# One process alone


def single_config(config: EngineConfig) -> EngineConfig:
    """For the whole target in the head's process."""
    return replace(
        config, draft=None, context=replace(config.context, n_seq=1), pipeline=replace(config.pipeline, shares=None)
    )


def why_not_single(config: EngineConfig, session: Session, needed_bytes: float) -> str | None:
    """Why the whole target is not run in the head's process as well: it would be no different, or memory is short.

    `session`: the one with all ranks, loaded. `needed_bytes`: what the whole target takes.
    """
    target = [rank for rank in session.ranks if not rank.draft]
    if len(target) == 1 and target[0].threads == startup.threads_of(config, LocalWorld(1).transports[0], False):
        return "one rank holds the whole model anyway"
    free_bytes = machine.available_bytes()
    if needed_bytes > free_bytes:
        return (
            f"the whole model takes {needed_bytes / 1e9:.1f} GB, and the first rank has {free_bytes / 1e9:.1f} GB left"
        )
    return None


@contextlib.contextmanager
def open_single(config: EngineConfig) -> Iterator[Session]:
    """A session of one rank in this process, not loaded yet. What stops or ends the process's own stops it as well."""
    with Session(LocalWorld(1).transports[0], single_config(config)) as session:

        def stop() -> None:
            session.stop()

        with _also({signal.SIGINT: stop, signal.SIGUSR1: stop, signal.SIGTERM: session.terminate}):
            yield session


@contextlib.contextmanager
def _also(actions: Mapping[signal.Signals, Callable[[], None]]) -> Iterator[None]:
    """Do these at signals, after what is done at them so far. Only from the main thread."""
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
