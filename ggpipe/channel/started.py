"""Ranks that are started for a front end, and started again when they died."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ggpipe.channel.link import ChannelLink, Listener, Waker
from ggpipe.channel.messages import FromHead
from ggpipe.channel.remote import RemoteRanks
from ggpipe.channel.supervisor import StartMethod, Supervisor
from ggpipe.errors import GgpipeError, HostError, LaunchError, RankError, StartError, Terminated, Wording
from ggpipe.launch.hostfile import hosts_of
from ggpipe.launch.job import Job, jobs_again
from ggpipe.launch.mpirun import RankProcesses
from ggpipe.launch.placement import listed
from ggpipe.launch.reach import unreachable
from ggpipe.stats.records import RankStats

_TICK_S = 0.1
_LAST_LOOKS = 5  # for a rank that has reported and ended
_LEAVE_S = 1.0  # where a rank is lost
_STARTS_WITHIN, _STARTS_WITHIN_S = 4, 60.0  # timeouts of a rank, and at least so long: then it is started once more
_FIRST_WITHIN_S = 600.0  # files may come slowly over a network; for a lost machine mpirun would wait for ever


@dataclass(frozen=True, kw_only=True)
class UserContact:
    """Who is told what happens to the ranks. Settings stand in backticks in lines and errors."""

    show: Callable[[str | Wording], None]
    """Shows a line."""
    report: Callable[[GgpipeError], None]
    """Shows an error, which is raised all the same, before the ranks leave."""
    leave: Callable[[], None] = lambda: None
    """Called when nothing but the ranks' end is waited for."""
    waker: Waker | None = None
    """With which other threads end a wait for the ranks' messages."""


@contextlib.contextmanager
def supervised(
    first: Job, n_restarts: int, user: UserContact, on_begin: Callable[[Supervisor], None]
) -> Iterator[Supervisor]:
    """A job's ranks, at most `n_restarts` times in ten minutes again where they die. They leave when the context is
    left, and errors are reported before.

    `on_begin` is called before anything is started. Only for a process that is no
    rank itself (`environment.is_rank`). Raises LaunchError, and what ranks cannot start for.
    """
    timeout_s = first.settings.config.pipeline.rank_timeout_s

    def way(job: Job, is_first: bool = False) -> StartMethod:
        least_s = _FIRST_WITHIN_S if is_first else _STARTS_WITHIN_S
        limit_s = max(_STARTS_WITHIN * timeout_s, least_s) if timeout_s else math.inf

        def on_error(error: GgpipeError) -> None:
            if not n_restarts and not isinstance(error, HostError):  # else it may be a reason to try again
                user.report(error)

        def start(own: Supervisor) -> contextlib.AbstractContextManager[RemoteRanks]:
            ranks = started(job, timeout_s, own.attend, user, limit_s, on_error, own.ranks)
            return _looking_for_hosts(ranks, job, own.attend) if is_first else ranks

        return StartMethod(start, job.line)

    def again(attend: Callable[[], None]) -> list[StartMethod]:
        jobs = jobs_again(first, attend) if first.slots else [first]
        return [way(job) for job in jobs]

    with Supervisor(again, n_restarts, user.show) as supervisor:
        on_begin(supervisor)
        supervisor.start(way(first, is_first=True))
        yield supervisor


@contextlib.contextmanager
def _looking_for_hosts(
    ranks: contextlib.AbstractContextManager[RemoteRanks], job: Job, attend: Callable[[], None]
) -> Iterator[RemoteRanks]:
    """Ranks on machines that were never there before: those that cannot be reached are the user's mistake. Where all
    can, one was lost for a moment, which is a RankError."""
    with contextlib.ExitStack() as stack:
        try:
            own = stack.enter_context(ranks)
        except HostError as e:
            hosts = list(dict.fromkeys(job.slots[: job.n_ranks]))
            away = unreachable(hosts, attend)
            if not away:
                raise RankError(e) from e
            with contextlib.suppress(OSError):
                sys.stderr.write(e.report)
            raise LaunchError(
                f"{listed([host for host in hosts if host in away])} cannot be reached: mpirun starts nothing there; "
                "check its name, that it runs, and that ssh logs in without a password"
            ) from e
        yield own


