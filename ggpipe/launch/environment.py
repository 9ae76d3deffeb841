"""What a launcher passes to its processes through the environment, and what a rank passes back to its launcher.

| started by                  | rank                 | number of ranks      |
|-----------------------------|----------------------|----------------------|
| Open MPI                    | OMPI_COMM_WORLD_RANK | OMPI_COMM_WORLD_SIZE |
| PRRTE, srun --mpi=pmix      | PMIX_RANK            |                      |
| MPICH, Intel MPI, --mpi=pmi2| PMI_RANK             | PMI_SIZE             |
| srun, also without MPI      | SLURM_PROCID         | SLURM_STEP_NUM_TASKS |

A Slurm batch script alone also has SLURM_PROCID, in a step of one task.
"""

from __future__ import annotations

import ctypes
import os
import signal
import time
from pathlib import Path

_RANK_VARIABLES = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
_SIZE_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
_STATUS_FILE = "GGPIPE_STATUS_FILE"
_OTHERS_LEAVE_S = 0.3
_OTHERS_LACK_MPI_S = 3.0
_FIRST_RANK_ENDS_S = 5.0  # which makes mpirun end this one
_LAUNCHER_ENDS_S = 1.0  # us, through its mpirun
_PR_SET_PDEATHSIG = 1


def rank_in_environment() -> int | None:
    """This process's rank, before MPI is started; None when no launcher started it."""
    for variable in _RANK_VARIABLES:
        if (rank := _number(variable)) is not None:
            return rank
    if (_number("SLURM_STEP_NUM_TASKS") or 1) > 1:
        return _number("SLURM_PROCID") or 0
    return None


def is_rank() -> bool:
    """A launcher started this process."""
    return rank_in_environment() is not None


def size_in_environment() -> int | None:
    """The number of ranks that the launcher started; None where the launcher does not name it."""
    sizes = [size for variable in _SIZE_VARIABLES if (size := _number(variable)) is not None]
    return sizes[0] if sizes else None


def _number(variable: str) -> int | None:
    text = os.environ.get(variable, "")
    return int(text) if text.isdecimal() else None


def mpi_environment() -> dict[str, str]:
    """What Open MPI wants to know from the environment; others ignore it."""
    environment = {"OMPI_MCA_mpi_yield_when_idle": "1"}
    if os.geteuid() == 0:
        for launcher in ("OMPI", "PRTE"):
            environment[f"{launcher}_ALLOW_RUN_AS_ROOT"] = "1"
            environment[f"{launcher}_ALLOW_RUN_AS_ROOT_CONFIRM"] = "1"
    return environment


class StatusFolder:
    """Files through which ranks on the launcher's machine report to our own launcher what mpirun does not pass on."""

    def __init__(self, folder: Path) -> None:
        """`folder`: a temporary one of the launcher."""
        self._folder = folder
        self._status = folder / "status"
        self._listens = folder / "listens"
        self._over = folder / "over"

    @classmethod
    def in_environment(cls) -> StatusFolder | None:
        """The launcher's; None where it is on another machine, or not ours."""
        path = os.environ.get(_STATUS_FILE)
        return cls(Path(path).parent) if path and Path(path).parent.is_dir() else None

    @property
    def environment(self) -> dict[str, str]:
        """The variable that names it to the ranks."""
        return {_STATUS_FILE: str(self._status)}

    def expect(self, n_ranks: int) -> None:
        """Until it starts MPI, or cannot, each of these ranks counts as starting."""
        for rank in range(n_ranks):
            self._starting(rank).touch()

    def lacks_mpi(self, rank: int) -> None:
        """This rank cannot start MPI."""
        self._starting(rank).unlink(missing_ok=True)

    @property
    def all_lack_mpi(self) -> bool:
        """No rank can start MPI."""
        return not any(self._folder.glob("starting-*"))

    def listen(self) -> None:
        """The first rank listens to signals."""
        self._listens.touch()

    @property
    def first_rank_listens(self) -> bool:
        """The first rank is on this machine and listens to signals."""
        return self._listens.exists()

    def write(self, exit_code: int) -> None:
        """The exit code of the job."""
        self._status.write_text(str(exit_code))

    def end(self) -> None:
        """Everything is said, and no rank waits for another: the launcher is to end mpirun."""
        self._over.touch()

    @property
    def is_over(self) -> bool:
        """A rank called `end`."""
        return self._over.exists()

    def exit_code(self) -> int | None:
        """What the first rank wrote; None when it did not get that far."""
        try:
            return int(self._status.read_text())
        except (OSError, ValueError):
            return None

    def _starting(self, rank: int) -> Path:
        return self._folder / f"starting-{rank}"


def leave_status(exit_code: int) -> int:
    """What this process is to exit with, so that its launcher ends with `exit_code`.

    Only the first rank has an exit code other than 0. mpirun takes the first such exit for a crash and ends the other
    ranks, so the first rank lets them leave first. mpirun also prints many lines about it: our own launcher, when it is
    on this machine, gets the exit code through a file instead.
    """
    rank = rank_in_environment()
    if rank is None:
        return exit_code
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # Python would let it end this process from now on
    if rank > 0:
        return 0
    if (launcher := StatusFolder.in_environment()) is not None:
        launcher.write(exit_code)
        return 0
    if exit_code != 0:
        time.sleep(_OTHERS_LEAVE_S)
    return exit_code


def all_lack_mpi() -> bool:
    """For a rank that cannot start MPI: whether no rank can, so that none of them waits for others and all may end with
    `leave_status`. Else this rank must end with `end_job`.

    Takes up to a few seconds. Only ranks of our own launcher on its own machine can know.
    """
    rank, launcher = rank_in_environment() or 0, StatusFolder.in_environment()
    if launcher is None:
        if rank > 0:
            time.sleep(_FIRST_RANK_ENDS_S)
        return False
    launcher.lacks_mpi(rank)
    deadline = time.monotonic() + _OTHERS_LACK_MPI_S
    while not launcher.all_lack_mpi:
        if time.monotonic() > deadline:
            return False
        time.sleep(0.05)
    return True


def end_job(exit_code: int, at_once: bool = False) -> int:
    """Have mpirun end the other ranks when this process ends. Returns what it is to exit with, if it returns.

    Open MPI ends a job when a process exits with a code that is not 0; MPICH's only when a signal ends a process. With
    `at_once` our own launcher ends mpirun, which may wait for a machine that is cut off, and this process with it.
    """
    if (launcher := StatusFolder.in_environment()) is not None:
        launcher.write(exit_code)
        if at_once:
            launcher.end()
            time.sleep(_LAUNCHER_ENDS_S)
    if "PMI_RANK" in os.environ and "OMPI_COMM_WORLD_RANK" not in os.environ:
        os.kill(os.getpid(), signal.SIGTERM)
    return exit_code


def die_with_parent() -> None:
    """Have the kernel end this process when its parent is gone: for a rank its mpirun, or mpirun's daemon."""
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
