"""Heartbeats: every rank sends the head a beat each second, and the head sends all ranks one.

MPI does not notice a machine that was cut off, nor a process that was stopped. A thread of each process sends, receives
and compares, so a rank beats whatever its other threads do. What follows from a silent rank:

| silent               | who sees it    | what happens                                                                |
|----------------------|----------------|-----------------------------------------------------------------------------|
| another rank         | the head       | the head's main thread gets the error, reports it and calls `end_process`   |
| the head             | another rank   | its heartbeat thread reports it and calls `end_process`                     |
| a rank was killed    | its mpirun     | SIGTERM for all; those who live beat at once, so the head can name the dead |

No thread waits for MPI after that, because its calls may block forever.
"""

from __future__ import annotations

import contextlib
import math
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import NoReturn

from ggpipe.errors import GgpipeError, Setting, SilentRankError, Terminated
from ggpipe.launch.environment import end_job
from ggpipe.transport import control
from ggpipe.transport.base import HEAD, Kind, Message, Transport
from ggpipe.transport.control import Abort, Beat
from ggpipe.transport.loading_messages import ControlMessage
from ggpipe.transport.wake_event import WakeEvent

_INTERVAL_S = 1.0
_INTERVALS = 6  # in the timeout, at least
_LAST_WORDS_S = 2.5  # of the head's main thread
_IN_TURN_S = 0.25  # between ranks that end because of the head: the first one's mpirun ends the others
_MPIRUN_ENDS_S = 1.0  # this process with all others
_FLUSH_S = 0.2
_SIGNALS_S = 1.0  # for SIGCONT and SIGTERM, one after the other
_HURRY_S, _ROLL_CALL_S = 0.1, 1.5  # for others' beats after both of them, and after SIGTERM alone
_POLL_S = 0.01


class Liveness:
    """When ranks sent their last beats. Pure: the time is an argument, in seconds of one clock.

    A process that was stopped or suspended itself must not blame others: `tick` finds such gaps, and no rank
    counts as silent in them.
    """

    def __init__(self, ranks: Collection[int], timeout_s: float, now_s: float) -> None:
        """All of these ranks live now."""
        self.interval_s = min(_INTERVAL_S, timeout_s / _INTERVALS)
        """`tick` is to be called as often."""
        self._timeout_s = timeout_s
        self._last_s = dict.fromkeys(ranks, now_s)
        self._ticked_s = now_s

    def tick(self, now_s: float) -> None:
        """This process runs. To be called before the beats that arrived since are counted."""
        gap_s = now_s - self._ticked_s
        if gap_s > 2 * self.interval_s:
            slept_s = gap_s - self.interval_s
            self._last_s = {rank: last_s + slept_s for rank, last_s in self._last_s.items()}
        self._ticked_s = now_s

    def beat(self, rank: int, now_s: float) -> None:
        """A beat of a rank arrived."""
        self._last_s[rank] = now_s

    def silent(self, now_s: float) -> tuple[int, ...]:
        """The silent ranks, once one of them sent nothing for the whole timeout; before that, none.

        Those that sent nothing for half of it are among them: a machine's ranks are lost together.
        """
        silence_s = {rank: now_s - last_s for rank, last_s in self._last_s.items()}
        if max(silence_s.values(), default=0.0) < self._timeout_s:
            return ()
        return tuple(sorted(rank for rank, seconds in silence_s.items() if seconds >= self._timeout_s / 2))

    def wait_s(self, now_s: float) -> float:
        """Seconds until the next tick is due: an interval, or less where a rank's timeout ends before."""
        due_s = min(self._last_s.values(), default=math.inf) + self._timeout_s
        return min(self.interval_s, max(due_s - now_s, 0.0))


