"""`ggpipe rank`: a rank of a Python program's engine."""

from __future__ import annotations

from ggpipe.channel.client import StartedRanks
from ggpipe.cli.launching import run_command
from ggpipe.errors import UsageError
from ggpipe.launch import environment
from ggpipe.options.engine_config import engine_config
from ggpipe.options.option import Options


def run(options: Options) -> int:
    """Serve the program that started it. The exit code."""
    if not environment.is_served():
        raise UsageError("`ggpipe rank` is started by Python programs, see `ggpipe.Engine`; use `ggpipe generate`")
    return run_command(engine_config(options), options, _no_front_end)


def _no_front_end(_: StartedRanks) -> int:
    raise AssertionError("the front end is at the other end of the channel")
