"""A command's ranks: start them when nobody did, and run one."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from ggpipe.cli.messages import report, show, warn
from ggpipe.cluster.profile import Profile
from ggpipe.config import EngineConfig
from ggpipe.errors import GgpipeError, RankError, StartError, Terminated, UsageError
from ggpipe.launch import environment
from ggpipe.launch.hostfile import hosts_of
from ggpipe.launch.job import Job, jobs_again
from ggpipe.launch.mpirun import RankProcesses
from ggpipe.metrics.stats import RankStats
from ggpipe.options.option import Options
from ggpipe.options.settings import Log, Ranks
from ggpipe.runtime.channel.client import StartedRanks
from ggpipe.runtime.channel.link import Link, Listener
from ggpipe.runtime.channel.messages import FromHead, Profiled
from ggpipe.runtime.channel.remote import RemoteRanks
from ggpipe.runtime.channel.supervisor import Supervisor, Way
from ggpipe.runtime.signals import Signals

if TYPE_CHECKING:
    from ggpipe.runtime.head import Head
    from ggpipe.runtime.process import Attend, Say
    from ggpipe.transport.base import Transport

_TICK_S = 0.1
_LAST_LOOKS = 5  # for a rank that has reported and ended
_LEAVE_S = 1.0  # where a rank is lost
_STARTS_WITHIN, _STARTS_WITHIN_S = 4, 60.0  # timeouts of a rank, and at least so long: then it is started once more

FrontEnd = Callable[[StartedRanks], int]
"""What a command does with its ranks; returns the exit code."""


def run_command(
    config: EngineConfig, options: Options, front_end: FrontEnd, prepare: Callable[[], object] = lambda: None
) -> int:
    """Run a command on the ranks that the config names, and return the exit code.

    They are started where nobody did, and started again as often as the options allow. `front_end` runs in this
    process, if this is the one that the user has started, or the first rank under the user's own mpirun. `prepare` is
    called before ranks are started, for mistakes that only the front end can find. Raises UsageError for a hostfile
    without shares, LaunchError when there is no mpirun or no such hostfile.
    """
    if not environment.is_rank():
        prepare()
        n_ranks = _ranks_to_start(config, options[Ranks].hostfile)
        if n_ranks is not None:
            with _signals() as signals:

                def follow(supervisor: Supervisor) -> None:
                    signals.follow(supervisor.stop, supervisor.fail)

                with _supervised(sys.argv[1:], n_ranks, config, options, follow) as ranks:
                    return front_end(ranks)
    if options[Ranks].restart and environment.has_user():
        warn("`restart` does nothing here: ggpipe starts only ranks again that it has started itself, with `shares`")
    return _run_this_rank(config, front_end, options[Log].verbose)


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
    n_ranks = [_ranks_to_start(config, options[Ranks].hostfile) or 1 for config, options, _ in layouts]
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
            signals.follow(stop, fail)

        def started() -> Iterator[StartedRanks]:
            for (config, options, arguments), n in zip(layouts, n_ranks, strict=True):
                yield stack.enter_context(_supervised(arguments, n, config, options, follow))

        return front_end(started())


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
        with _signals() as signals, _started(job, config.pipeline.rank_timeout_s, signals.attend) as ranks:
            signals.follow(ranks.stop, ranks.fail)
            return ranks.profile()
    from ggpipe.llama import libllama  # the process that starts the ranks does not need it
    from ggpipe.runtime.process import run_alike

    def result(profile: Profile | None) -> Profiled:
        assert profile is not None  # this is the head
        return Profiled(profile)

    libllama.set_log_level(2 if verbose else 5)
    profile = run_alike(config, measure, report, show, result)
    return profile if environment.has_user() else None


# Starting ranks


@contextlib.contextmanager
def _supervised(
    arguments: Sequence[str],
    n_ranks: int,
    config: EngineConfig,
    options: Options,
    follow: Callable[[Supervisor], None],
) -> Iterator[Supervisor]:
    """A command line as ranks, again and again where they die. They leave when the context is left, and errors are
    reported before.

    `follow` is called before they start: from then on the supervisor is to learn of signals. Only for a process that
    is no rank itself (`environment.is_rank`). Raises LaunchError, and what ranks cannot start for.
    """
    hostfile, n_restarts = options[Ranks].hostfile, options[Ranks].restart
    timeout_s = config.pipeline.rank_timeout_s
    first = Job(arguments, n_ranks, hostfile)

    def way(job: Job, is_first: bool = False) -> Way:
        limit_s = math.inf if is_first or not timeout_s else max(_STARTS_WITHIN * timeout_s, _STARTS_WITHIN_S)

        def on_error(error: GgpipeError) -> None:
            if not n_restarts:  # else it may be a reason to try again
                report(error)

        def start(own: Supervisor) -> contextlib.AbstractContextManager[RemoteRanks]:
            return _started(job, timeout_s, own.attend, limit_s, on_error, own.ranks)

        return Way(start, job.line)

    def again(attend: Callable[[], None]) -> list[Way]:
        jobs = [first] if hostfile is None else jobs_again(first, hostfile, config, options.arguments, attend)
        return [way(job) for job in jobs]

    with Supervisor(again, n_restarts, show) as supervisor:
        follow(supervisor)
        supervisor.start(way(first, is_first=True))
        yield supervisor


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


@contextlib.contextmanager
def _started(
    job: Job,
    rank_timeout_s: float,
    attend: Callable[[], None],
    limit_s: float = math.inf,
    on_start_error: Callable[[GgpipeError], None] = report,
    all_ranks: list[RankStats] | None = None,
) -> Iterator[RemoteRanks]:
    """A job's ranks, which are connected within `limit_s` seconds. They leave when the context is left.

    `attend` is called while they start, and may raise. `all_ranks`: as for RemoteRanks. Raises StartError, and what the
    ranks cannot start for.
    """
    with job.hosts_in_file() as hostfile:
        first_host = hosts_of(hostfile)[0] if hostfile is not None else None
        with Listener(first_host, show) as listener:
            processes = RankProcesses(job.arguments, job.n_ranks, hostfile, listener.environment)
            with _at_once(processes, on_start_error):  # the ranks wait for each other
                link = _accepted(listener, processes, attend, limit_s)
                more_links = functools.partial(listener.accept, 0)
                ranks = RemoteRanks(link, show, processes.cause, more_links, rank_timeout_s, all_ranks)
            with _ended(processes, rank_timeout_s or None), contextlib.closing(ranks):
                yield ranks


@contextlib.contextmanager
def _at_once(processes: RankProcesses, on_error: Callable[[GgpipeError], None]) -> Iterator[None]:
    """An error that leaves it ends all ranks."""
    try:
        yield
    except BaseException as e:
        if isinstance(e, GgpipeError):
            on_error(e)
        else:  # a second Ctrl-C, or a bug
            Signals.leave()
        processes.end()
        raise


@contextlib.contextmanager
def _ended(processes: RankProcesses, wait_limit_s: float | None) -> Iterator[None]:
    """Errors that leave it are reported at once; then it waits until no rank is left.

    Ranks that take longer than `wait_limit_s` seconds are ended: mpirun waits for ever for a machine that was lost.
    """
    try:
        yield
    except GgpipeError as e:
        processes.mute()
        report(e)
        if isinstance(e, RankError | Terminated):
            wait_limit_s = _LEAVE_S
        raise
    except BaseException:  # a second Ctrl-C, or a bug
        Signals.leave()
        wait_limit_s = 0.0
        raise
    finally:
        try:
            processes.wait(wait_limit_s)
        except BaseException:
            Signals.leave()
            raise
        finally:
            processes.end()


def _accepted(
    listener: Listener, processes: RankProcesses, attend: Callable[[], None], limit_s: float
) -> Link[FromHead]:
    """The link to the first rank. Raises RankError when a rank dies before, StartError when mpirun ends for another
    reason or it does not come in time."""
    deadline = time.monotonic() + limit_s
    while (code := processes.exit_code()) is None:
        if (link := listener.accept(_TICK_S)) is not None:
            return link
        attend()
        if time.monotonic() > deadline:
            raise StartError(f"mpirun did not start the ranks within {limit_s:g} s")
    for _ in range(_LAST_LOOKS):
        if (link := listener.accept(_TICK_S)) is not None:
            return link
    if (cause := processes.cause()) is not None:
        raise RankError(cause)
    with contextlib.suppress(OSError):
        sys.stderr.write(processes.report())
    raise StartError(f"mpirun ended with exit code {code} before the first rank was connected")


def _ranks_to_start(config: EngineConfig, hostfile: Path | None) -> int | None:
    """None: this process can be the only rank."""
    n_target = config.pipeline.n_ranks
    n_ranks = (n_target or 0) + config.n_draft_ranks
    if config.pipeline.auto:
        n_ranks = len(hosts_of(hostfile)) if hostfile is not None else _ranks_here(config)
    if hostfile is None and n_ranks <= 1:
        return None
    if n_target is None and not config.pipeline.auto:
        raise UsageError("`hostfile` needs `shares`: the number of ranks to start and the share of each")
    return n_ranks


def _run_this_rank(config: EngineConfig, front_end: FrontEnd, verbose: bool) -> int:
    """Be one of the ranks."""
    from ggpipe.llama import libllama  # the process that starts the ranks does not need it
    from ggpipe.runtime.process import run_rank
    from ggpipe.runtime.session import LocalRanks

    def head(ranks: Head) -> int:
        return front_end(LocalRanks(ranks))

    libllama.set_log_level(2 if verbose else 5)
    if not config.pipeline.auto:
        return run_rank(config, head, None, report, show)
    from ggpipe.planning.auto import settle

    return run_rank(config, head, settle, report, show)


def _ranks_here(config: EngineConfig) -> int:
    from ggpipe.planning.auto import ranks_here

    return ranks_here(config)
