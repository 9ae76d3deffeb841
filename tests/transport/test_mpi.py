"""What the MPI transport does at a moment that real messages seldom show."""

from __future__ import annotations

import os
import subprocess
import sys

from support.commands import HANG_S

SENDS_WHILE_RECEIVING = """
import threading
from ggpipe.transport.base import Kind
from ggpipe.transport.mpi import MpiTransport

transport = MpiTransport()
sent = threading.Event()

class Done:
    def Test(self): return True

class HalfThere:
    '''A large message, of which the rest comes when this rank has sent something.'''
    def Test(self):
        receiving.set()
        return sent.is_set()

class Arrived:
    def Irecv(self, buffer): return HalfThere()

class World:
    def Improbe(self, source, tag, status):
        status.Set_source(0)
        status.Set_tag(int(Kind.RESULT))
        return Arrived()
    def Isend(self, buffer, dest, tag):
        sent.set()
        return Done()

receiving = threading.Event()
transport._comm = World()
got = []
main = threading.Thread(target=lambda: got.append(transport.poll()), daemon=True)
main.start()
receiving.wait()
stage = threading.Thread(target=transport.send, args=(0, Kind.RUN, b"run"), daemon=True)
stage.start()
stage.join(300)
main.join(300)
print(sent.is_set(), got[0].kind is Kind.RESULT)
"""


def test_one_thread_sends_while_another_one_receives_a_large_message() -> None:
    command = [sys.executable, "-c", SENDS_WHILE_RECEIVING]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert result.stdout == "True True\n", result.stderr


def test_mpi_starts_without_the_transport_that_waits_for_a_second() -> None:
    script = "import os, ggpipe.transport.mpi; print(os.environ.get('OMPI_MCA_btl'))"
    own = {name: value for name, value in os.environ.items() if not name.startswith("OMPI_")}
    under_mpirun = {"OMPI_MCA_PREFIXES": "mca,opal,ompi"}
    for given, expected in ((under_mpirun, "^ofi"), ({**under_mpirun, "OMPI_MCA_btl": "self,sm"}, "self,sm")):
        done = subprocess.run(
            [sys.executable, "-c", script], capture_output=True, text=True, timeout=HANG_S, env={**own, **given}
        )
        assert done.stdout == f"{expected}\n", done.stderr
