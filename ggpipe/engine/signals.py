"""What the user, or mpirun, asks of a process by signals.

| signal  | sent by                       | with the user                  | first rank | other ranks     |
|---------|-------------------------------|--------------------------------|------------|-----------------|
| SIGINT  | Ctrl-C; mpirun and srun       | stop; again: KeyboardInterrupt | ignored    | ignored         |
| SIGTERM | mpirun, after its Ctrl-C or   | terminate; again: ends at once | terminate  | end in a second |
|         | when a rank died; `kill`      |                                |            |                 |
| SIGHUP  | a terminal that is closed     | as SIGTERM                     |            |                 |

The user is with the front end: the process that was started or, under the user's own mpirun, the first rank. Open MPI
kills all ranks as soon as one of them ends after SIGTERM, so the others give the first one time for its last words.

A server's ranks give it as long as it may take to end: its event loop looks after the first rank's signals, and calls
`signalled` and `gone`. The others ignore SIGUSR1, which mpirun passes on: it asks the server alone.
"""

from __future__ import annotations

import signal
import socket
import threading
from collections.abc import Callable
from types import FrameType

from ggpipe.errors import GgpipeError, Interrupted, Terminated
from ggpipe.transport.heartbeat import Heartbeat

_FIRST_LASTS_S, _OTHERS_LAST_S = 5.0, 1.0  # after SIGTERM; then SIGALRM ends a rank, whatever it waits for


def leave() -> None:
    """This process waits for nothing but the ranks' leaving: a stop has nothing to do, SIGTERM ends it at once."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)


class Signals:
    """Remembers what was asked for, stops from the rank's first moment on. Belongs to the main thread."""

    def __init__(self, rank: int, has_user: bool = True, server_ends_s: float | None = None) -> None:
        """`has_user`: the first rank is the front end itself. `server_ends_s`: it is a server, and takes at most so
        long to end. SIGTERM still ends this process at once: it could not be seen while MPI starts."""
        self._rank, self._has_user = rank, rank == 0 and has_user
        self._installs = server_ends_s is None or rank > 0
        self._others_last_s = _OTHERS_LAST_S if server_ends_s is None else server_ends_s
        self._stopped = False
        self._failure: Callable[[], GgpipeError] | None = None
        self._on_stop: Callable[[], None] = lambda: None
        self._on_failure: Callable[[Callable[[], GgpipeError]], None] = lambda _: None
        self._is_stopping: Callable[[], bool] = lambda: self._stopped
        self._heartbeat: Heartbeat | None = None
        if self._installs:
            signal.signal(signal.SIGINT, self._interrupt if self._has_user else signal.SIG_IGN)
        if self._installs and server_ends_s is not None:
            signal.signal(signal.SIGUSR1, signal.SIG_IGN)

    def connected(self, heartbeat: Heartbeat | None) -> None:
        """MPI has started: SIGTERM gets its meaning, too. The heartbeat, if there are several ranks, learns of it."""
        self._heartbeat = heartbeat
        if not self._installs:
            return
        signal.signal(signal.SIGTERM, self._terminate if self._rank == 0 else self._end_in_a_second)
        if self._has_user and signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # as nohup has it
            signal.signal(signal.SIGHUP, self._terminate)
        if heartbeat is not None:
            signal.signal(signal.SIGCONT, lambda number, _: heartbeat.signalled(number))
        if not self._has_user:
            _end_though_busy(_FIRST_LASTS_S if self._rank == 0 else self._others_last_s)

    @property
    def is_interrupted(self) -> bool:
        """The user has pressed Ctrl-C."""
        return self._stopped

    def attend(self, stopped: str = "stopped before all was measured") -> None:
        """To be called while something is waited for. Raises Interrupted with this text after a stop, Terminated after
        SIGTERM, and the error of `fail`."""
        if self._failure is not None:
            raise self._failure()
        if self._stopped:
            raise Interrupted(stopped)

    def follow(
        self,
        on_stop: Callable[[], None],
        on_failure: Callable[[Callable[[], GgpipeError]], None],
        is_stopping: Callable[[], bool],
    ) -> None:
        """Call these from now on, at once for what was asked for before. `on_failure` is given what makes the error.
        `is_stopping`: what a stop is to end has not ended yet; a stop after that is not a second one."""
        self._on_stop, self._on_failure, self._is_stopping = on_stop, on_failure, is_stopping
        if self._stopped:
            on_stop()
        if self._failure is not None:
            on_failure(self._failure)

    def fail(self, error: Callable[[], GgpipeError]) -> None:
        """This rank is to end with the error that `error` makes. From any thread."""
        self._failure = self._failure or error
        self._on_failure(self._failure)

    def leave(self) -> None:
        """See `leave`."""
        if self._installs:
            leave()

    def restore(self) -> None:
        """This process is no rank any more: a signal raises KeyboardInterrupt in it, without a time limit."""
        if self._installs:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGINT, signal.default_int_handler)

    # For a server

    def signalled(self, number: int) -> None:
        """The first rank received SIGCONT or SIGTERM: the others are to show that they live."""
        if self._heartbeat is not None:
            self._heartbeat.signalled(number)

    def gone(self) -> str:
        """After SIGTERM: the ranks that are gone, in words; nothing where all live. Takes a moment."""
        return self._heartbeat.gone() if self._heartbeat is not None else ""

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if self._is_stopping():
            signal.default_int_handler(number, frame)
        self._stop(number, frame)

    def _stop(self, _number: int, _frame: FrameType | None) -> None:
        self._stopped = True
        self._on_stop()

    def _terminate(self, _number: int, _frame: FrameType | None) -> None:
        for again in (signal.SIGTERM, signal.SIGHUP):
            signal.signal(again, signal.SIG_DFL)
        signal.setitimer(signal.ITIMER_REAL, _FIRST_LASTS_S)
        if self._heartbeat is not None:
            self._heartbeat.signalled(signal.SIGTERM)
            self.fail(self._heartbeat.terminated)
        else:
            self.fail(lambda: Terminated("terminated from outside"))

    def _end_in_a_second(self, _number: int, _frame: FrameType | None) -> None:
        signal.setitimer(signal.ITIMER_REAL, self._others_last_s)
        if self._heartbeat is not None:
            self._heartbeat.signalled(signal.SIGTERM)


def _end_though_busy(last_s: float) -> None:
    """End this process `last_s` seconds after SIGTERM also where libllama computes on: handlers run only when it has
    returned, but other threads run meanwhile."""
    numbers, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.detach(), warn_on_full_buffer=False)

    def wait() -> None:
        while signal.SIGTERM not in numbers.recv(64):
            pass
        signal.setitimer(signal.ITIMER_REAL, last_s)

    threading.Thread(target=wait, name="signals", daemon=True).start()
