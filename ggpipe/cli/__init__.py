"""The command line. Importing it, and `--help`, start no MPI and load no libllama."""

from __future__ import annotations

import io
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

INTERRUPTED = 130
"""Exit code after Ctrl-C."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0, 1 when something broke, 2 when what was asked for is wrong, with one line."""
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until a command listens, Ctrl-C ends the process: a KeyboardInterrupt would be lost in the import machinery.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # Not os._exit: MPICH takes leave of its launcher only when the process ends in the ordinary way.
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run a command; returns its exit code, errors reported."""
    try:
        from ggpipe.cli import app  # loaded when Ctrl-C is taken care of

        return app.run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
