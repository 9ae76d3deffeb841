"""One process's life as a rank: connect, be the head or a worker, leave together with the others."""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import traceback
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import TypeVar

from ggpipe.channel import link
from ggpipe.channel.events import ChannelMessage
from ggpipe.channel.front_end import FrontEnd
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import FIRST_DRAFT, TARGET
from ggpipe.engine.head import Head
from ggpipe.engine.served import serve
from ggpipe.engine.signals import Signals
from ggpipe.engine.weights import share_models
from ggpipe.engine.worker import Worker
from ggpipe.errors import GgpipeError, ModelError, RankError, Setting, SilentRankError, Terminated, Wording
from ggpipe.launch import sockets
from ggpipe.launch.environment import die_with_parent, is_rank, is_served, rank_in_environment
from ggpipe.llama import libllama, machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.transport.base import HEAD, Transport
from ggpipe.transport.heartbeat import Heartbeat
from ggpipe.transport.local import LocalWorld

T = TypeVar("T")

_SWITCH_INTERVAL_S = 0.1e-3  # the main thread must get the GIL from the display soon when a message has arrived
_STARTS_AFTER = 4  # timeouts of a rank: machines may differ in how long they read programs from their disks
_LEAVE_S = 2.0  # where ranks may be dead, or were told nothing

Attend = Callable[[], None]
"""Called while a rank waits. On the head it raises RunError when the user wants to stop, Terminated when mpirun
ends the job."""

Say = Callable[[str | Wording], None]
"""Shows a line to the user."""

Settle = Callable[[Transport, Attend, EngineConfig, Say], EngineConfig]
"""Called on all ranks before anything is loaded; together they complete the config."""

Report = Callable[[GgpipeError], None]
"""Shows an error to the user. Called on the head before the ranks leave, which may take long or end in an abort; the
error is raised all the same. Called on another rank when the head is silent: then the process ends."""


def run_rank(
    config: EngineConfig,
    head: Callable[[Head], int],
    settle: Settle | None = None,
    report: Report = lambda _: None,
    say: Say = lambda _: None,
    signals: Signals | None = None,
) -> int:
    """Run this process's part and return its exit code: `head` on rank 0, a worker elsewhere.

    `head` gets the channel to all ranks, with nothing loaded yet (see `Session.load`), and returns the exit code for
    all ranks. Errors of any rank are raised on the head. Where our own launcher started the ranks, its front end is
    served instead of `head`, and gets the errors and the lines. `signals`: this process's, if they are a server's.
    """
    with _connected(config, report, say, signals) as own:
        transport = own.transport
        if config.pipeline.send_weights and transport.size > 1:
            config, sender = share_models(transport, own.attend, config, own.say)
            if sender is not None:
                own.leaving.callback(sender.close)
        if settle is not None:
            config = settle(transport, own.attend, config, own.say)
        libllama.on_abort(lambda reason: _end_aborted(config, transport, reason, report))
        if transport.rank > 0:
            return Worker(transport, config).serve()
        with Head(transport, config) as ranks:
            own.signals.follow(ranks.stop, ranks.fail, lambda: ranks.stopping)
            if own.front_end is None:
                code = head(ranks)
            else:
                own.front_end.follow(ranks.stop, ranks.channel.inbox.call, own.signals.attend)
                serve(own.front_end, ranks)
                code = 0
            ranks.close(code)
        return code


def _end_aborted(config: EngineConfig, transport: Transport, reason: str, report: Report) -> None:
    """An assertion of ggml does not hold, so this process ends. Its meta device has many, on the shapes of tensors."""
    model = config.part_of(config.model_of(transport.rank, transport.size)).model
    error: GgpipeError = RankError(f"{transport.place}: libllama stopped at {reason}")
    if "ggml-backend-meta" in reason:
        architecture = ModelFile.open(model.path).architecture
        error = ModelError(
            f"this '{architecture}' model cannot be divided as a group ({reason}): give each rank layers "
            "of its own, as in 0.5,0.5, with ",
            Setting("layer_split"),
        )
    if is_served():
        link.report(error)
    elif transport.rank == HEAD:
        report(error)
    else:
        sys.stderr.write(f"ggpipe: {error}\n")
    os._exit(error.exit_code)  # ggml would end it by a signal, for which Open MPI prints a backtrace


def run_alike(
    config: EngineConfig,
    work: Callable[[Transport, Attend, Say], T],
    report: Report = lambda _: None,
    say: Say = lambda _: None,
    result: Callable[[T], ChannelMessage] | None = None,
) -> T:
    """As `run_rank`, for work that all ranks do together; on the head, `result` makes a message for the front end that
    it serves. When it returns, this process is not a rank any more."""
    with _connected(config, report, say) as own:
        done = work(own.transport, own.attend, own.say)
        if own.front_end is not None and result is not None:
            own.front_end.send(result(done))
        return done


@dataclass(frozen=True)
class _Rank:
    """This process among the others, and who is to be asked and told."""

    transport: Transport
    signals: Signals
    front_end: FrontEnd | None
    """The one that this head serves; None: it is this process, or this is another rank."""
    say: Say
    leaving: contextlib.ExitStack
    """Closed once all ranks are leaving: no more messages but those of `transport`."""

    def attend(self) -> None:
        """See Attend."""
        self.signals.attend()
        if self.front_end is not None:
            self.front_end.attend()


