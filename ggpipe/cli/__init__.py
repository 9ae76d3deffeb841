"""The command line. Neither importing it nor `--help` starts MPI or loads libllama."""

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
    """Run a command and exit: 0, 1 after a failure, 2 after a user's mistake (with a one-line message)."""
    # NumPy's OpenBLAS would start a thread per core in every process, and ggpipe multiplies no matrices with NumPy.
    os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
        # Until a command handles Ctrl-C, let it end the process: the import machinery would lose a KeyboardInterrupt.
        signal.signal(signal.SIGINT, signal.SIG_DFL)
    sys.stdin = sys.stdin or open(os.devnull)  # noqa: SIM115
    sys.stdout, sys.stderr = (stream or open(os.devnull, "w") for stream in (sys.stdout, sys.stderr))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    # Not os._exit: MPICH disconnects from its launcher only if the process exits normally.
    sys.exit(run(sys.argv[1:] if arguments is None else arguments))


def run(arguments: Sequence[str]) -> int:
    """Run a command, report errors, and return the exit code."""
    try:
        from ggpipe.cli import app  # imported once Ctrl-C is handled

        return app.run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED
