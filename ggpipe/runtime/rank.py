"""One process's life as a rank: connect, be the head or a worker, leave together with the others."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from types import FrameType

from ggpipe.config import EngineConfig
from ggpipe.engine import machine
from ggpipe.errors import RunError, Terminated
from ggpipe.runtime import launch, startup
from ggpipe.runtime.session import Session
from ggpipe.runtime.worker import Worker
from ggpipe.transport.base import Transport
from ggpipe.transport.local import LocalWorld

_SWITCH_INTERVAL_S = 0.1e-3  # the main thread must get the GIL from the display soon when a message is there
_LEAVE_S = 5.0  # how long a rank waits for the others when all are to leave


Settle = Callable[[Transport, Callable[[], None], EngineConfig], EngineConfig]
"""What all ranks do together before anything is loaded: agree on the rest of the config. It gets the transport, what to
call while it waits (see `run_alike`), and the config so far."""


def run_rank(config: EngineConfig, head: Callable[[Session], int], settle: Settle | None = None) -> int:
    """Run this process's part and return its exit code: `head` on rank 0, a worker elsewhere.

    `head` gets a session that is not loaded yet, and returns the exit code for all ranks. Errors of any rank are
    raised on the head.
    """
    with _connected(config) as transport:
        if settle is not None:
            config = settle(transport, _attended(transport), config)
        if transport.rank == 0:
            return _run_head(transport, config, head)
        _leave_signals_to_the_head()
        return Worker(transport, config).serve()


def run_alike(config: EngineConfig, work: Callable[[Transport, Callable[[], None]], int]) -> int:
    """As `run_rank` for work that all ranks do together: `work` gets the transport and a function that it calls while
    it waits, which raises RunError on the first rank when the user wants an end, or mpirun does."""
    with _connected(config) as transport:
        return work(transport, _attended(transport))


def _attended(transport: Transport) -> Callable[[], None]:
    ends: list[RunError] = []
    if transport.rank == 0:

        def on_stop(_number: int, _frame: FrameType | None) -> None:
            ends.append(RunError("stopped before all was measured"))

        def on_terminate(_number: int, _frame: FrameType | None) -> None:
            ends.append(Terminated("terminated from outside, or because another rank is gone"))

        signal.signal(signal.SIGINT, on_stop)
        signal.signal(signal.SIGUSR1, on_stop)
        signal.signal(signal.SIGTERM, on_terminate)
    else:
        _leave_signals_to_the_head()

    def attend() -> None:
        if ends:
            raise ends[-1]

    return attend


@contextlib.contextmanager
def _connected(config: EngineConfig) -> Iterator[Transport]:
    sys.setswitchinterval(_SWITCH_INTERVAL_S)
    machine.sharpen_timers()
    transport = connect()
    patience_s = _LEAVE_S
    try:
        startup.check_ranks(config, transport.size)
        yield transport
    except Terminated:
        patience_s = 0.0
        raise
    finally:
        transport.close(patience_s)


def _leave_signals_to_the_head() -> None:
    for number in (signal.SIGINT, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def connect() -> Transport:
    """MPI when a launcher started us as one of several ranks, else a world of one."""
    if launch.rank_in_environment() is None:
        return LocalWorld(1).transports[0]
    launch.die_with_parent()
    from ggpipe.transport.mpi import MpiTransport  # MPI is started here, and only here

    return MpiTransport()


def _run_head(transport: Transport, config: EngineConfig, head: Callable[[Session], int]) -> int:
    session = Session(transport, config)

    def on_stop(_number: int, _frame: FrameType | None) -> None:
        session.stop()

    def on_terminate(_number: int, _frame: FrameType | None) -> None:
        session.terminate()

    signal.signal(signal.SIGINT, on_stop)
    signal.signal(signal.SIGUSR1, on_stop)
    signal.signal(signal.SIGTERM, on_terminate)
    with session:
        code = head(session)
        session.close(code)
    return code