@contextlib.contextmanager
def _connected(config: EngineConfig, report: Report, say: Say, signals: Signals | None = None) -> Iterator[_Rank]:
    tune()
    signals = signals or Signals(rank_in_environment() or 0, has_user=not is_served())
    transport = connect(config)
    front_end: FrontEnd | None = None

    def tell(error: GgpipeError) -> None:
        (report if front_end is None else front_end.report)(error)

    heartbeat: Heartbeat | None = None
    leaving = contextlib.ExitStack()
    if transport.size > 1 and transport.sends_from_any_thread:
        timeout_s = config.pipeline.rank_timeout_s
        heartbeat = Heartbeat(transport, timeout_s, lambda error: signals.fail(lambda: error), tell)
        leaving.callback(heartbeat.stop)
    signals.connected(heartbeat)
    # The head sent Quit to all ranks: they will leave, however long freeing their memory takes. A rank that dies ends
    # the job through its mpirun, a silent one through the heartbeat.
    wait_limit_s: float | None = None
    try:
        if transport.rank == HEAD and is_served():
            wait_limit_s = _LEAVE_S  # the other ranks do not know of a front end that cannot be reached
            front_end = FrontEnd(link.connect(), transport.place)
            say = front_end.say
            wait_limit_s = None
        config.check_ranks(transport.size)
        yield _Rank(transport, signals, front_end, say, leaving)
    except GgpipeError as e:
        if transport.rank == HEAD:
            tell(e)
        if isinstance(e, SilentRankError) and heartbeat is not None:
            heartbeat.end_process()
        if isinstance(e, Terminated):
            wait_limit_s = _LEAVE_S
        raise
    except BaseException:  # a bug, or a second Ctrl-C: the other ranks do not know of it
        if transport.size > 1:
            traceback.print_exc()
        wait_limit_s = _LEAVE_S
        raise
    finally:
        signals.leave()
        if front_end is not None:
            front_end.close()
        transport.close(wait_limit_s, leaving.close)
        signals.restore()


def tune() -> None:
    """Make this process fit for the waits of a rank."""
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    machine.sharpen_timers()


def connect(config: EngineConfig) -> Transport:
    """MPI when a launcher started us as one of several ranks, else a world of one. Each rank takes its socket.

    SIGALRM ends this process when some ranks do not come for several times the timeout.
    """
    if not is_rank():
        return LocalWorld(1).transports[0]
    die_with_parent()
    limit_s = _STARTS_AFTER * config.pipeline.rank_timeout_s
    signal.alarm(math.ceil(limit_s))  # Python itself runs nothing while MPI starts
    from ggpipe.transport.mpi import MpiTransport  # MPI is started here, and only here

    transport = MpiTransport()
    signal.alarm(0)
    allowed = os.sched_getaffinity(0)
    if (cpus := own_socket(config, transport, allowed) or own_cores(config, transport, allowed)) is not None:
        sockets.bind(cpus)
    transport.share_cores(os.sched_getaffinity(0))
    return transport


def own_socket(config: EngineConfig, transport: Transport, allowed: Collection[int]) -> frozenset[int] | None:
    """The CPUs that this rank should keep to, where the target's ranks divide the sockets of its machine; None: all of
    `allowed`, the CPUs that it may run on.

    A draft's rank is not bound. `auto` may have one more rank for it than there are sockets.
    """
    if config.model.numa is not None:
        return None
    n_target = transport.size - config.n_draft_ranks
    mates = [rank for rank in range(n_target) if transport.hosts[rank] == transport.host]
    n_sockets = sockets.free_sockets(allowed, sockets.SYSFS)
    if config.pipeline.auto and config.drafts and len(mates) % n_sockets == 1:
        mates = [rank for rank in mates if rank < n_target - 1]
    if transport.rank not in mates:
        return None
    return sockets.cpus_of(mates.index(transport.rank), len(mates), allowed, sockets.SYSFS)


def own_cores(config: EngineConfig, transport: Transport, allowed: Collection[int]) -> frozenset[int] | None:
    """The CPUs that this rank should keep to where the ranks of its machine have more threads than it has cores, see
    `sockets.cores_of`; None: all of `allowed`, the CPUs that it may run on.

    Ranks of draft models are not bound: they take what the target's leave. Without draft models, few stages compute at
    the same time.
    """
    split = config.pipeline.layer_split
    if config.model.numa is not None or config.pipeline.auto or (split is not None and split.shares[0] == 0):
        return None
    here = [rank for rank, host in enumerate(transport.hosts) if host == transport.host]
    n_each = max(len(sockets.cores(allowed, sockets.SYSFS)) // len(here), 1)
    threads, n_others = dict[int, int](), 0
    for rank in here:
        n_threads = max(config.pipeline.threads_of(rank, n_each))
        if (model := config.model_of(rank, transport.size)) == TARGET:
            threads[rank] = n_threads
        else:
            n_others += max(config.drafts[model - FIRST_DRAFT].threads, 0) or n_threads
    if transport.rank not in threads:
        return None
    number = list(threads).index(transport.rank)
    return sockets.cores_of(number, list(threads.values()), n_others, allowed, sockets.SYSFS)
