"""MPI, without its blocking waits: those spin on a core that a stage needs.

Two threads of a rank talk to MPI, one at a time: the main thread, which polls, and the stage's thread, which sends what
it has computed. Handing that to the main thread first would cost a thread switch in every hop (30 µs and more).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import deque

import mpi4py

mpi4py.rc.thread_level = "serialized"
mpi4py.rc.finalize = False  # Session.close does, or aborts: a failed rank must not wait for the others

from mpi4py import MPI  # noqa: E402

from ggpipe.errors import LaunchError  # noqa: E402
from ggpipe.transport.base import Kind, Message, Payload, Transport  # noqa: E402

_WORLD_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_NTASKS")


class MpiTransport(Transport):
    """All ranks of MPI_COMM_WORLD."""

    must_poll = True

    def __init__(self) -> None:
        """Raises LaunchError under a foreign mpirun, whose ranks do not see each other."""
        self._comm = MPI.COMM_WORLD
        self.rank, self.size = self._comm.rank, self._comm.size
        for variable in _WORLD_SIZE_VARIABLES:
            launched = os.environ.get(variable, "")
            if launched.isdigit() and int(launched) > 1 and self.size == 1:
                raise LaunchError(
                    f"this mpirun (or srun) started {launched} ranks that do not see each other: it belongs to "
                    f"another MPI than the one Python uses ({library_name()}); start it with that one's mpirun"
                )
        self.host = MPI.Get_processor_name()
        node = self._comm.Split_type(MPI.COMM_TYPE_SHARED)
        self.ranks_on_host = node.size
        node.Free()
        self.sends_from_any_thread = MPI.Query_thread() >= MPI.THREAD_SERIALIZED
        self._lock = threading.Lock()
        self._sends: deque[tuple[MPI.Request, Payload]] = deque()
        self._status = MPI.Status()

    def send(self, dest: int, kind: Kind, payload: Payload) -> None:
        with self._lock:
            self._sends.append((self._comm.Isend([payload, MPI.BYTE], dest, int(kind)), payload))

    def poll(self) -> Message | None:
        with self._lock:
            return self._poll()

    def _poll(self) -> Message | None:
        while self._sends and self._sends[0][0].Test():
            self._sends.popleft()
        status = self._status
        # Open MPI looks for a message first and takes what came in from the network after that: ask twice.
        arrived = self._comm.Improbe(MPI.ANY_SOURCE, MPI.ANY_TAG, status) or self._comm.Improbe(
            MPI.ANY_SOURCE, MPI.ANY_TAG, status
        )
        if arrived is None:
            return None
        payload = bytearray(status.Get_count(MPI.BYTE))
        source, kind = status.Get_source(), Kind(status.Get_tag())
        receiving = arrived.Irecv([payload, MPI.BYTE])
        while not receiving.Test():  # a matched message is on its way: this is the copy
            time.sleep(20e-6)
        return Message(source, kind, payload)

    def flush(self, timeout_s: float) -> bool:
        deadline = time.monotonic() + timeout_s
        while True:
            with self._lock:
                while self._sends and self._sends[0][0].Test():
                    self._sends.popleft()
                if not self._sends:
                    return True
            if time.monotonic() > deadline:
                return False
            time.sleep(1e-3)

    def close(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        # Nothing may be in flight at MPI_Finalize: the first barrier says that nobody sends any more, the second that
        # everybody has taken, and dropped, what was sent to it. MPI_Finalize would spin until the last rank is there.
        for _ in range(2):
            leaving = self._comm.Ibarrier()
            while self.poll() is not None or self._sends or not leaving.Test():
                if time.monotonic() > deadline:
                    self._comm.Abort(1)
                time.sleep(1e-3)
        with contextlib.suppress(MPI.Exception):  # all is said and done
            MPI.Finalize()


def library_name() -> str:
    """The MPI library's name and version, in short."""
    return MPI.Get_library_version().strip("\x00").splitlines()[0].split(",")[0].strip()
