"""ggpipe as its users start it: child processes with a time limit, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

from ggpipe.launch.environment import mpi_environment
from ggpipe.launch.mpirun import find_mpirun, is_open_mpi, mpirun_command

ROOT = Path(__file__).parents[2]
TARGET = ROOT / "ggpipe" / "models" / "tales-target.gguf"
SPLITS = {1: (), 2: ("--mpi-layer-split", "0.5,0.5"), 3: ("--mpi-layer-split", "0.4,0.3,0.3"),
          4: ("--mpi-layer-split", "0.25,0.25,0.25,0.25")}  # fmt: skip
HANG_S = 300.0
"""Far beyond what anything here takes, on a machine that does much else: only what hangs gets there."""


def ggpipe(
    *arguments: object, timeout: float = HANG_S, cwd: Path = ROOT, **environment: str
) -> subprocess.CompletedProcess[str]:
    """`ggpipe ARGUMENTS`, which starts its own mpirun when it needs one."""
    return _run([sys.executable, "-P", "-m", "ggpipe", *map(str, arguments)], timeout, environment, cwd)


def output(*arguments: object) -> str:
    """What `ggpipe ARGUMENTS` writes to stdout; it must end well."""
    result = ggpipe(*arguments)
    assert result.returncode == 0, (result.returncode, result.stdout, result.stderr)
    return result.stdout


def mpirun(n_ranks: int, *arguments: object, timeout: float = HANG_S) -> subprocess.CompletedProcess[str]:
    """`mpirun -n N ggpipe ARGUMENTS`, as a user of a cluster writes it."""
    start = mpirun_command(find_mpirun(), n_ranks, None, ())
    command = [*start, sys.executable, "-m", "ggpipe", *map(str, arguments)]
    return _run(command, timeout, mpi_environment())


def on_ranks(
    n_ranks: int, script: str, *arguments: object, timeout: float = HANG_S
) -> subprocess.CompletedProcess[str]:
    """A Python script, which may import `support`, on all ranks of an mpirun."""
    start = mpirun_command(find_mpirun(), n_ranks, None, ())
    environment = {**mpi_environment(), "PYTHONPATH": str(ROOT / "tests")}
    return _run([*start, sys.executable, "-c", script, *map(str, arguments)], timeout, environment)


def names_killed(rank: int, text: str) -> bool:
    """The text says that this rank was killed, or under MPICH that one was: its mpirun may name any that it ends."""
    return f"rank {rank} (" in text or ("a rank ended: signal 9 (Killed)" in text and not is_open_mpi(find_mpirun()))


def _run(
    command: list[str], timeout: float, environment: dict[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=cwd,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command} hangs; stdout {out[-500:]!r} stderr {err[-2000:]!r}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ranks_of(marker: str) -> dict[int, int]:
    """Rank -> process id of all running ranks that `processes_with` finds."""
    found = {}
    for folder in map(Path, map("/proc/{}".format, processes_with(marker))):
        with contextlib.suppress(OSError, ValueError):
            for entry in (folder / "environ").read_bytes().split(b"\0"):
                name, _, value = entry.partition(b"=")
                if name in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"):
                    found[int(value)] = int(folder.name)
    return found


def processes_with(marker: str) -> list[int]:
    """Ids of all processes that have `marker` in their command line, or were started by a `marked` program."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            words, variables = ((folder / name).read_bytes() for name in ("cmdline", "environ"))
            is_marked = f"{_MARK}={marker}".encode() in variables.split(b"\0")
            if int(folder.name) != os.getpid() and (marker.encode() in words or is_marked):
                found.append(int(folder.name))
    return found


def marked(marker: str) -> dict[str, str]:
    """A variable of a program, by which `ranks_of` and `processes_with` find the ranks that it starts."""
    return {_MARK: marker}


_MARK = "GGPIPE_TEST"


def wait_for(condition: object, timeout: float = HANG_S) -> None:
    """Wait until a function returns something true."""
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


class Job:
    """A generation that goes on until something ends it: `launch` and then `ggpipe generate` with these `arguments`."""

    def __init__(
        self, marker: str, *arguments: object, launch: Sequence[str] = (), stdout: int = subprocess.PIPE
    ) -> None:
        self.marker = f"endless-{marker}-{os.getpid()}.json"
        self.text = ""
        command = [*launch, sys.executable, "-P", "-m", "ggpipe", "generate", "-m", str(TARGET)]
        command += ["-f", "prompts/tale.txt", "-n", "1000000", "-c", "300000", "--ignore-eos", "-t", "1"]
        command += ["--json", f"/tmp/{self.marker}", *map(str, arguments)]
        self.process = subprocess.Popen(
            command, env={**os.environ, **mpi_environment(), **marked(self.marker)}, cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=stdout,
            stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        if stdout == subprocess.PIPE:
            threading.Thread(target=self._read, daemon=True).start()

    def waits_for(self, condition: object) -> None:
        """Wait until a function returns something true; the job ends when it does not."""
        try:
            wait_for(condition)
        except AssertionError:
            self.kill()
            raise

    def kill(self) -> None:
        """End it at once."""
        os.killpg(self.process.pid, signal.SIGKILL)

    def _read(self) -> None:
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 4096):
            self.text += data.decode(errors="replace")

    def ends(self, within_s: float = HANG_S) -> tuple[int, str]:
        """Exit code and stderr; nothing of it is left, no text was lost, and there was no traceback."""
        before = self.text
        try:
            code = self.process.wait(timeout=within_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        wait_for(lambda: not processes_with(self.marker))
        assert self.process.stderr is not None
        error = self.process.stderr.read().decode()
        assert self.text.startswith(before)
        assert "Traceback" not in error
        Path("/tmp", self.marker).unlink(missing_ok=True)
        return code, error


class Endless(Job):
    """A job of three ranks that has written some text. `arguments` instead of the usual split."""

    def __init__(self, marker: str, *arguments: object) -> None:
        super().__init__(marker, *(arguments or SPLITS[3]))
        self.waits_for(lambda: len(self.text) > 200)
        self.ranks = ranks_of(self.marker)
        assert sorted(self.ranks) == [0, 1, 2]
