"""Measures sums over the parts of a group; run it as `scripts/bench/group_sum`.

The parts are ranks on this machine, each pinned to a core. A sum takes from the last part's call to the last part's
return, so waiting for the slower part does not count. All ways take turns, in blocks of sums; each part keeps its core
busy for 0.2 ms before a sum, as if it computed. Tables show medians with the quartiles.

With --inside, two parts decode the inflated target as a group, by one row and by eight rows. The table shows what a sum
takes there, with its two parts: the wait for the slower part, although both have equally much to do, and the rest.
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

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import Row, Run
from ggpipe.launch.environment import mpi_environment
from ggpipe.launch.mpirun import find_mpirun, mpirun_command
from ggpipe.llama.bundled import inflated_pair
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import Membership
from ggpipe.llama.libllama import native
from ggpipe.llama.machine import sharpen_timers
from ggpipe.llama.stage import Stage
from ggpipe.profiling.sums import decode_sums
from ggpipe.transport.profile_messages import DecodesMeasured
from scripts.bench.measuring import middle, pin_rank

SIZES_KB = (8, 32, 128, 1024)
INSIDE_ROWS = (1, 8)
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


def inside_of(rounds: int, folder: Path) -> int:
    """One part: write the seconds of each sum in each decode, by rows."""
    from ggpipe.transport.mpi import MpiTransport

    sharpen_timers()
    transport = MpiTransport()
    pin_rank(transport.rank)
    file = ModelFile.open(inflated_pair().target)
    shares, ranks = (1 / transport.size,) * transport.size, range(transport.size)
    messages = functools.partial(native.mpi_sum, halves=False)
    member = Membership(transport.rank, shares, lambda: transport.join_group(ranks, native.shared_sum, messages))
    context = ContextConfig(n_ctx=2048)
    stage = Stage(file, (0, file.n_layer), ModelConfig(path=file.paths[0]), context, (1, 1), group=member.join())
    took_s: dict[int, list[tuple[float, ...]]] = {n_rows: [] for n_rows in INSIDE_ROWS}
    n_past = 0
    for i in range(rounds * N_SUMS // 10):
        for n_rows in INSIDE_ROWS:
            rows = [Row(token=j + 5, pos=n_past + j, seqs=(0,), request=0) for j in range(n_rows)]
            n_past += n_rows
            member.agree(False)
            member.take_times()
            stage.decode(Run(id=2 * i + 1, rows=tuple(rows), ops=(), logits_requests=()), None, 0)
            if i >= N_WARM:
                took_s[n_rows].append(member.take_times())
    (folder / str(transport.rank)).write_text(json.dumps(took_s))
    stage.close()
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
    parser.add_argument("--inside", action="store_true", help="measure sums inside decodes")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.folder is not None:
        return (inside_of if args.inside else part_of)(args.rounds, args.folder)
    if args.inside:
        inflated_pair()  # made once, before the parts read it
    with tempfile.TemporaryDirectory(prefix="ggpipe-bench-") as folder:
        start = mpirun_command(find_mpirun(), args.parts, None, ())
        inside = ["--inside"] * args.inside
        command = [*start, *SCRIPT, "--rounds", str(args.rounds), *inside, "--folder", folder]
        subprocess.run(command, env={**os.environ, **mpi_environment()}, check=True)
        read = [json.loads(path.read_text()) for path in Path(folder).iterdir()]
    if args.inside:
        print_inside(read)
        return 0
    parts: list[Times] = read
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


def print_inside(parts: list[dict[str, list[list[float]]]]) -> None:
    """What a sum inside a decode takes, as a mean over each decode's sums. `parts`: seconds by rows, decode and sum."""
    print(f"a sum in decodes of {len(parts)} parts on one machine, microseconds: median [quartiles]")
    print("    rows " + "".join(f"{title:>28}" for title in ("sum", "wait", "rest")))
    for n_rows in INSIDE_ROWS:
        decodes = [DecodesMeasured(tuple(map(tuple, part[str(n_rows)]))) for part in parts]
        n_decodes = len(decodes[0].sums_s)
        each = [decode_sums([DecodesMeasured((part.sums_s[i],)) for part in decodes]) for i in range(n_decodes)]
        own = [(one.wait_s * 1e6, one.transfer_s * 1e6) for one in each if one is not None]
        cells = [middle(map(sum, own), 1), *(middle(column, 1) for column in zip(*own, strict=True))]
        print(f"{n_rows:8d} " + "".join(f"{cell:>28}" for cell in cells))


if __name__ == "__main__":
    sys.exit(main())