@contextlib.contextmanager
def started(
    job: Job,
    rank_timeout_s: float,
    attend: Callable[[], None],
    user: UserContact,
    limit_s: float = math.inf,
    on_start_error: Callable[[GgpipeError], None] | None = None,
    all_ranks: list[RankStats] | None = None,
) -> Iterator[RemoteRanks]:
    """A job's ranks, which are connected within `limit_s` seconds. They leave when the context is left.

    `attend` is called while they start, and may raise. `on_start_error` gets what they cannot start for, else the user
    does. `all_ranks`: as for RemoteRanks. Raises StartError, and what the ranks cannot start for.
    """
    with job.hosts_in_file() as hostfile:
        first_host = hosts_of(hostfile)[0] if hostfile is not None else None
        with Listener(first_host, user.show) as listener:
            environment = {**listener.environment, **job.settings.environment}
            processes = RankProcesses(job.n_ranks, hostfile, environment)
            with _at_once(processes, user, on_start_error or user.report):  # the ranks wait for each other
                link = _accepted(listener, processes, attend, limit_s)
                more_links = functools.partial(listener.accept, 0)
                ranks = RemoteRanks(link, user.show, processes.cause, more_links, rank_timeout_s, all_ranks, user.waker)
                processes.connected()
            with _ended(processes, user, rank_timeout_s or None), contextlib.closing(ranks):
                yield ranks


@contextlib.contextmanager
def _at_once(processes: RankProcesses, user: UserContact, on_error: Callable[[GgpipeError], None]) -> Iterator[None]:
    """An error that leaves it ends all ranks."""
    try:
        yield
    except BaseException as e:
        if isinstance(e, GgpipeError):
            on_error(e)
        else:  # a second Ctrl-C, or a bug
            user.leave()
        processes.end()
        raise


@contextlib.contextmanager
def _ended(processes: RankProcesses, user: UserContact, wait_limit_s: float | None) -> Iterator[None]:
    """Errors that leave it are reported at once; then it waits until no rank is left.

    Ranks that take longer than `wait_limit_s` seconds are ended: mpirun waits for ever for a machine that was lost.
    """
    try:
        yield
    except GgpipeError as e:
        processes.mute()
        user.report(e)
        if isinstance(e, RankError | Terminated):
            wait_limit_s = _LEAVE_S
        raise
    except BaseException:  # a second Ctrl-C, or a bug
        user.leave()
        wait_limit_s = 0.0
        raise
    finally:
        try:
            processes.wait(wait_limit_s)
        except BaseException:
            user.leave()
            raise
        finally:
            processes.end()


def _accepted(
    listener: Listener, processes: RankProcesses, attend: Callable[[], None], limit_s: float
) -> ChannelLink[FromHead]:
    """The link to the first rank. Raises RankError when a rank dies before or is cut off, StartError when mpirun ends
    for another reason or it does not come in time."""
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
    if (lack := processes.lack_of_room()) is not None:
        raise StartError(lack)
    if (cause := processes.cause()) is not None:
        raise RankError(cause)
    if code == 0 and listener.n_cut:
        raise RankError("the connection to the first rank was cut while it was made")
    if (said := processes.error()) is not None:
        error = StartError(said)
        error.is_reported = True  # by the rank
        raise error
    if (host := processes.lost()) is not None:
        raise HostError(f"mpirun did not start on {host}, or lost it", processes.report())
    with contextlib.suppress(OSError):
        sys.stderr.write(processes.report())
    raise StartError(f"mpirun ended with exit code {code} before the first rank was connected")
