"""`ggpipe profile`: what the machines of a cluster can do, for the simulator and the planner."""

from __future__ import annotations

import io
import sys
from collections.abc import Callable
from pathlib import Path

from rich.console import Console

from ggpipe.cli.engine_config import engine_config
from ggpipe.cli.launching import start_n_ranks
from ggpipe.cli.messages import report, show
from ggpipe.cli.parsing import Options
from ggpipe.cli.settings import (
    Log,
    ProfileSettings,
    Ranks,
)
from ggpipe.cluster.profile import Profile, as_text, write
from ggpipe.display.files import check_writable
from ggpipe.display.live.terminal import open_terminal
from ggpipe.display.stdout import open_stdout
from ggpipe.display.tables.profile import profile_table
from ggpipe.errors import LaunchError
from ggpipe.launch.environment import rank_in_environment
from ggpipe.launch.hostfile import hosts_of
from ggpipe.llama import libllama
from ggpipe.measure.profile import profile_ranks
from ggpipe.runtime.process import run_alike
from ggpipe.transport.base import Transport

_LOG_WIDTH = 120
_STDOUT = Path("-")


def run(options: Options) -> int:
    """Start the ranks, or be one of them; the exit code."""
    settings, hostfile = options[ProfileSettings], options[Ranks].hostfile
    config, n_ranks = engine_config(options), settings.n_ranks
    if rank_in_environment() is None:
        n_ranks = n_ranks or (1 if hostfile is None else len(hosts_of(hostfile)))
        if n_ranks > 1 or hostfile is not None:
            return start_n_ranks(n_ranks, hostfile)

    def announce(line: str) -> None:
        if settings.output is not None and settings.output != _STDOUT:
            check_writable(settings.output)  # here the other ranks learn of a refusal
        show(line)

    def work(transport: Transport, attend: Callable[[], None]) -> Profile | None:
        if n_ranks is not None and n_ranks != transport.size:
            raise LaunchError(
                f"`n_ranks` is {n_ranks}, but {transport.size} ranks were started: leave it out, or set it to that"
            )
        return profile_ranks(transport, config, settings.layers, settings.seconds, attend, announce)

    libllama.set_log_level(2 if options[Log].verbose else 5)
    measured = run_alike(config, work, report)
    if measured is not None:
        _show(measured)
        _write(measured, settings.output)
    return 0


def _write(measured: Profile, output: Path | None) -> None:
    if output == _STDOUT:
        open_stdout().write(as_text(measured))
    elif output is not None:
        write(output, measured)


def _show(measured: Profile) -> None:
    terminal = open_terminal()
    if terminal is not None:
        terminal.measure()
        terminal.console.print(profile_table(measured, terminal.console.width))
        terminal.close()
        return
    plain = io.StringIO()
    Console(file=plain, width=_LOG_WIDTH, color_system=None, force_terminal=False, markup=False).print(
        profile_table(measured, _LOG_WIDTH)
    )
    print("\n".join(line.rstrip() for line in plain.getvalue().splitlines()), file=sys.stderr)
