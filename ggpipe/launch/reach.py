"""Which machines the launcher reaches now."""

from __future__ import annotations

import contextlib
import os
import subprocess
import tempfile
import time
from collections.abc import Callable, Collection
from pathlib import Path

from ggpipe.launch.environment import die_with_parent, mpi_environment
from ggpipe.launch.hostfile import write_hostfile
from ggpipe.launch.mpirun import find_mpirun, is_open_mpi, kill_session, mpirun_command

_LIMIT_S = 10.0
_TIMES = 4.0  # as long as the slowest machine that was reached: all of them may be busy
_MOST_S = 30.0
_TICK_S = 0.05


def unreachable(hosts: Collection[str], attend: Callable[[], None]) -> set[str]:
    """The machines on which mpirun starts no process within ten seconds, or within a multiple of what others take.

    All are tried at the same time. `attend` is called while it waits, and may raise to give up. Raises LaunchError when
    there is no mpirun.
    """
    mpirun, waiting, away = find_mpirun(), dict[str, subprocess.Popen[bytes]](), set[str]()
    for_hydra = not is_open_mpi(mpirun)
    with tempfile.TemporaryDirectory(prefix="ggpipe-") as folder, contextlib.ExitStack() as stack:
        for i, host in enumerate(dict.fromkeys(hosts)):
            own = Path(folder, str(i))
            write_hostfile(own, [host], for_hydra)
            waiting[host] = subprocess.Popen(
                [*mpirun_command(mpirun, 1, own, ()), "true"],
                env={**os.environ, **mpi_environment()},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
                preexec_fn=die_with_parent,
            )
            stack.callback(_end, waiting[host])
        begun, limit_s = time.monotonic(), _MOST_S
        while waiting and (passed_s := time.monotonic() - begun) < limit_s:
            attend()
            for host in [host for host, process in waiting.items() if process.poll() is not None]:
                if waiting.pop(host).returncode == 0:
                    limit_s = min(max(_LIMIT_S, _TIMES * passed_s), _MOST_S)
                else:
                    away.add(host)
            time.sleep(_TICK_S)
    return away.union(waiting)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Kill it with its remote shells."""
    kill_session(process.pid)
    process.wait()
