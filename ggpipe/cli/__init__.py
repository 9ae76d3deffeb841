"""The command line. Importing it, and `--help`, start no MPI and load no libllama."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import NoReturn

from ggpipe.cli.arguments import normalise
from ggpipe.errors import GgpipeError, UsageError


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run a command and exit: 0, 1 when something broke, 2 when what was asked for is wrong, with one line."""
    # Not os._exit: MPICH says goodbye to its launcher only when the process ends in the ordinary way.
    sys.exit(run(normalise(sys.argv[1:] if arguments is None else arguments)))


def run(arguments: Sequence[str]) -> int:
    """Run a command; returns its exit code, errors printed (on the first rank only)."""
    import typer
    from typer._click.exceptions import ClickException

    from ggpipe.cli.app import app
    from ggpipe.runtime.launch import leave_status, rank_in_environment

    try:
        code = app(list(arguments), standalone_mode=False, prog_name="ggpipe")
        return leave_status(int(code or 0))
    except typer.Exit as e:
        return leave_status(e.exit_code)
    except ClickException as e:
        error: GgpipeError = UsageError(e.format_message().replace("\n", " "))
    except GgpipeError as e:
        error = e
    except KeyboardInterrupt:
        return 130
    if rank_in_environment() in (None, 0):
        sys.stdout.flush()
        print(f"ggpipe: error: {error}", file=sys.stderr)
    return leave_status(error.exit_code)
