"""The program: reads a command line and runs its command, whose module is loaded then, and no other one."""

from __future__ import annotations

import importlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import typer

from ggpipe.cli import INTERRUPTED
from ggpipe.cli.foreign import without_foreign
from ggpipe.cli.messages import flush_stdout, name_variables, reach_front_end, report, show, warn
from ggpipe.cli.mistakes import check_command, explained
from ggpipe.cli.parsing import default_map, make_app
from ggpipe.cli.variables import read_variables
from ggpipe.errors import GgpipeError, MpiError, RunError, UsageError
from ggpipe.launch.environment import end_job, leave_status, rank_in_environment, wait_for_first_rank
from ggpipe.options.commands import COMMANDS
from ggpipe.options.option import Command, Option, Options
from ggpipe.options.table import OPTIONS


def run(arguments: Sequence[str]) -> int:
    """Run a command line, made fit for typer (`cli/argv.py`). Returns its exit code; errors are reported."""
    error: GgpipeError
    variables: dict[str, Any] = {}
    rows: list[Option] = []
    name_variables({})
    try:
        check_command(COMMANDS, arguments)
        for own in COMMANDS:
            if own.name in arguments[:1]:
                rows = own.options(OPTIONS)
                arguments = [own.name, *without_foreign(rows, arguments[1:])]
                variables[own.name] = default_map(read_variables(own, OPTIONS, os.environ, warn))
        program = make_app(COMMANDS, OPTIONS, _call, arguments, name_variables)
        code = program(list(arguments), standalone_mode=False, prog_name="ggpipe", default_map=variables)
        return leave_status(int(code or 0) or flush_stdout())
    except typer.Exit as e:
        return leave_status(e.exit_code or flush_stdout())
    except typer.TyperException as e:
        if not e.format_message():  # the help was shown, since nothing was asked for
            return leave_status(UsageError.exit_code)
        error = UsageError(explained(e, rows, arguments[1:]))
    except MpiError as e:
        rank, error = rank_in_environment(), e
        if rank is not None:
            if rank > 0:
                error = MpiError(f"rank {rank} ({socket.gethostname()}): {e}")
            if reach_front_end(error):
                return 0
            show(f"error: {error}")
            if rank > 0:
                wait_for_first_rank()
            return end_job(e.exit_code)
    except GgpipeError as e:
        error = e
    except OSError as e:
        error = RunError(": ".join(str(part) for part in (e.filename, e.strerror or e) if part))
    except KeyboardInterrupt:
        return leave_status(INTERRUPTED)
    report(error)
    return leave_status(error.exit_code)


def _call(command: Command, options: Options) -> int:
    """A command's module has one public function, `run`."""
    code: int = importlib.import_module(f"ggpipe.cli.commands.{command.name}").run(options)
    return code
