"""Measures sums over the parts of a group; run it as `scripts/bench/group_sum`.

The parts are ranks on this machine, each pinned to a core. A sum takes from the last part's call to the last part's
return, so waiting for the slower part does not count. All ways take turns, in blocks of sums; each part keeps its core
busy for 0.2 ms before a sum, as if it computed. Tables show medians with the quartiles.
"""

from __future__ import annotations

import argparse
import functools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np

from ggpipe.launch.environment import mpi_environment
from ggpipe.launch.mpirun import find_mpirun, mpirun_command
from ggpipe.llama.libllama import native
from ggpipe.llama.machine import sharpen_timers
from scripts.bench.measuring import middle, pin_rank

SIZES_KB = (8, 32, 128, 1024)
N_WARM, N_SUMS, COMPUTE_S = 5, 40, 200e-6
WAYS = ("memory", "MPI", "MPI f16")
SCRIPT = (sys.executable, "-m", "scripts.bench.group_sum")

Times = dict[str, list[tuple[int, int]]]
"""Of a way and a size: when sums began and ended, in nanoseconds."""


def part_of(rounds: int, folder: Path) -> int:
    """One part: write its times."""
    from ggpipe.transport.mpi import MpiTransport

    sharpen_timers()
    transport = MpiTransport()
    pin_rank(transport.rank)
    join = functools.partial(transport.join_group, range(transport.size))
    messages = functools.partial(native.mpi_sum, halves=False)
    ways = (
        join(native.shared_sum, messages),
        join(None, messages),
        join(None, functools.partial(native.mpi_sum, halves=True)),
    )
    times: Times = {f"{way} {size}": [] for way in WAYS for size in SIZES_KB}
    for _ in range(rounds):
        for way, sums in zip(WAYS, ways, strict=True):
            for size in SIZES_KB:
                data = np.ones(size * 256, np.float32)
                for i in range(N_WARM + N_SUMS):
                    compute()
                    begin = time.monotonic_ns()
                    sums.sum(data.ctypes.data, data.size, False)
                    end = time.monotonic_ns()
                    if i >= N_WARM:
                        times[f"{way} {size}"].append((begin, end))
    (folder / str(transport.rank)).write_text(json.dumps(times))
    transport.close(10)
    return 0


def compute() -> None:
    """Keep the core busy for a while."""
    until = time.perf_counter() + COMPUTE_S
    while time.perf_counter() < until:
        pass


def main() -> int:
    """Parse the command line and start the parts, or be one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--parts", type=int, default=2, help="parts of the group")
    parser.add_argument("--rounds", type=int, default=10, help=f"blocks of {N_SUMS} sums of each kind")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        return part_of(args.rounds, args.folder)
    with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder:
        start = mpirun_command(find_mpirun(), args.parts, None, ())
        command = [*start, *SCRIPT, "--rounds", str(args.rounds), "--folder", folder]
        subprocess.run(command, env={**os.environ, **mpi_environment()}, check=True)
        parts: list[Times] = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    print(f"a sum over {args.parts} parts on one machine, microseconds: median [quartiles]")
    print("      KB " + "".join(f"{way:>28}" for way in WAYS))
    for size in SIZES_KB:
        cells = []
        for way in WAYS:
            calls = zip(*(part[f"{way} {size}"] for part in parts), strict=True)
            times_us = ((max(end for _, end in call) - max(begin for begin, _ in call)) / 1e3 for call in calls)
            cells.append(middle(times_us, 1))
        print(f"{size:8d} " + "".join(f"{cell:>28}" for cell in cells))
    return 0


if __name__ == "__main__":
    sys.exit(main())
