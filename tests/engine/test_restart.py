"""`--restart`: ranks that are killed, stopped or cut off are started again, and their text is an undisturbed run's."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from support import in_process
from support.commands import (
    HANG_S,
    ROOT,
    SPLITS,
    TARGET,
    marked,
    mpirun,
    names_killed,
    processes_with,
    ranks_of,
    wait_for,
)
from support.virtual_hosts import VirtualHosts, virtual_hosts, why_not

from ggpipe.launch.environment import mpi_environment

N_TOKENS = 700
DRAFT = ("-md", TARGET.with_name("tales-draft.gguf"))
DRAFTING = (*DRAFT, "--mpi-layer-split", "0.5,0.5/1.0")
TEXT = ("generate", "-m", TARGET, "-p", "Once upon a time", "-n", N_TOKENS, "-c", 2048, "--ignore-eos", "-t", 1,
        "-s", 7, "--exact")  # fmt: skip
INEXACT = (*TEXT[:-1], "--temp", 0)
OFTEN = ("--rank-timeout", 4, "--restart", 5)  # a machine so loaded that beats are late costs a restart more


@functools.cache
def undisturbed() -> str:
    return in_process.output(*TEXT)


class Restarted:
    """A command that writes the text, on ranks that something happens to."""

    def __init__(
        self, name: str, *arguments: object, launch: Sequence[str] = (), text: Sequence[object] = TEXT
    ) -> None:
        self.marker = f"restarted-{name}-{os.getpid()}.json"
        self.text = ""
        command = [*launch, sys.executable, "-P", "-m", "ggpipe", *text, "--json", f"/tmp/{self.marker}", *arguments]
        self.process = subprocess.Popen(
            [str(word) for word in command], env={**os.environ, **mpi_environment(), **marked(self.marker)}, cwd=ROOT,
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True,
        )  # fmt: skip
        self._errors: list[bytes] = []
        self._readers = [threading.Thread(target=read, daemon=True) for read in (self._read, self._read_errors)]
        for reader in self._readers:
            reader.start()

    def __enter__(self) -> Restarted:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        Path("/tmp", self.marker).unlink(missing_ok=True)

    def waits_for(self, condition: Callable[[], object]) -> None:
        wait_for(lambda: condition() or self.process.poll() is not None)

    def writes(self, n: int) -> dict[int, int]:
        """Until it has written so many more characters; its ranks."""
        n += len(self.text)
        self.waits_for(lambda: len(self.text) >= n)
        assert self.process.poll() is None, self.stderr
        return ranks_of(self.marker)

    @property
    def stderr(self) -> str:
        return b"".join(self._errors).decode()

    def lines(self) -> list[str]:
        """What it says for itself."""
        return [line for line in self.stderr.splitlines() if line.startswith("ggpipe: ")]

    def ends(self) -> int:
        """Its exit code; nothing is left of it, and there was no traceback."""
        code = self.process.wait(HANG_S)
        for reader in self._readers:
            reader.join(HANG_S)
        wait_for(lambda: not processes_with(self.marker))
        assert "Traceback" not in self.stderr
        return code

    def _read(self) -> None:
        assert self.process.stdout is not None
        while data := os.read(self.process.stdout.fileno(), 4096):
            self.text += data.decode(errors="replace")

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        while data := os.read(self.process.stderr.fileno(), 4096):
            self._errors.append(data)


def test_killed_ranks() -> None:
    """The head, another rank of the target, and the draft's, one after the other."""
    with Restarted("kill", *DRAFTING, "--restart", 3) as job:
        for rank in (0, 1, 2):
            os.kill(job.writes(200)[rank], signal.SIGKILL)
        assert job.ends() == 0, job.stderr
        assert job.text == undisturbed()
        for rank, line in enumerate(job.lines()):
            assert names_killed(rank, line)
            assert line.endswith(f"; starting the ranks again ({rank + 1} of 3)")
        assert len(job.lines()) == 3


def test_a_stopped_rank() -> None:
    with Restarted("stop", *SPLITS[3], *OFTEN) as job:
        stopped = job.writes(300)[2]
        os.kill(stopped, signal.SIGSTOP)
        assert job.ends() == 0, job.stderr
        assert job.text == undisturbed()
        line = job.lines()[0]
        assert "rank 2 (" in line
        assert "sent nothing for 4 s" in line
        assert "(1 of 5)" in line


