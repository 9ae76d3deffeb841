"""What launchers tell processes in environment variables, and what ranks tell launchers by their exit codes.

| started by                  | rank                 | number of ranks      |
|-----------------------------|----------------------|----------------------|
| Open MPI                    | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE |
| PRRTE, srun --mpi=pmix      | PMIX_RANK            |                      |
| MPICH, Intel MPI, --mpi=pmi2| PMI_RANK             | PMI_SIZE             |
| srun, also without MPI      | SLURM_PROCID         | SLURM_STEP_NUM_TASKS |

A Slurm batch script has SLURM_PROCID as well, in a step of one task.
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
"""The address of the front end that has started this rank, and the secret that the rank must present."""
_OTHERS_LEAVE_S = 0.3
_FIRST_RANK_ENDS_S = 5.0  # which makes mpirun terminate this one
_PR_SET_PDEATHSIG = 1
_LIBC = ctypes.CDLL(None)  # loaded now: after a fork, another thread may hold the loader's lock


def rank_in_environment() -> int | None:
    """Rank of this process, before MPI is started; None without a launcher."""
    for variable in _RANK_VARIABLES:
        if (rank := _number(variable)) is not None:
            return rank
    if is_srun():
        return _number("SLURM_PROCID") or 0
    return None


def is_rank() -> bool:
    """Whether a launcher has started this process."""
    return rank_in_environment() is not None


def is_srun() -> bool:
    """Whether srun has started this process, or its launcher."""
    return (_number("SLURM_STEP_NUM_TASKS") or 1) > 1


def is_served() -> bool:
    """Whether ggpipe has started this rank, whose front end is at the other end of a channel."""
    return CHANNEL_VARIABLES[0] in os.environ


def has_user() -> bool:
    """Whether this process is the front end: not a rank, or the first one under the user's own mpirun."""
    return rank_in_environment() in (None, 0) and not is_served()


def size_in_environment() -> int | None:
    """Number of ranks that the launcher has started, or None if the launcher does not say."""
    sizes = [size for variable in _SIZE_VARIABLES if (size := _number(variable)) is not None]
    return sizes[0] if sizes else None


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def mpi_environment() -> dict[str, str]:
    """Environment variables for mpirun.

    In a Slurm job, mpirun starts its daemons with srun. Without SLURM_OVERLAP, srun would wait forever for cores that
    another step occupies: one on a machine that was lost, or the step of this process.
    """
    environment = {"OMPI_MCA_mpi_yield_when_idle": "1", "SLURM_OVERLAP": "1"}
    if os.geteuid() == 0:
        for launcher in ("OMPI", "PRTE"):
            environment[f"{launcher}_ALLOW_RUN_AS_ROOT"] = "1"
            environment[f"{launcher}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return environment


def keepalive() -> dict[str, str]:
    """Environment variables that make Open MPI's daemons look for mpirun every few seconds.

    A daemon that was cut off when its mpirun ended finds out when the network is back, instead of after five minutes.
    One that stays cut off gives up after ten minutes, not much later than by default.
    """
    seconds = {"time": "10", "intvl": "5", "probes": "120"}
    return {f"PRTE_MCA_oob_tcp_keepalive_{name}": value for name, value in seconds.items()}


def session_folder(path: str) -> dict[str, str]:
    """Environment variables that make mpirun keep its files on this machine in the folder `path`.

    Open MPI names its files after its process id. If it is killed, they remain, and a later mpirun with the same
    process id would not start.
    """
    return {"PRTE_MCA_prte_local_tmpdir_base": path, "OMPI_MCA_orte_local_tmpdir_base": path}


def leave_status(exit_code: int) -> int:
    """The exit code for this process, so that its launcher exits with `exit_code`.

    Only the first rank has an exit code other than 0. mpirun mistakes that for a crash and terminates the other ranks,
    so the first rank lets them exit before.
    """
    rank = rank_in_environment()
    if rank is None:
        return exit_code
    if rank > 0 or is_served():  # our launcher gets the exit code from its front end
        return 0
    if exit_code != 0:
        time.sleep(_OTHERS_LEAVE_S)
    return exit_code


def wait_for_first_rank() -> None:
    """Let the first rank report the same error and end the job. For other ranks, if they cannot start MPI."""
    time.sleep(_FIRST_RANK_ENDS_S)


def end_job(exit_code: int) -> int:
    """Make mpirun terminate the other ranks when this process exits. Returns the exit code for this process.

    Open MPI ends a job if a process exits with a code other than 0; MPICH only if a signal kills a process, so this
    does not return then.
    """
    if "PMI_RANK" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
    return exit_code


def notify_systemd(state: str) -> None:
    """Tell systemd the state of this service, such as `READY=1`, if it asks for it (`Type=notify`)."""
    address = os.environ.get("NOTIFY_SOCKET", "")
    if address:
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as own:
            own.sendto(state.encode(), f"\0{address[1:]}" if address.startswith("@") else address)


def die_with_parent() -> None:
    """Make the kernel terminate this process when its parent is gone (for a rank, mpirun or its daemon)."""
    _LIBC.prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
