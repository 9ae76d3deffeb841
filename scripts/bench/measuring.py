"""How benchmarks start what they measure, and show medians."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterable
from typing import Any

from ggpipe.config.sampling import SamplingConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.request_spec import RequestSpec
from ggpipe.launch.environment import die_with_parent, mpi_environment, rank_in_environment
from ggpipe.launch.mpirun import find_mpirun, mpirun_command
from ggpipe.stats.records import quartiles

ITERATIVE = SpeculationConfig(mode="iterative")


def greedy(
    prompt: tuple[int, ...],
    n: int,
    speculation: SpeculationConfig = ITERATIVE,
    cache_prompt: bool = False,
    grammar: str = "",
) -> RequestSpec:
    """A request for exactly `n` tokens, the most likely ones. `grammar`: in GBNF, which they match; empty: any."""
    sampling = SamplingConfig(temp=0, ignore_eos=True, grammar=grammar)
    return RequestSpec(
        prompt=prompt, sampling=sampling, n_predict=n, speculation=speculation, cache_prompt=cache_prompt
    )


def run_ranks(n_ranks: int, command: Iterable[object]) -> Any:
    """Run a command under mpirun. Returns the JSON that its head prints."""
    done = subprocess.run(
        [*mpirun_command(find_mpirun(), n_ranks, None, ()), *map(str, command)],
        stdout=subprocess.PIPE,
        check=True,
        env={**os.environ, **mpi_environment()},
        preexec_fn=die_with_parent,
    )
    return json.loads(done.stdout)


def pin_rank(rank: int | None = None) -> None:
    """Pin a rank's process to one core, in turn. `rank`: by default this process's rank under mpirun."""
    cores = sorted(os.sched_getaffinity(0))
    rank = rank_in_environment() or 0 if rank is None else rank
    os.sched_setaffinity(0, {cores[rank % len(cores)]})


def run_ggpipe(*words: object) -> None:
    """Run a `ggpipe` command. Raises SystemExit if it fails."""
    command = [sys.executable, "-m", "ggpipe", *map(str, words)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)} failed: {done.stderr.strip()}")


def middle(values: Iterable[float], digits: int = 2) -> str:
    """Median and quartiles, `1.31 [1.20 … 1.42]`."""
    spread = quartiles(values)
    assert spread is not None
    return f"{spread.middle:.{digits}f} [{spread.low:.{digits}f} … {spread.high:.{digits}f}]"
