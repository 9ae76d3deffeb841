"""mpirun that ends before the first rank is connected."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ggpipe.channel import started
from ggpipe.channel.started import UserContact, supervised
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.errors import GgpipeError, LaunchError, RankError, StartError
from ggpipe.launch import job, mpirun
from ggpipe.launch.job import Job
from ggpipe.launch.rank_setup import RankSetup

RULE = "-" * 60
NOT_STARTED = f"""{RULE}
A daemon failed to report back after being spawned. This could
be due to several factors:

  Local host:    node1
  Remote host:   node2
  Daemon exit status: 0
{RULE}
"""
LOST = f"""{RULE}
PRTE has lost communication with a remote daemon.

  HNP daemon   : [prterun-node1-7@0,0] on node node1
  Remote daemon: [prterun-node1-7@0,1] on node node2

This is usually due to a failure of the network.
{RULE}
"""


class Rig:
    """Ranks on node1 and node2, with a script as mpirun."""

    def __init__(
        self,
        folder: Path,
        monkeypatch: pytest.MonkeyPatch,
        script: str,
        *away: str,
        faults: dict[str, str] | None = None,
    ) -> None:
        self.lines: list[str] = []
        self.reported: list[GgpipeError] = []
        program, self._hostfile = folder / "mpirun", folder / "hosts"
        program.write_text(f'#!/bin/sh\ncase $1 in --version) echo "mpirun (Open MPI) 5"; exit ;; esac\n{script}\n')
        program.chmod(0o700)
        self._hostfile.write_text("node1 slots=1\nnode2 slots=1\n")
        for module in (mpirun, job):
            monkeypatch.setattr(module, "find_mpirun", lambda: str(program))
        for module in (started, job):
            monkeypatch.setattr(module, "unreachable", lambda hosts, _: set(away) & set(hosts))
        monkeypatch.setattr(started, "faults", lambda hosts, *_: dict(faults or {}))

    def start(self, n_restarts: int) -> None:
        config = EngineConfig(model=ModelConfig(path=Path("none")), pipeline=PipelineConfig(launch_timeout_s=1))
        first = Job(RankSetup(config=config), 2, self._hostfile)
        user = UserContact(show=lambda line: self.lines.append(str(line)), report=self.reported.append)
        with supervised(first, n_restarts, user, lambda _: None) as ranks:
            ranks.load()


def test_a_killed_mpirun_is_started_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, monkeypatch, "kill -9 $$")
    with pytest.raises(RankError, match="mpirun ended: signal 9"):
        rig.start(1)
    assert rig.lines == ["mpirun ended: signal 9 (Killed); starting the ranks again (1 of 1)"]


def test_a_first_rank_whose_connection_is_cut_while_it_is_made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It ends as if the front end had disconnected."""
    program = "import os, socket; host, port = os.environ['GGPIPE_CHANNEL'].split(':')"
    program += "; socket.create_connection((host, int(port))).sendall(b'ggpipe1')"
    rig = Rig(tmp_path, monkeypatch, f'exec {sys.executable} -S -c "{program}"')
    cut = "the connection to the first rank broke before it was established"
    with pytest.raises(RankError, match=cut):
        rig.start(1)
    assert rig.lines == [f"{cut}; starting the ranks again (1 of 1)"]


def test_what_the_first_rank_said_itself_is_not_said_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    said = "ggpipe: error: node1 cannot reach the process that started it"
    rig = Rig(tmp_path, monkeypatch, f"cat <<'E' >&2\n{said}\n{RULE}\nMPI_ABORT was invoked\n{RULE}\nE\nexit 1")
    with pytest.raises(StartError, match="node1 cannot reach") as caught:
        rig.start(0)
    assert caught.value.is_reported
    assert capfd.readouterr().err == f"{said}\n"


@pytest.mark.parametrize("report", [NOT_STARTED, LOST], ids=["not started", "lost"])
def test_a_machine_that_is_there_again(report: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, monkeypatch, f"cat <<'E' >&2\n{report}E\nexit 1")
    with pytest.raises(GgpipeError, match="mpirun did not start on node2, or lost it"):
        rig.start(1)
    assert rig.lines == ["mpirun did not start on node2, or lost it; starting the ranks again (1 of 1)"]


@pytest.mark.parametrize("n_restarts", [0, 5])
def test_a_machine_that_was_never_there(
    n_restarts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    rig = Rig(tmp_path, monkeypatch, f"cat <<'E' >&2\n{NOT_STARTED}E\nexit 1", "node2")
    with pytest.raises(LaunchError, match="node2 is unreachable for mpirun"):
        rig.start(n_restarts)
    assert not rig.lines
    assert not rig.reported
    assert "failed to report back" in capfd.readouterr().err


NO_NAME = {"node2": "its name does not resolve: correct the hostfile"}


@pytest.mark.parametrize("script", [f"cat <<'E' >&2\n{NOT_STARTED}E\nexit 1", "exec sleep 3600"], ids=["ends", "hangs"])
def test_a_machine_whose_fault_is_known(
    script: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    """One line says it, without mpirun's own, and no later than the launch timeout."""
    rig = Rig(tmp_path, monkeypatch, script, faults=NO_NAME)
    with pytest.raises(LaunchError) as caught:
        rig.start(5)
    assert str(caught.value) == "node2 cannot be reached: its name does not resolve: correct the hostfile"
    assert not rig.lines
    assert capfd.readouterr().err == ""


@pytest.mark.parametrize(
    ("end", "words"),
    [
        ("signal 9 (Killed)", "signal 9 (Killed)"),
        ("signal 14 (Alarm clock)", "it was terminated from outside, or waited too long for the others"),
    ],
)
def test_what_ended_a_rank(end: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = f"prterun noticed that process rank 1 with PID 7 on node node2 exited on {end}."
    rig = Rig(tmp_path, monkeypatch, f"cat <<'E'\n{RULE}\n{said}\n{RULE}\nE\nexit 1")
    with pytest.raises(RankError) as caught:
        rig.start(0)
    assert str(caught.value) == f"rank 1 (node2) ended: {words}"


def test_other_reasons_are_not_tried_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig(tmp_path, monkeypatch, "exit 3")
    with pytest.raises(StartError, match="mpirun ended with exit code 3 before the first rank was connected"):
        rig.start(5)
    assert rig.lines == []
