"""What the command line prints on stderr, with flags for the names of settings in messages; and the end of stdout."""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Mapping

from ggpipe.display.live.terminal import open_launcher_stderr
from ggpipe.errors import GgpipeError, RunError, SilentRankError, Terminated, Wording
from ggpipe.launch.environment import is_served, rank_in_environment
from ggpipe.options.table import OPTIONS

SPELLINGS = {row.name: row.spelling for row in reversed(OPTIONS)}
"""How the command line calls a setting, by the name that messages have for it."""

_variables: Mapping[str, str] = {}
"""Environment variables that values came from, by the names of the settings: messages name them instead of flags."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f\u2028\u2029]")


def name_variables(variables: Mapping[str, str]) -> None:
    """From now on messages name these environment variables, by the names of the settings that they gave values to."""
    global _variables
    _variables = dict(variables)


def in_flags(message: str | Wording | GgpipeError) -> str:
    """A message as text, with flags in the place of settings: -c/--ctx-size for `n_ctx`, or the environment variable
    that its value came from."""
    return Wording(message).spelled(lambda name: _variables.get(name) or SPELLINGS.get(name) or f"`{name}`")


def show(message: str | Wording) -> None:
    """Print a message of the library, or of a command, as one line, whatever the names of files in it are."""
    line = _CONTROL.sub(lambda match: repr(match[0])[1:-1], in_flags(message))
    print(f"ggpipe: {line}", file=sys.stderr)


def warn(message: str | Wording) -> None:
    """Print a warning."""
    show(Wording("warning: ", message))


def print_past_mpirun(error: GgpipeError) -> None:
    """To be called before anything is printed after an error: mpirun passes nothing on while it ends its ranks."""
    if isinstance(error, Terminated) and (stderr := open_launcher_stderr()) is not None:
        sys.stderr = stderr


def report(error: GgpipeError) -> None:
    """Print an error as one line, once; on the first rank only, unless that one is silent. Where a front end is served,
    it gets the error."""
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
    """Have the front end that this rank is to serve report why the rank cannot start; False where there is none."""
    if not is_served():
        return False
    from ggpipe.channel import link  # other processes report without it

    return link.report(error)


def flush_stdout() -> int:
    """Exit code 1 when what was printed cannot be written; then it is dropped, or Python would fail with it at exit."""
    try:
        sys.stdout.flush()
        return 0
    except OSError as e:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not isinstance(e, BrokenPipeError):
            report(RunError(f"cannot write to stdout: {e.strerror}"))
        return 1
