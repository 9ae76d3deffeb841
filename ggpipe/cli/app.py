"""The program: runs a command line, and reports errors."""

from __future__ import annotations

import socket
from collections.abc import Sequence

from ggpipe.cli import INTERRUPTED
from ggpipe.cli.messages import flush_stdout, name_variables, reach_front_end, report, show
from ggpipe.errors import GgpipeError, MpiError, RunError, Wording
from ggpipe.launch.environment import end_job, leave_status, rank_in_environment, wait_for_first_rank


def run(arguments: Sequence[str]) -> int:
    """Run a command line, report errors, and return the exit code."""
    error: GgpipeError
    name_variables({})
    try:
        return leave_status(_run(arguments) or flush_stdout())
    except MpiError as e:
        rank, error = rank_in_environment(), e
        if rank is not None:
            if rank > 0:
                error = MpiError(f"rank {rank} ({socket.gethostname()}): ", e)
            if reach_front_end(error):
                return 0
            show(Wording("error: ", error))
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


def _run(arguments: Sequence[str]) -> int:
    if list(arguments) == ["rank"]:
        from ggpipe.cli.commands import rank  # without the options of all commands, which take long to import

        return rank.run()
    from ggpipe.cli.dispatch import dispatch

    return dispatch(arguments)
