"""Parts of a group under MPI: how they find each other, and their sums over messages."""

from __future__ import annotations

import pytest
from support.commands import on_ranks

SUMS = """
import functools, threading
import numpy as np
from mpi4py import MPI
from support.group_sums import SIZES, add, crc, total_of, values_of
from ggpipe.llama.libllama import native
from ggpipe.transport.mpi import MpiTransport

def work():
    world = MPI.COMM_WORLD.Dup()
    for way, sums in ways.items():
        for n in SIZES:
            values = [values_of(part, n) for part in range(world.size)]
            total, own = total_of(values), values[world.rank].copy()
            assert not add(sums, own), (way, n)
            assert len(set(world.allgather(crc(own)))) == 1, (way, n)
            if way == "halves":
                magnitude = sum(np.abs(v) for v in values) + np.abs(total)
                assert (np.abs(own - total) <= 2**-11 * 1.01 * magnitude + 2**-23).all(), n
                assert n < 1000 or (own != total).any()
            else:
                assert (own == total).all(), (way, n)
        large = np.float32([1e6, -1e6, 1])
        add(sums, large)
        assert large[0] == world.size * (65504 if way == "halves" else 1e6), large
        assert [add(sums, own.copy(), world.rank == part) for part in range(world.size)] == [True] * world.size
        slices = [values_of(part, 200_000) for part in range(world.size)]
        if world.rank > 0:
            sums.send(slices[world.rank].ctypes.data, slices[world.rank].nbytes)
        for part in range(1, world.size) if world.rank == 0 else ():
            received = np.empty_like(slices[part])
            sums.receive(part, received.ctypes.data, received.nbytes)
            assert (received == slices[part]).all(), (way, part)
        assert not add(sums, own)
        print(f"{way} {world.rank} {sums.lost}\\n", end="", flush=True)

transport = MpiTransport()
ranks = range(transport.size)
join = functools.partial(transport.join_group, ranks)
ways = {
    "memory": join(native.shared_sum, None),
    "messages": join(None, functools.partial(native.mpi_sum, halves=False)),
    "halves": join(None, functools.partial(native.mpi_sum, halves=True)),
}
thread = threading.Thread(target=work)
thread.start()
while thread.is_alive():  # as a rank does
    transport.poll()
    thread.join(1e-4)
transport.close(10)
"""

LOST = """
import functools, os, signal, threading, time
from mpi4py import MPI
from support.group_sums import add, values_of
from ggpipe.llama.libllama import native
from ggpipe.transport.mpi import MpiTransport

transport = MpiTransport()
sums = transport.join_group((1, 0), None, functools.partial(native.mpi_sum, halves=False))
processes = MPI.COMM_WORLD.allgather(os.getpid())
n = 100_000
assert not add(sums, values_of(transport.rank, n))
if transport.rank == 1:
    os.kill(os.getpid(), signal.SIGSTOP)
threading.Timer(0.2, sums.abandon).start()
print(add(sums, values_of(0, n)), add(sums, values_of(0, n)), sums.lost, flush=True)
os.kill(processes[1], signal.SIGKILL)
os._exit(0)
"""


@pytest.mark.parametrize("n_ranks", [2, 3])
def test_sums_under_mpi(n_ranks: int) -> None:
    result = on_ranks(n_ranks, SUMS)
    expected = [f"{way} {rank} False" for way in ("memory", "messages", "halves") for rank in range(n_ranks)]
    assert sorted(result.stdout.split("\n")[:-1]) == sorted(expected), result.stderr


def test_a_stopped_part_holds_nobody_for_longer_than_the_heartbeat() -> None:
    result = on_ranks(2, LOST)
    assert result.stdout.startswith("True True True\n"), result.stderr  # MPICH reports there, too