def test_restarts_are_used_up() -> None:
    with Restarted("often", *SPLITS[2], "--restart", 2) as job:
        for _ in range(3):
            os.kill(job.writes(100)[1], signal.SIGKILL)
        assert job.ends() == 1
        assert undisturbed().startswith(job.text)
        assert len(job.text) >= 300
        *again, error = job.lines()
        assert ["1 of 2" in again[0], "2 of 2" in again[1], len(again)] == [True, True, 2]
        assert error.startswith("ggpipe: error: ")
        assert names_killed(1, error)


def test_ctrl_c_while_ranks_are_started_again() -> None:
    with Restarted("interrupted", *SPLITS[2], "--restart", 1) as job:
        os.kill(job.writes(100)[1], signal.SIGKILL)
        job.waits_for(lambda: "starting the ranks again" in job.stderr)
        job.process.send_signal(signal.SIGINT)
        code = job.ends()
        assert undisturbed().startswith(job.text)
        assert code == 130


def test_nobody_would_start_them_again() -> None:
    short = ("generate", "-m", TARGET, "-p", "Once", "-n", 3, "-c", 256, "-t", 1, "--temp", 0, "--restart", 1)
    for result in (in_process.ggpipe(*short), mpirun(2, *short)):
        assert result.returncode == 0
        assert result.stderr.count("warning: --restart has no effect here") == 1
    assert "error: --restart must be 0" in in_process.ggpipe(*short, "--restart", -1).stderr


# Machines that are away


def on_hosts(hosts: VirtualHosts, name: str, *arguments: object, text: Sequence[object] = TEXT) -> Restarted:
    return Restarted(name, *arguments, "--hostfile", hosts.hostfile, *OFTEN, launch=hosts.on(1), text=text)


def line_about(job: Restarted, host: str) -> str:
    """Where the ranks of a machine that cannot be reached are now."""
    lines = [line.partition(" cannot be reached: ") for line in job.lines()]
    return next(after for away, _, after in lines if after and host in away)


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.parametrize(
    ("n_hosts", "split"),
    [
        (3, ("--mpi-layer-split", "0.25,0.5,0.25")),
        (2, (*DRAFT, "--mode", "async", "--mpi-layer-split", "1/1")),
    ],
    ids=["layers", "draft"],
)
def test_a_machine_without_network(n_hosts: int, split: tuple[object, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    with virtual_hosts(n_hosts) as hosts:
        for name, value in hosts.environment.items():
            monkeypatch.setenv(name, value)
        with on_hosts(hosts, f"cut{n_hosts}", *split) as job:
            job.writes(300)
            hosts.cut_off(2)
            job.waits_for(lambda: False)
            code = job.process.wait()
            hosts.connect(2)  # what is left there finds out now that mpirun has gone
            wait_for(lambda: not hosts.processes())
            assert job.ends() == code == 0, job.stderr
            assert job.text == undisturbed()
            assert f" on {hosts.address(1)}" in line_about(job, hosts.address(2))


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_the_first_ranks_machine_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with virtual_hosts(3) as hosts:
        for name, value in hosts.environment.items():
            monkeypatch.setenv(name, value)
        hosts.hostfile.write_text(hosts.lines_for(2, 3))
        with on_hosts(hosts, "first", *SPLITS[2]) as job:
            job.writes(300)
            hosts.cut_off(2)
            job.waits_for(lambda: False)
            hosts.connect(2)
            wait_for(lambda: not hosts.processes())
            assert job.ends() == 0, job.stderr
            assert job.text == undisturbed()
            assert line_about(job, hosts.address(2)) == f"shares of the layers are now 1 on {hosts.address(3)}"


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_group_goes_on_without_one_of_its_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parts that are left compute its layers. Their sums are others, so the text may differ at near-ties."""
    with virtual_hosts(3) as hosts:
        for name, value in hosts.environment.items():
            monkeypatch.setenv(name, value)
        with on_hosts(hosts, "part", "--mpi-layer-split", "1.0*3", text=INEXACT) as job:
            job.writes(300)
            hosts.cut_off(2)
            job.waits_for(lambda: False)
            hosts.connect(2)
            wait_for(lambda: not hosts.processes())
            result = json.loads(Path("/tmp", job.marker).read_text())
            assert job.ends() == 0, job.stderr
            assert result["n_generated_tokens"] == N_TOKENS
            shares = f"1 on {hosts.address(1)}+{hosts.address(3)}"
            assert line_about(job, hosts.address(2)) == f"shares of the layers are now {shares}"
