"""Which machines mpirun reaches: with a remote shell that knows two of them."""

from __future__ import annotations

import errno
import subprocess
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from support.settings import SETTINGS

from ggpipe.errors import LaunchError, RunError, StartError
from ggpipe.launch import mpirun, reach
from ggpipe.launch.job import Job
from ggpipe.launch.reach import unreachable

MPIRUN = """#!/bin/sh
case "$1 $*" in
  --version*) echo "mpirun (Open MPI) 5.0" ;;
  *) for host; do case "$host" in */[0-9]) read -r name slots < "$host"; break ;; esac; done
     case "$name" in
       there) echo reached ;;
       slow) sleep 0.3; echo reached ;;
       endless) echo reached; sleep 3600 ;;
       silent) mkdir "$PRTE_MCA_prte_local_tmpdir_base/ompi.$$"; sleep 3600 ;;
       *) echo "no $name"; exit 1 ;;
     esac ;;
esac
"""


@pytest.fixture(autouse=True)
def fake_mpirun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mpirun"
    program.write_text(MPIRUN)
    program.chmod(0o700)
    monkeypatch.setattr(reach, "find_mpirun", lambda: str(program))


def test_machines_that_answer_and_machines_that_do_not() -> None:
    assert unreachable(["there", "slow", "there"], lambda: None) == set()
    assert unreachable(["there", "gone", "slow"], lambda: None) == {"gone"}


def test_mpirun_that_never_ends() -> None:
    """It has started a process there."""
    assert unreachable(["there", "endless"], lambda: None) == set()


def test_a_silent_machine_is_not_waited_for_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "_LIMIT_S", 1.0)
    assert unreachable(["there", "silent"], lambda: None) == {"silent"}
    monkeypatch.setattr(reach, "_MOST_S", 0.5)
    assert unreachable(["silent"], lambda: None) == {"silent"}


def test_a_killed_mpirun_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    own, seen = tmp_path / "temporary", set[Path]()
    own.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(own))
    # no time passes until there are files
    monkeypatch.setattr(reach, "time", SimpleNamespace(monotonic=lambda: 3600.0 if seen else 0.0))
    assert unreachable(["silent"], lambda: seen.update(own.glob("*/ompi.*"))) == {"silent"}
    assert seen
    assert not list(own.iterdir())


def test_the_user_stops_it() -> None:
    def attend() -> None:
        raise RunError("stopped while loading")

    with pytest.raises(RunError, match="stopped"):
        unreachable(["silent"], attend)


def test_no_file_or_process_can_be_had(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ranks are started again later."""

    def refuse(*_: object, **__: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr(subprocess, "Popen", refuse)
    for is_known in (False, True):
        with pytest.raises(StartError, match="Too many open files"):
            unreachable(["there"], lambda: None)
        if not is_known:
            monkeypatch.setattr(reach, "is_open_mpi", lambda _: True)
            monkeypatch.setattr(mpirun, "is_open_mpi", lambda _: True)


def test_no_room_for_a_hostfile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "away"))
    with pytest.raises(LaunchError, match="set TMPDIR"), Job(SETTINGS, 1, None, hosts=("there",)).hosts_in_file():
        pass


def test_a_real_mpirun_reaches_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reach, "find_mpirun", mpirun.find_mpirun)
    assert unreachable(["localhost"], lambda: None) == set()
