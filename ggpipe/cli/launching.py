"""A command's ranks: start them when nobody did, and run one."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from ggpipe.cli.messages import report
from ggpipe.config import EngineConfig
from ggpipe.display.live.terminal import launcher_environment, restore_terminal
from ggpipe.errors import UsageError
from ggpipe.launch import environment, mpirun
from ggpipe.launch.hostfile import hosts_of

if TYPE_CHECKING:
    from ggpipe.runtime.head import Head


def start_ranks(config: EngineConfig, hostfile: Path | None) -> int | None:
    """Start this command line as the ranks that the config names, and wait; the exit code.

    None when there is nothing to start: this process is a rank already, or one rank is all there is. Raises UsageError
    for a hostfile without shares, LaunchError when there is no mpirun or no such hostfile.
    """
    if environment.is_rank():
        return None
    shares = config.pipeline.shares
    n_ranks = len(shares or ()) + config.n_draft_ranks
    if config.pipeline.auto:
        n_ranks = len(hosts_of(hostfile)) if hostfile is not None else _ranks_here(config)
    if hostfile is None and n_ranks <= 1:
        return None
    if shares is None and not config.pipeline.auto:
        raise UsageError("`hostfile` needs `shares`: the number of ranks to start and the share of each")
    return start_n_ranks(n_ranks, hostfile)


def start_n_ranks(n_ranks: int, hostfile: Path | None) -> int:
    """Start this command line as `n_ranks` ranks, wait, and leave the terminal as it was; the exit code.

    Only for a process that is no rank itself (`environment.is_rank`). Raises LaunchError.
    """
    code = mpirun.launch(sys.argv[1:], n_ranks, hostfile, launcher_environment())
    if code != 0:
        restore_terminal()
    return code


def run_this_rank(config: EngineConfig, head: Callable[[Head], int], verbose: bool) -> int:
    """Be one of the ranks: the first one runs `head`, with nothing loaded yet; returns the exit code."""
    from ggpipe.llama import libllama
    from ggpipe.runtime.process import run_rank

    libllama.set_log_level(2 if verbose else 5)
    if not config.pipeline.auto:
        return run_rank(config, head, report=report)
    from ggpipe.planning.auto import settle

    return run_rank(config, head, settle, report)


def _ranks_here(config: EngineConfig) -> int:
    from ggpipe.planning.auto import ranks_here

    return ranks_here(config)