class Heartbeat:
    """This process's beats, and its watch on those of others. All ranks have one, until they leave together."""

    def __init__(
        self,
        transport: Transport,
        timeout_s: float,
        on_silent: Callable[[SilentRankError], None],
        report: Callable[[GgpipeError], None],
    ) -> None:
        """A rank is silent after `timeout_s` seconds; 0: never. `report` shows an error to the user.

        `on_silent` is called on the head, from the heartbeat's thread: the main thread is to give up, to report the
        error and to call `end_process`. If that takes too long, the heartbeat does it.
        """
        self._transport = transport
        self._timeout_s = timeout_s
        self._on_silent = on_silent
        self._report = report
        self._lane = transport.duplicate()
        self._leads = transport.rank == HEAD
        self._peers: Sequence[int] = range(1, transport.size) if self._leads else (HEAD,)
        self._liveness = Liveness(self._peers, timeout_s or math.inf, time.monotonic())
        self._continued_s = self._signalled_s = self._received_s = -math.inf
        self._processes: dict[int, int] = {}
        self._alive: set[int] = set()
        self._is_reported = False
        self._stopping = False
        self._ending = threading.Lock()
        self._wake = WakeEvent()
        self._thread = threading.Thread(target=self._work, name="heartbeat", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """All ranks are leaving: no more beats."""
        self._stopping = True
        self._wake.set()
        self._thread.join()

    def end_process(self) -> NoReturn:
        """End this process without MPI, and all others that can be reached. From any thread; returns in none."""
        self._ending.acquire()  # who comes second waits for the end
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError):
                stream.flush()
        self._send(Abort())
        with contextlib.suppress(TimeoutError):
            self._lane.flush(_FLUSH_S)
        os._exit(end_job(SilentRankError.exit_code))

    # What mpirun does when a rank was killed: SIGCONT and SIGTERM for the others, SIGKILL half a second later

    def signalled(self, number: int) -> None:
        """To be called in the handlers of SIGCONT and SIGTERM."""
        now = time.monotonic()
        if now > self._continued_s + _SIGNALS_S:  # the first of the two
            self._signalled_s = now
            self._alive.clear()
        if number == signal.SIGCONT:
            self._continued_s = now
        self._wake.set()

    def gone(self) -> str:
        """After SIGTERM on the head: `rank 1 (node2) is gone` in words, or nothing where all live. Takes a moment, in
        which ranks that live send a beat."""
        now = time.monotonic()
        deadline = now + (_HURRY_S if now < self._continued_s + _SIGNALS_S else _ROLL_CALL_S)
        while (dead := [rank for rank in self._peers if self._is_dead(rank)]) and time.monotonic() < deadline:
            time.sleep(_POLL_S)
            self._receive()
        return f"{self._names(dead)} {'is' if len(dead) == 1 else 'are'} gone: killed, or crashed" if dead else ""

    def terminated(self) -> Terminated:
        """What SIGTERM on the head means. Takes a moment, as `gone`."""
        error = Terminated(self.gone() or "terminated from outside")
        error.is_reported = self._is_reported
        return error

    def _is_dead(self, rank: int) -> bool:
        """Whether a rank has sent no beat since our signal and, if it is on this machine, has no process."""
        if rank in self._alive:
            return False
        process = self._processes.get(rank)
        return process is None or self._transport.hosts[rank] != self._transport.host or not _exists(process)

    # The thread

    def _work(self) -> None:
        while not self._stopping:
            is_signalled = time.monotonic() < self._signalled_s + _SIGNALS_S
            self._send(Beat(process=os.getpid(), is_signalled=is_signalled))
            self._wake.wait(self._liveness.wait_s(time.monotonic()))
            self._liveness.tick(time.monotonic())
            self._receive()
            if silent := self._liveness.silent(time.monotonic()):
                self._end_job(silent)

    def _send(self, message: ControlMessage) -> None:
        payload = control.encode(message)
        with contextlib.suppress(TimeoutError):  # this thread must not be blocked, whatever the others wait for
            for rank in self._peers:
                self._lane.send(rank, Kind.CONTROL, payload)

    def _receive(self) -> None:
        """All that has arrived. What had arrived before a signal shows nothing about the time after it."""
        is_new = self._received_s > self._signalled_s
        while (message := self._poll()) is not None:
            self._liveness.beat(message.source, time.monotonic())
            with contextlib.suppress(GgpipeError):  # of another version: loading will say so
                match control.decode(message.payload):
                    case Beat(process, is_signalled):
                        self._processes[message.source] = process
                        if is_signalled or is_new:
                            self._alive.add(message.source)
                    case Abort() if self._leads:  # we were stopped for long, and that was reported
                        self._is_reported = True
                    case Abort():
                        time.sleep(_MPIRUN_ENDS_S)
                        os._exit(SilentRankError.exit_code)
        self._received_s = time.monotonic()

    def _poll(self) -> Message | None:
        with contextlib.suppress(TimeoutError):
            return self._lane.poll()
        return None

    def _end_job(self, silent: Sequence[int]) -> NoReturn:
        error = SilentRankError(
            f"{self._names(silent)} sent nothing for {self._timeout_s:g} s: stopped, or cut off from the "
            "network (the limit is ",
            Setting("rank_timeout_s"),
            ")",
        )
        if self._leads:
            self._on_silent(error)
            time.sleep(_LAST_WORDS_S)
        else:
            time.sleep(min((self._transport.rank - 1) * _IN_TURN_S, _LAST_WORDS_S))
        self._report(error)
        self.end_process()

    def _names(self, ranks: Sequence[int]) -> str:
        return " and ".join(f"rank {rank} ({self._transport.hosts[rank]})" for rank in ranks)


def _exists(process: int) -> bool:
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
