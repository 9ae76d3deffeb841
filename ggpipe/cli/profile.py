"""`ggpipe profile`: what the machines of a cluster can do, for the simulator and the planner."""

from __future__ import annotations

import io
import math
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from ggpipe.cli.flags import (
    MODEL,
    OUTPUT,
    RANKS,
    ComputeFlags,
    DraftFlags,
    LogFlags,
    ModelFlags,
    RankFlags,
    option,
    takes_flags,
)
from ggpipe.cli.hosts import hosts_of
from ggpipe.cli.ranks import start_n_ranks
from ggpipe.cli.settings import engine_config
from ggpipe.display.files import check_writable
from ggpipe.display.terminal import open_answer, open_terminal
from ggpipe.errors import LaunchError, UsageError
from ggpipe.runtime import launch

if TYPE_CHECKING:
    from ggpipe.sim.profile import Profile
    from ggpipe.transport.base import Transport

_LAYERS = re.compile(r"(\d+)(?:-(\d+))?")
_LOG_WIDTH = 120
_STDOUT = Path("-")


@takes_flags(leave_out=("mpi_layer_split", "threads_draft", "threads_batch_draft"))
def profile(
    model: ModelFlags,
    compute: ComputeFlags,
    ranks: RankFlags,
    draft: DraftFlags,
    log: LogFlags,
    layers: Annotated[
        str | None,
        option("--layers", panel=MODEL, metavar="A-B", help="Layers to measure, both included. Default: some of them."),
    ] = None,
    n_ranks: Annotated[
        int | None,
        option("-r", "--ranks", panel=RANKS, metavar="N", help="Ranks to start. Default: --hostfile's slots, or one."),
    ] = None,
    seconds: Annotated[
        float,
        option("--seconds", panel=OUTPUT, metavar="S", help="How long to measure, without the time it takes to load."),
    ] = 15.0,
    output: Annotated[
        Path | None,
        option("-o", "--output", panel=OUTPUT, metavar="FILE", help="Write the profile, JSON; - is stdout."),
    ] = None,
) -> int:
    """Measure how fast ranks compute a model's layers, their memory, and the links between them.

    Under mpirun or srun on all ranks at once; else it starts them: those of --hostfile, or -r ranks on this machine.
    A table goes to stderr. Without --layers a quarter of the layers is measured, or as many as the time allows. With
    -md each rank also measures all of the draft, with the same threads.
    """
    chosen = _layers(layers)
    if not (math.isfinite(seconds) and seconds > 0):
        raise UsageError(f"--seconds is a time above 0, as in 15; {seconds:g} is not")
    if n_ranks is not None and n_ranks < 1:
        raise UsageError(f"-r is a number of ranks, 1 or more; {n_ranks} is not")
    config = engine_config(model, compute, draft=draft)
    if launch.rank_in_environment() is None:
        n_ranks = n_ranks or (1 if ranks.hostfile is None else len(hosts_of(ranks.hostfile)))
        if n_ranks > 1 or ranks.hostfile is not None:
            return start_n_ranks(n_ranks, ranks.hostfile)

    from ggpipe.engine import libllama
    from ggpipe.runtime.profiling import profile_ranks
    from ggpipe.runtime.rank import run_alike

    def say(line: str) -> None:
        if output is not None and output != _STDOUT:
            check_writable(output)  # here the other ranks hear of a refusal
        print(f"ggpipe: {line}", file=sys.stderr)

    def work(transport: Transport, attend: Callable[[], None]) -> int:
        if n_ranks is not None and n_ranks != transport.size:
            raise LaunchError(f"-r names {n_ranks} ranks, but {transport.size} were started: leave it out, or use one")
        measured = profile_ranks(transport, config, chosen, seconds, attend, say)
        if measured is not None:
            _show(measured)
            _write(measured, output)
        return 0

    libllama.set_log_level(2 if log.verbose else 5)
    return run_alike(config, work)


def _layers(text: str | None) -> tuple[int, int] | None:
    if text is None:
        return None
    match = _LAYERS.fullmatch(text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (1, 0)
    if last < first:
        raise UsageError(f"--layers {text}: write the first and the last layer, as in 4-7, or one layer")
    return first, last + 1


def _write(measured: Profile, output: Path | None) -> None:
    from ggpipe.sim.profile import as_text, write

    if output == _STDOUT:
        stdout = open_answer()
        stdout.write(as_text(measured))
        stdout.flush()
    elif output is not None:
        write(output, measured)


def _show(measured: Profile) -> None:
    from rich.console import Console

    from ggpipe.cli.profile_table import profile_table

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
