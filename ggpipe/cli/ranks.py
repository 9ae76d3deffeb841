"""Runs this process as a rank, or lets ranks measure. Ranks import nothing of the options."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from ggpipe.channel.messages import Profiled
from ggpipe.channel.started import UserContact, started
from ggpipe.cli import INTERRUPTED
from ggpipe.cli.messages import report, show
from ggpipe.cluster.profile import Profile
from ggpipe.config.engine import EngineConfig
from ggpipe.engine.signals import Signals, leave
from ggpipe.errors import Wording
from ggpipe.launch import environment
from ggpipe.launch.job import Job
from ggpipe.launch.rank_setup import RankSetup

if TYPE_CHECKING:
    from ggpipe.engine.head import Head
    from ggpipe.engine.process import Attend, Report, Say, Settle
    from ggpipe.transport.base import Transport

USER = UserContact(show=show, report=report, leave=leave)


def run_profile(
    settings: RankSetup,
    n_ranks: int,
    hostfile: Path | None,
    check: Callable[[int], None] = lambda _: None,
    on_line: Callable[[], None] = lambda: None,
) -> Profile | None:
    """Let `n_ranks` ranks measure what `settings.profile` says or, if they were already started, be one of them.

    `check` gets the number of ranks before they measure. `on_line` is called in the front end before it shows a line.
    Both may raise.

    Returns the profile in the front end, and None in other processes. When it returns, the ranks have exited.
    """
    config, work = settings.config, settings.profile
    assert work is not None
    if not environment.is_rank() and (n_ranks > 1 or hostfile is not None):
        check(n_ranks)
        job = Job(settings, n_ranks, hostfile)
        with handled_signals() as signals, started(job, config.pipeline.rank_timeout_s, signals.attend, USER) as ranks:
            signals.follow(ranks.stop, ranks.fail, lambda: ranks.stopping)
            return ranks.profile()
    from ggpipe.engine.process import run_alike  # the process that starts the ranks does not need these
    from ggpipe.llama import libllama
    from ggpipe.profiling.profile import profile_ranks

    def result(profile: Profile | None) -> Profiled:
        assert profile is not None  # this is the head
        return Profiled(profile)

    def measure(transport: Transport, attend: Attend, say: Say) -> Profile | None:
        check(transport.size)

        def announce(line: str | Wording) -> None:
            if environment.has_user():
                on_line()
            say(line)

        return profile_ranks(transport, config, work.layers, work.seconds, attend, announce)

    libllama.set_log_level(2 if settings.verbose else 5)
    profile = run_alike(config, measure, report, show, result)
    return profile if environment.has_user() else None


def exit_code(code: int, signals: Signals, ctrl_c_ends: bool = True) -> int:
    """The front end's exit code, unless Ctrl-C has stopped it early."""
    return INTERRUPTED if code == 0 and ctrl_c_ends and signals.is_interrupted else code


@contextlib.contextmanager
def handled_signals() -> Iterator[Signals]:
    """Handle Ctrl-C and SIGTERM in this process."""
    signals = Signals(0)
    signals.connected(None)
    try:
        yield signals
    finally:
        signals.leave()  # ignore a third Ctrl-C
        signals.restore()


def run_this_rank(
    config: EngineConfig,
    head: Callable[[Head], int],
    verbose: bool,
    report: Report = report,
    signals: Signals | None = None,
    ctrl_c_ends: bool = True,
) -> int:
    """Be one of the ranks, and return the exit code. `head`: what the first rank does. `signals`: those of a server.
    `ctrl_c_ends`: see `run_command`; ignored under a launcher, which would mistake that exit code for a crash."""
    from ggpipe.engine.process import run_rank
    from ggpipe.llama import libllama  # the process that starts the ranks does not need it

    libllama.set_log_level(2 if verbose else 5)
    settle: Settle | None = None
    if config.pipeline.auto:
        from ggpipe.planning import auto

        settle = auto.settle
    if signals is not None or environment.is_rank() or environment.is_served():
        return run_rank(config, head, settle, report, show, signals)
    signals = Signals(0)
    return exit_code(run_rank(config, head, settle, report, show, signals), signals, ctrl_c_ends)
