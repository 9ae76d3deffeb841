"""ggpipe as its users start it: child processes with a time limit, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

from ggpipe.runtime import launch

ROOT = Path(__file__).parents[1]
TARGET = ROOT / "ggpipe" / "models" / "tales-target.gguf"
SPLITS = {1: (), 2: ("--mpi-layer-split", "0.5,0.5"), 3: ("--mpi-layer-split", "0.4,0.3,0.3"),
          4: ("--mpi-layer-split", "0.25,0.25,0.25,0.25")}  # fmt: skip


def ggpipe(*arguments: object, timeout: float = 120, **environment: str) -> subprocess.CompletedProcess[str]:
    """`ggpipe ARGUMENTS`, which starts its own mpirun when it needs one."""
    return _run([sys.executable, "-m", "ggpipe", *map(str, arguments)], timeout, environment)


def mpirun(n_ranks: int, *arguments: object, timeout: float = 120) -> subprocess.CompletedProcess[str]:
    """`mpirun -n N ggpipe ARGUMENTS`, as a user of a cluster writes it."""
    start = launch.mpirun_command(launch.find_mpirun(), n_ranks, None, ())
    command = [*start, sys.executable, "-m", "ggpipe", *map(str, arguments)]
    return _run(command, timeout, launch.mpi_environment())


def _run(command: list[str], timeout: float, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    process = subprocess.Popen(
        command, env={**os.environ, **environment}, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True, cwd=ROOT,
    )  # fmt: skip
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        out, err = process.communicate()
        raise AssertionError(f"{command} hangs; stdout {out[-500:]!r} stderr {err[-2000:]!r}") from None
    return subprocess.CompletedProcess(command, process.returncode, out, err)


def ranks_of(marker: str) -> dict[int, int]:
    """Rank -> process id of all running ranks that have `marker` in their command line."""
    found = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if not folder.name.isdigit() or marker.encode() not in (folder / "cmdline").read_bytes():
                continue
            environment = (folder / "environ").read_bytes().split(b"\0")
            for entry in environment:
                name, _, value = entry.partition(b"=")
                if name in (b"OMPI_COMM_WORLD_RANK", b"PMI_RANK"):
                    found[int(value)] = int(folder.name)
    return found


def processes_with(marker: str) -> list[int]:
    """Ids of all processes that have `marker` in their command line, but for this one."""
    found = []
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            if marker.encode() in (folder / "cmdline").read_bytes() and int(folder.name) != os.getpid():
                found.append(int(folder.name))
    return found


def wait_for(condition: object, timeout: float = 30) -> None:
    """Wait until a function returns something true."""
    deadline = time.monotonic() + timeout
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.05)


class Endless:
    """A generation on three ranks that goes on until something ends it. `arguments` instead of the usual split."""

    def __init__(self, marker: str, *arguments: object) -> None:
        self.marker = f"endless-{marker}-{os.getpid()}.json"
        self.text = ""
        command = ["generate", "-m", str(TARGET), "-f", "prompts/tale.txt", "-n", "1000000", "-c", "300000"]
        command += ["--ignore-eos", "-t", "1", "--json", f"/tmp/{self.marker}", *map(str, arguments or SPLITS[3])]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "ggpipe", *command],
            cwd=ROOT, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        threading.Thread(target=self._read, daemon=True).start()
        try:
            wait_for(lambda: len(self.text) > 200, 60)
            self.ranks = ranks_of(self.marker)
            assert sorted(self.ranks) == [0, 1, 2]
        except AssertionError:
            os.killpg(self.process.pid, signal.SIGKILL)
            raise

    def _read(self) -> None:
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 4096):
            self.text += data.decode(errors="replace")

    def ends(self, within_s: float) -> tuple[int, str]:
        before = self.text
        code = self.process.wait(timeout=within_s)
        wait_for(lambda: not processes_with(self.marker), 2)
        assert self.process.stderr is not None
        error = self.process.stderr.read().decode()
        assert self.text.startswith(before)
        assert "Traceback" not in error
        Path("/tmp", self.marker).unlink(missing_ok=True)
        return code, error
