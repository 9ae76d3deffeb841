"""`ggpipe profile`: measures the machines of a cluster, for the simulator and the planner."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

from ggpipe.cli.ranks import run_profile
from ggpipe.cluster.profile import Profile, as_text, write
from ggpipe.display.files import check_writable
from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.stdout import Stdout
from ggpipe.display.tables.columns import print_below
from ggpipe.display.tables.profile import profile_table
from ggpipe.errors import LaunchError, Setting
from ggpipe.launch.environment import is_rank
from ggpipe.launch.job import slots_of
from ggpipe.launch.rank_setup import ProfileWork, RankSetup
from ggpipe.options.engine_config import engine_config
from ggpipe.options.option import Options
from ggpipe.options.settings import (
    LogSettings,
    ProfileSettings,
    RankSettings,
)

_STDOUT = Path("-")


def run(options: Options) -> int:
    """Start the ranks, or be one of them. Returns the exit code."""
    settings, hostfile = options[ProfileSettings], options[RankSettings].hostfile
    config, output, wanted = engine_config(options), settings.output, settings.n_ranks
    if output is not None and output != _STDOUT and not is_rank():
        check_writable(output)

    def check(n_ranks: int) -> None:
        if wanted is not None and wanted != n_ranks:
            raise LaunchError(
                Setting("n_ranks"), f" is {wanted}, but {n_ranks} ranks were started: omit it, or set it to {n_ranks}"
            )

    def on_line() -> None:
        if output is not None and output != _STDOUT:
            check_writable(output)  # here, the other ranks learn of an error

    n_ranks = wanted or (1 if is_rank() else len(slots_of(hostfile)) or 1)
    work = ProfileWork(settings.layers, settings.seconds)
    of_ranks = RankSetup(config=config, verbose=options[LogSettings].verbose, profile=work)
    measured = run_profile(of_ranks, n_ranks, hostfile, check, on_line)
    if measured is not None:
        print_below(open_terminal(), functools.partial(profile_table, measured))
        _write(measured, output)
    return 0


def _write(measured: Profile, output: Path | None) -> None:
    if output == _STDOUT:
        Stdout(sys.stdout).write(as_text(measured))
    elif output is not None:
        write(output, measured)
