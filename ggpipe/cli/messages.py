"""Messages on stderr, in which settings are called by their flags; and flushing stdout at the end."""

from __future__ import annotations

import contextlib
import functools
import os
import re
import sys
from collections.abc import Mapping

from ggpipe.errors import GgpipeError, RunError, SilentRankError, Terminated, Wording
from ggpipe.launch.environment import is_served, rank_in_environment

_variables: Mapping[str, str] = {}
"""Environment variable of each setting whose value comes from one: messages name it instead of the flag."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


@functools.cache
def spellings() -> Mapping[str, str]:
    """Flag of each setting, by the name that messages use for the setting."""
    from ggpipe.options.table import OPTIONS  # slow to import, and ranks have no options

    return {row.name: row.spelling for row in reversed(OPTIONS)}


def name_variables(variables: Mapping[str, str]) -> None:
    """Make messages name these environment variables (by setting) instead of flags."""
    global _variables
    _variables = dict(variables)


def in_flags(message: str | Wording | GgpipeError) -> str:
    """The message as text, with -c/--ctx-size for `n_ctx`, or with the environment variable that set it."""
    return Wording(message).spelled(lambda name: _variables.get(name) or spellings().get(name) or f"`{name}`")


def show(message: str | Wording) -> None:
    """Print a message as one line, even if it contains file names with control characters."""
    line = _CONTROL.sub(lambda match: repr(match[0])[1:-1], in_flags(message))
    print(f"ggpipe: {line}", file=sys.stderr)


def warn(message: str | Wording) -> None:
    """Print a warning."""
    show(Wording("warning: ", message))


def print_past_mpirun(error: GgpipeError) -> None:
    """Call this before printing anything after an error: mpirun forwards no output while it terminates its ranks."""
    if isinstance(error, Terminated):
        from ggpipe.display.live.terminal import open_launcher_stderr  # Rich is slow to import

        sys.stderr = open_launcher_stderr() or sys.stderr


def report(error: GgpipeError) -> None:
    """Print an error as one line, once, and on the first rank only, unless that rank is silent. A rank that ggpipe has
    started sends the error to its front end instead."""
    if error.is_reported or (rank_in_environment() not in (None, 0) and not isinstance(error, SilentRankError)):
        return
    error.is_reported = True
    if reach_front_end(error):
        return
    print_past_mpirun(error)
    flush_stdout()
    with contextlib.suppress(OSError):
        show(Wording("error: ", error))


def reach_front_end(error: GgpipeError) -> bool:
    """Tell the front end why this rank cannot start. Returns False if ggpipe has not started this rank."""
    if not is_served():
        return False
    from ggpipe.channel import link  # slow to import, and only ranks need it

    return link.report(error)


def flush_stdout() -> int:
    """Flush stdout, and return the exit code: 1 if that fails. The output is then dropped, so that Python does not try
    again at exit."""
    try:
        sys.stdout.flush()
        return 0
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(e, BrokenPipeError):
            report(RunError(f"cannot write to stdout: {e.strerror}"))
        return 1
