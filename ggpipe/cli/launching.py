"""A command's ranks: start them when nobody did, and run one."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ggpipe.channel.client import StartedRanks
from ggpipe.channel.messages import Profiled
from ggpipe.channel.started import UserContact, started, supervised
from ggpipe.channel.supervisor import Supervisor
from ggpipe.cli import INTERRUPTED
from ggpipe.cli.messages import report, show, warn
from ggpipe.cluster.model_file import check_model_file
from ggpipe.cluster.profile import Profile
from ggpipe.config.engine import EngineConfig
from ggpipe.engine.signals import Signals, leave
from ggpipe.errors import GgpipeError, UsageError
from ggpipe.launch import environment
from ggpipe.launch.job import Job
from ggpipe.launch.slurm import allocated_hosts
from ggpipe.options.option import Options
from ggpipe.options.settings import LogSettings, RankSettings
from ggpipe.planning.n_ranks import ranks_to_start

if TYPE_CHECKING:
    from ggpipe.engine.head import Head
    from ggpipe.engine.process import Attend, Report, Say, Settle
    from ggpipe.transport.base import Transport

USER = UserContact(show=show, report=report, leave=leave)

NO_RESTART = "`restart` does nothing here: ggpipe starts only ranks again that it has started itself, with `shares`"

FrontEndMain = Callable[[StartedRanks], int]
"""What a command does with its ranks; returns the exit code."""


def run_command(
    config: EngineConfig,
    options: Options,
    front_end: FrontEndMain,
    prepare: Callable[[], object] = lambda: None,
    ctrl_c_ends: bool = True,
) -> int:
    """Run a command on the ranks that the config names, and return the exit code.

    They are started where nobody did, and started again as often as the options allow. `front_end` runs in this
    process, if this is the one that the user has started, or the first rank under the user's own mpirun. `prepare` is
    called before ranks are started, for mistakes that only the front end can find. `ctrl_c_ends`: what the front end
    ends early after Ctrl-C has the exit code for that. Raises UsageError for a hostfile
    without shares, LaunchError when there is no mpirun or no such hostfile, and what `check_model_files` raises.
    """
    if not environment.is_rank() and not environment.is_served():
        prepare()
        n_ranks = ranks_to_start(config, options[RankSettings].hostfile)
        if n_ranks is not None:
            check_model_files(config, options[RankSettings].hostfile)
            job, n_restarts = (
                Job(options.arguments({}), n_ranks, options[RankSettings].hostfile),
                options[RankSettings].restart,
            )
            with _signals() as signals:

                def follow(own: Supervisor) -> None:
                    signals.follow(own.stop, own.fail, lambda: own.stopping)

                with supervised(job, config, n_restarts, options.arguments, USER, follow) as ranks:
                    return _exit_code(front_end(ranks), signals, ctrl_c_ends)
    if options[RankSettings].restart and options.is_given("restart") and environment.has_user():
        warn(NO_RESTART)

    def head(ranks: Head) -> int:
        from ggpipe.engine.session import LocalRanks

        return front_end(LocalRanks(ranks))

    return run_this_rank(config, head, options[LogSettings].verbose, ctrl_c_ends=ctrl_c_ends)


def check_model_files(config: EngineConfig, hostfile: Path | None) -> None:
    """Check that the model files can be opened, where all ranks are on this machine. Raises ModelError."""
    if hostfile is not None or allocated_hosts():
        return
    for model in (config.model, *(draft.model for draft in config.drafts)):
        check_model_file(model.path)


def run_side_by_side(
    layouts: Sequence[tuple[EngineConfig, Options, Sequence[str]]],
    front_end: Callable[[Iterator[StartedRanks]], int],
) -> int:
    """Run a command on the ranks of several layouts, and return the exit code.

    `layouts`: the config, options and arguments of ggpipe for the ranks of each. `front_end` gets the ranks of each
    in turn; they are started when it asks for them. All end with it. Raises as `run_command` does, and UsageError
    where the user has started ranks.
    """
    if environment.is_rank():
        raise UsageError("`layouts` names several, of which ggpipe starts the ranks itself: leave out mpirun or srun")
    n_ranks = [ranks_to_start(config, options[RankSettings].hostfile) or 1 for config, options, _ in layouts]
    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(_signals())
        supervisors: list[Supervisor] = []

        def stop() -> None:
            for supervisor in supervisors:
                supervisor.stop()

        def fail(error: Callable[[], GgpipeError]) -> None:
            for supervisor in supervisors:
                supervisor.fail(error)

        def follow(supervisor: Supervisor) -> None:
            supervisors.append(supervisor)
            signals.follow(stop, fail, lambda: any(supervisor.stopping for supervisor in supervisors))

        def started() -> Iterator[StartedRanks]:
            for (config, options, arguments), n in zip(layouts, n_ranks, strict=True):
                job, n_restarts = Job(arguments, n, options[RankSettings].hostfile), options[RankSettings].restart
                again = options.arguments
                yield stack.enter_context(supervised(job, config, n_restarts, again, USER, follow))

        return _exit_code(front_end(started()), signals)


def run_profile(
    config: EngineConfig,
    n_ranks: int,
    hostfile: Path | None,
    verbose: bool,
    measure: Callable[[Transport, Attend, Say], Profile | None],
) -> Profile | None:
    """Have `n_ranks` ranks measure themselves; where they were started already, be one of them.

    Returns the profile in the process that is the front end, else None. When it returns there, no rank is left.
    """
    if not environment.is_rank() and (n_ranks > 1 or hostfile is not None):
        job = Job(sys.argv[1:], n_ranks, hostfile)
        with _signals() as signals, started(job, config.pipeline.rank_timeout_s, signals.attend, USER) as ranks:
            signals.follow(ranks.stop, ranks.fail, lambda: ranks.stopping)
            return ranks.profile()
    from ggpipe.engine.process import run_alike
    from ggpipe.llama import libllama  # the process that starts the ranks does not need it

    def result(profile: Profile | None) -> Profiled:
        assert profile is not None  # this is the head
        return Profiled(profile)

    libllama.set_log_level(2 if verbose else 5)
    profile = run_alike(config, measure, report, show, result)
    return profile if environment.has_user() else None


def _exit_code(code: int, signals: Signals, ctrl_c_ends: bool = True) -> int:
    """A front end's, unless Ctrl-C ended early what would have ended well."""
    return INTERRUPTED if code == 0 and ctrl_c_ends and signals.is_interrupted else code


@contextlib.contextmanager
def _signals() -> Iterator[Signals]:
    """This process looks after Ctrl-C and SIGTERM."""
    signals = Signals(0)
    signals.connected(None)
    try:
        yield signals
    finally:
        signals.leave()  # a third Ctrl-C changes nothing
        signals.restore()


def run_this_rank(
    config: EngineConfig,
    head: Callable[[Head], int],
    verbose: bool,
    report: Report = report,
    signals: Signals | None = None,
    ctrl_c_ends: bool = True,
) -> int:
    """Be one of the ranks; `head` is what the first one does, and gives the exit code. `signals`: those of a server.
    `ctrl_c_ends`: as for `run_command`, for a rank that no launcher started, which would take the code for a crash."""
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
    return _exit_code(run_rank(config, head, settle, report, show, signals), signals, ctrl_c_ends)
