"""Finds out which machines mpirun can reach now, and why not the others."""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection, Mapping
from pathlib import Path

from ggpipe.errors import StartError
from ggpipe.launch.environment import die_with_parent, mpi_environment, session_folder
from ggpipe.launch.hostfile import write_hostfile
from ggpipe.launch.mpirun import find_mpirun, is_open_mpi, kill_session, mpirun_command
from ggpipe.launch.remote_shell import ask_all, is_this_machine, why_unreached

_LIMIT_S = 10.0
_TIMES = 4.0  # times the slowest machine that was reached: all of them may be busy
_MOST_S = 30.0
_TICK_S = 0.05
_MARK = b"reached"
_OTHER_LAUNCHERS = (
    "SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "JOB_ID", "HYDRA_LAUNCHER", "HYDRA_BOOTSTRAP", "PRTE_MCA_plm",
    "OMPI_MCA_plm",
)  # fmt: skip
"""Variables that make mpirun start its daemons by something else than the remote shell."""


def faults(hosts: Collection[str], limit_s: float, attend: Callable[[], None]) -> dict[str, str]:
    """The machines that the remote shell cannot reach within the limit, each with what is wrong and what to do.

    Empty in jobs of a resource manager, where mpirun needs no remote shell. `attend` is called while waiting, and may
    raise. Raises StartError if a remote shell cannot be started.
    """
    others = [host for host in dict.fromkeys(hosts) if not is_this_machine(host)]
    if not others or any(name in os.environ for name in _OTHER_LAUNCHERS):
        return {}
    try:
        answers = ask_all(others, ["echo", _MARK.decode()], limit_s, attend)
    except OSError as e:
        raise StartError(f"cannot start a remote shell to look for machines: {e}") from e
    found = {host: why_unreached(host, answer, limit_s) for host, answer in answers.items()}
    return {host: f"{problem}: {cure}" for host, (problem, cure) in found.items() if problem}


def described(faults: Mapping[str, str]) -> str:
    """The faults as a sentence."""
    return "; ".join(f"{host} cannot be reached: {fault}" for host, fault in faults.items())


def unreachable(hosts: Collection[str], attend: Callable[[], None]) -> set[str]:
    """The machines on which mpirun starts no process within ten seconds, or within a multiple of the others' time.

    All machines are tried at the same time. A process has started when its output arrives: mpirun itself may never exit
    (seen in Slurm jobs, with several at a time). `attend` is called while waiting, and may raise to give up.
    Raises LaunchError if there is no mpirun, StartError if it cannot be started.
    """
    try:
        return _unreachable(hosts, attend)
    except OSError as e:  # no space for files, or too many processes
        raise StartError(f"cannot start mpirun to look for machines: {e}") from e


def _unreachable(hosts: Collection[str], attend: Callable[[], None]) -> set[str]:
    mpirun, printed = find_mpirun(), dict.fromkeys(hosts, b"")
    for_hydra = not is_open_mpi(mpirun)
    files = tempfile.TemporaryDirectory(prefix="ggpipe-", ignore_cleanup_errors=True)  # mpirun's, which it may leave
    with files as folder, contextlib.ExitStack() as stack:
        waiting = stack.enter_context(selectors.DefaultSelector())
        for i, host in enumerate(printed):
            own = Path(folder, str(i))
            write_hostfile(own, [host], for_hydra)
            process = subprocess.Popen(
                [*mpirun_command(mpirun, 1, own, ()), "echo", _MARK],
                env={**session_folder(folder), **os.environ, **mpi_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            stack.callback(_end, process)
            assert process.stdout is not None
            waiting.register(stack.enter_context(process.stdout), selectors.EVENT_READ, host)
        begun, limit_s = time.monotonic(), _MOST_S
        while waiting.get_map() and (passed_s := time.monotonic() - begun) < limit_s:
            attend()
            for key, _ in waiting.select(_TICK_S):
                more = os.read(key.fd, 4096)
                printed[key.data] += more
                is_there = _MARK in printed[key.data]
                if is_there or not more:
                    waiting.unregister(key.fileobj)
                if is_there:
                    limit_s = min(max(_LIMIT_S, _TIMES * passed_s), _MOST_S)
    return {host for host, text in printed.items() if _MARK not in text}


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill mpirun and its remote shells."""
    kill_session(process.pid)
    process.wait()
