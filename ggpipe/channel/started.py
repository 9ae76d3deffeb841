"""Starting ranks for a front end, and restarting them when they die."""

from __future__ import annotations

import contextlib
import functools
import math
import sys
import threading
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
from ggpipe.launch.reach import described, faults, unreachable
from ggpipe.stats.records import RankStats

_TICK_S = 0.1
_LAST_LOOKS = 5  # for a rank that has reported and ended
_LEAVE_S = 1.0  # when a rank is lost
_STARTS_WITHIN, _STARTS_WITHIN_S = 4, 60.0  # rank timeouts, but at least this many seconds; then the start is repeated
_FIRST_WITHIN = 60  # launch timeouts: a network file system may be slow; mpirun would wait forever for a lost machine
_LOOK_AFTER = 0.3  # launch timeouts: then machines are looked for that do not answer


@dataclass(frozen=True, kw_only=True)
class UserContact:
    """How the user learns about the ranks."""

    show: Callable[[str | Wording], None]
    """Shows a line."""
    report: Callable[[GgpipeError], None]
    """Shows an error before the ranks end; it is raised as well."""
    leave: Callable[[], None] = lambda: None
    """Called when only the ranks' end is left to wait for."""
    waker: Waker | None = None
    """Interrupts a wait for the ranks' messages."""


@contextlib.contextmanager
def supervised(
    first: Job, n_restarts: int, user: UserContact, on_begin: Callable[[Supervisor], None]
) -> Iterator[Supervisor]:
    """A context with a job's ranks, which are restarted up to `n_restarts` times in ten minutes. They end with the
    context, after errors have been reported.

    `on_begin` is called before anything is started. Must not be used in a rank (`environment.is_rank`). Raises
    LaunchError, and the error if the ranks cannot start.
    """
    pipeline = first.settings.config.pipeline
    timeout_s, launch_s = pipeline.rank_timeout_s, pipeline.launch_timeout_s

    def way(job: Job, is_first: bool = False) -> StartMethod:
        least_s = _FIRST_WITHIN * launch_s if is_first else _STARTS_WITHIN_S
        limit_s = max(_STARTS_WITHIN * timeout_s, least_s) if timeout_s else math.inf

        def on_error(error: GgpipeError) -> None:
            if not n_restarts and not isinstance(error, HostError):  # otherwise the start may be repeated
                user.report(error)

        def start(own: Supervisor) -> contextlib.AbstractContextManager[RemoteRanks]:
            attend = _Lookout(job, launch_s, own.attend) if is_first else own.attend
            ranks = started(job, timeout_s, attend, user, limit_s, on_error, own.ranks)
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
    """For the first start: unreachable machines are the user's mistake. If all are reachable, one was lost for a
    moment, which is a RankError."""
    with contextlib.ExitStack() as stack:
        try:
            own = stack.enter_context(ranks)
        except HostError as e:
            if not e.report:  # the lookout knows which ones
                raise LaunchError(e) from e
            hosts = job.first_hosts
            if found := faults(hosts, job.settings.config.pipeline.launch_timeout_s, attend):
                raise LaunchError(described(found)) from e
            away = unreachable(hosts, attend)
            if not away:
                raise RankError(e) from e
            with contextlib.suppress(OSError):
                sys.stderr.write(e.report)
            raise LaunchError(
                f"{listed([host for host in hosts if host in away])} is unreachable for mpirun: "
                "check its name, that it is running, and that ssh logs in without a password"
            ) from e
        yield own


class _Lookout:
    """To be called while ranks start: looks once, in a thread, for machines that do not answer."""

    def __init__(self, job: Job, limit_s: float, attend: Callable[[], None]) -> None:
        self._job, self._limit_s, self._attend = job, limit_s, attend
        self._look_at = time.monotonic() + _LOOK_AFTER * limit_s
        self._thread: threading.Thread | None = None
        self._faults: dict[str, str] = {}

    def __call__(self) -> None:
        """Raises HostError if machines do not answer, and what `attend` raises."""
        self._attend()
        if self._thread is None and time.monotonic() > self._look_at:
            self._thread = threading.Thread(target=self._look, name="lookout", daemon=True)
            self._thread.start()
        if self._faults:
            raise HostError(described(self._faults))

    def _look(self) -> None:
        with contextlib.suppress(GgpipeError):
            self._faults = faults(self._job.first_hosts, (1 - _LOOK_AFTER) * self._limit_s, lambda: None)


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
    """A context with a job's ranks, connected within `limit_s` seconds. They end with the context.

    `attend` is called while they start, and may raise. `on_start_error` gets the error if they cannot start; None: the
    user does. `all_ranks`: `ranks` of RemoteRanks. Raises StartError, and the error if the ranks cannot start.
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
    """A context in which any error ends all ranks."""
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
    """A context that reports errors at once, and then waits for all ranks to end. After `wait_limit_s` seconds it ends
    them, since mpirun waits forever for a lost machine."""
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
    """The link to the first rank. Raises RankError if a rank dies or is cut off, and StartError if mpirun ends for
    another reason or the limit is over."""
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
        raise RankError("the connection to the first rank broke before it was established")
    if (said := processes.error()) is not None:
        error = StartError(said)
        error.is_reported = True  # by the rank itself
        raise error
    if (host := processes.lost()) is not None:
        raise HostError(f"mpirun did not start on {host}, or lost it", processes.report())
    with contextlib.suppress(OSError):
        sys.stderr.write(processes.report())
    raise StartError(f"mpirun ended with exit code {code} before the first rank was connected")
