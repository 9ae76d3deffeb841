"""One process's life as a rank: connect, be the head or a worker, leave together with the others."""

from __future__ import annotations

import contextlib
import math
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from typing import TypeVar

from ggpipe.config import EngineConfig
from ggpipe.errors import GgpipeError, SilentRankError, Terminated
from ggpipe.launch.environment import StatusFolder, die_with_parent, is_rank, rank_in_environment
from ggpipe.llama import machine
from ggpipe.runtime import handshake
from ggpipe.runtime.head import Head
from ggpipe.runtime.signals import Signals
from ggpipe.runtime.worker import Worker
from ggpipe.transport.base import Transport
from ggpipe.transport.heartbeat import Heartbeat
from ggpipe.transport.local import LocalWorld

T = TypeVar("T")

_SWITCH_INTERVAL_S = 0.1e-3  # the main thread must get the GIL from the display soon when a message has arrived
_STARTS_AFTER = 4  # timeouts of a rank: machines may differ in how long they read programs from their disks
_LEAVE_S = 2.0  # where ranks may be dead, or were told nothing

Attend = Callable[[], None]
"""Called while a rank waits. On the head it raises RunError when the user wants to stop, Terminated when mpirun
ends the job."""

Settle = Callable[[Transport, Attend, EngineConfig], EngineConfig]
"""Called on all ranks before anything is loaded; together they complete the config."""

Report = Callable[[GgpipeError], None]
"""Shows an error to the user. Called on the head before the ranks leave, which may take long or end in an abort; the
error is raised all the same. Called on another rank when the head is silent: then the process ends."""


def run_rank(
    config: EngineConfig,
    head: Callable[[Head], int],
    settle: Settle | None = None,
    report: Report = lambda _: None,
) -> int:
    """Run this process's part and return its exit code: `head` on rank 0, a worker elsewhere.

    `head` gets the channel to all ranks, with nothing loaded yet (see `Session.load`), and returns the exit code for
    all ranks. Errors of any rank are raised on the head.
    """
    with _connected(config, report) as (transport, signals):
        if settle is not None:
            config = settle(transport, signals.attend, config)
        if transport.rank > 0:
            return Worker(transport, config).serve()
        own = Head(transport, config)
        signals.follow(own.stop, own.fail)
        with own:
            code = head(own)
            own.close(code)
        return code


def run_alike(config: EngineConfig, work: Callable[[Transport, Attend], T], report: Report = lambda _: None) -> T:
    """As `run_rank`, for work that all ranks do together. When it returns, this process is not a rank any more."""
    with _connected(config, report) as (transport, signals):
        return work(transport, signals.attend)


@contextlib.contextmanager
def _connected(config: EngineConfig, report: Report) -> Iterator[tuple[Transport, Signals]]:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    machine.sharpen_timers()
    rank = rank_in_environment() or 0
    signals = Signals(rank)
    if rank == 0 and (launcher := StatusFolder.in_environment()) is not None:
        launcher.listen()
    transport = connect(config.pipeline.rank_timeout_s)
    heartbeat: Heartbeat | None = None
    if transport.size > 1 and transport.sends_from_any_thread:
        timeout_s = config.pipeline.rank_timeout_s
        heartbeat = Heartbeat(transport, timeout_s, lambda error: signals.fail(lambda: error), report)
    signals.connected(heartbeat)
    # The head sent Quit to all ranks: they will leave, however long freeing their memory takes. A rank that dies ends
    # the job through its mpirun, a silent one through the heartbeat.
    wait_limit_s: float | None = None
    try:
        handshake.check_ranks(config, transport.size)
        yield transport, signals
    except GgpipeError as e:
        if transport.rank == 0:
            report(e)
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
        transport.close(wait_limit_s, heartbeat.stop if heartbeat is not None else lambda: None)
        signals.restore()


def connect(rank_timeout_s: float) -> Transport:
    """MPI when a launcher started us as one of several ranks, else a world of one.

    SIGALRM ends this process when some ranks do not come for several times the timeout.
    """
    if not is_rank():
        return LocalWorld(1).transports[0]
    die_with_parent()
    signal.alarm(math.ceil(_STARTS_AFTER * rank_timeout_s))  # Python itself runs nothing while MPI starts
    from ggpipe.transport.mpi import MpiTransport  # MPI is started here, and only here

    transport = MpiTransport()
    signal.alarm(0)
    return transport
