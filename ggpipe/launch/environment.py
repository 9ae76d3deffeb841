"""What launchers tell their processes through the environment, and ranks their launcher when they end.

| started by                  | rank                 | number of ranks      |
|-----------------------------|----------------------|----------------------|
| Open MPI                    | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE |
| PRRTE, srun --mpi=pmix      | PMIX_RANK            |                      |
| MPICH, Intel MPI, --mpi=pmi2| PMI_RANK             | PMI_SIZE             |
| srun, also without MPI      | SLURM_PROCID         | SLURM_STEP_NUM_TASKS |

A Slurm batch script alone also has SLURM_PROCID, in a step of one task.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import socket
import time

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
CHANNEL_VARIABLES = ("GGPIPE_CHANNEL", "GGPIPE_CHANNEL_SECRET")
"""Where our own launcher's front end listens, and what its ranks prove themselves with."""
_OTHERS_LEAVE_S = 0.3
_FIRST_RANK_ENDS_S = 5.0  # which makes mpirun end this one
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded before a fork: other threads may hold the loader's lock then


def rank_in_environment() -> int | None:
    """This process's rank, before MPI is started; None when no launcher started it."""
    for variable in _RANK_VARIABLES:
        if (rank := _number(variable)) is not None:
            return rank
    if is_srun():
        return _number("SLURM_PROCID") or 0
    return None


def is_rank() -> bool:
    """A launcher started this process."""
    return rank_in_environment() is not None


def is_srun() -> bool:
    """srun started this process, or the launcher that did."""
    return (_number("SLURM_STEP_NUM_TASKS") or 1) > 1


def is_served() -> bool:
    """Our own launcher started this rank: its front end is at the other end of a channel."""
    return CHANNEL_VARIABLES[0] in os.environ


def has_user() -> bool:
    """This process is the front end: no rank, or the first one under the user's own mpirun."""
    return rank_in_environment() in (None, 0) and not is_served()


def size_in_environment() -> int | None:
    """The number of ranks that the launcher started; None where the launcher does not name it."""
    sizes = [size for variable in _SIZE_VARIABLES if (size := _number(variable)) is not None]
    return sizes[0] if sizes else None


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def mpi_environment() -> dict[str, str]:
    """What mpirun wants to know from the environment; others ignore it.

    In a Slurm job mpirun starts its daemons with srun, which would wait for ever for the cores of a step that has them:
    one that ends on a machine that was lost, or the one that this process is in.
    """
    environment = {"OMPI_MCA_mpi_yield_when_idle": "1", "SLURM_OVERLAP": "1"}
    if os.geteuid() == 0:
        for launcher in ("OMPI", "PRTE"):
            environment[f"{launcher}_ALLOW_RUN_AS_ROOT"] = "1"
            environment[f"{launcher}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return environment


def session_folder(path: str) -> dict[str, str]:
    """Variables that have mpirun keep its files on this machine in the folder `path`.

    Open MPI names them after its process. One that was killed leaves them behind, and a later one with the same process
    id would not start.
    """
    return {"PRTE_MCA_prte_local_tmpdir_base": path, "OMPI_MCA_orte_local_tmpdir_base": path}


def leave_status(exit_code: int) -> int:
    """What this process is to exit with, so that its launcher ends with `exit_code`.

    Only the first rank has an exit code other than 0. mpirun takes the first such exit for a crash and ends the other
    ranks, so the first rank lets them leave first.
    """
    rank = rank_in_environment()
    if rank is None:
        return exit_code
    if rank > 0 or is_served():  # our launcher has the exit code from its front end
        return 0
    if exit_code != 0:
        time.sleep(_OTHERS_LEAVE_S)
    return exit_code


def wait_for_first_rank() -> None:
    """For another rank that cannot start MPI: let the first one report that, if it cannot either, and end the job."""
    time.sleep(_FIRST_RANK_ENDS_S)


def end_job(exit_code: int) -> int:
    """Have mpirun end the other ranks when this process ends. Returns what it is to exit with, if it returns.

    Open MPI ends a job when a process exits with a code that is not 0; MPICH's only when a signal ends a process.
    """
    if "PMI_RANK" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
    return exit_code


def notify_systemd(state: str) -> None:
    """Tell systemd how a service stands, `READY=1`, where it wants to know that (`Type=notify`)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


def die_with_parent() -> None:
    """Have the kernel end this process when its parent is gone: for a rank its mpirun, or mpirun's daemon."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
