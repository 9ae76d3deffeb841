"""How ranks are started, what reaches them from the command line, and how Ctrl-C ends them before they have begun."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from support import in_process
from support.commands import HANG_S, SPLITS, TARGET, Job, ggpipe, processes_with, ranks_of, wait_for
from support.settings import SETTINGS

from ggpipe.channel.started import UserContact, started
from ggpipe.errors import StartError
from ggpipe.launch import mpirun
from ggpipe.launch.job import Job as Ranks

TEXT = ("generate", "-m", TARGET, "-n", 4, "-c", 256, "-t", 1, "--temp", 0)


@pytest.mark.parametrize("prompt", [":", "", " : ", "--", "$(exit 3) \"'\\", "-p\n:"])
def test_any_prompt_reaches_the_ranks(prompt: str) -> None:
    result = ggpipe(*TEXT, "--exact", "-p", prompt, *SPLITS[2])
    assert result.returncode == 0, result.stderr
    assert result.stdout == in_process.output(*TEXT, "--exact", "-p", prompt)


def test_ranks_import_nothing_from_the_current_directory(tmp_path: Path) -> None:
    (tmp_path / "secrets.py").write_text("raise SystemExit('imported from the current directory')\n")
    result = ggpipe(*TEXT, "-p", "Once", *SPLITS[2], cwd=tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_a_killed_mpirun_leaves_no_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Open MPI's would keep a later mpirun with the same process id from starting."""
    if not mpirun.is_open_mpi(mpirun.find_mpirun()):
        pytest.skip("hydra has no files")
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    before = set(Path("/tmp").glob("ompi*"))
    ranks = mpirun.RankProcesses(2, None, {"GGPIPE_CHANNEL": "", "PATH": os.environ["PATH"]})
    deadline = time.monotonic() + 60
    while not list(tmp_path.glob("*/*")) and time.monotonic() < deadline:
        time.sleep(0.005)
    (mpirun_pid,) = (int(folder.name.rpartition(".")[2]) for folder in tmp_path.glob("*/*"))
    os.kill(mpirun_pid, signal.SIGKILL)
    ranks.wait()
    assert list(tmp_path.glob("*/*"))
    ranks.end()
    assert not list(tmp_path.iterdir())
    assert set(Path("/tmp").glob(f"ompi*.{mpirun_pid}")) <= before


def test_files_of_killed_processes_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    killed, other, new = (Path(tempfile.mkdtemp(prefix=prefix)) for prefix in ("ggpipe-ranks-", "x", "ggpipe-ranks-"))
    (killed / "file").touch()
    (tmp_path / "ggpipe-ranks-link").symlink_to(other)
    running, lock = mpirun._own_folder()
    for folder in (killed, other, Path(running)):
        os.utime(folder, (0, 0))
    own, own_lock = mpirun._own_folder()
    kept = {path.name for path in tmp_path.iterdir()}
    assert kept == {other.name, new.name, "ggpipe-ranks-link", Path(running).name, Path(own).name}
    os.close(lock)
    os.close(own_lock)


def test_a_folder_without_room_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    program = tmp_path / "mpirun"
    line = "[vm:1] PMIX ERROR: PMIX_ERR_FILE_WRITE_FAILURE in file base.c at line 258"
    program.write_text(f"#!/bin/sh\n[ $1 = --version ] && exit\necho '{line}'\nexit 213\n")
    program.chmod(0o700)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: str(program))
    monkeypatch.setattr(mpirun, "_ROOM_BYTES", 1 << 62)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    user = UserContact(show=lambda _: None, report=lambda _: None)
    with (
        pytest.raises(StartError, match=f"{tmp_path} has only .* MB left for its files: free some space"),
        started(Ranks(SETTINGS, 2, None), 0, lambda: None, user),
    ):
        pass
    assert capfd.readouterr().err == ""
    assert list(tmp_path.iterdir()) == [program]


def test_no_files_are_left_to_start_ranks_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(subprocess, "Popen", fails)
    with pytest.raises(StartError, match="cannot start ranks: "):
        mpirun.RankProcesses(1, None, {})
    assert not list(tmp_path.iterdir())


def test_a_killed_mpirun_leaves_no_shared_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, own, other = (
        tmp_path / "mpirun",
        tmp_path / "sm_segment.here.0.7ad30001",
        tmp_path / "sm_segment.here.0.7ad3",
    )
    program.write_text(
        f"#!{sys.executable}\nimport mmap, sys, time\nif sys.argv[1] == '--version': sys.exit()\n"
        f"for i in 0, 1:\n  file = open(f'{own}.{{i}}', 'w+b')\n  file.truncate(4096)\n"
        "shared = mmap.mmap(file.fileno(), 4096)\ntime.sleep(60)\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: str(program))
    Path(f"{other}.0").touch()
    ranks = mpirun.RankProcesses(2, None, {})
    deadline = time.monotonic() + 60
    while not ranks._shared_memory and time.monotonic() < deadline:
        time.sleep(0.02)
        ranks.connected()
    ranks.end()
    assert [file.name for file in tmp_path.glob("sm_*")] == [f"{other.name}.0"]


@pytest.mark.parametrize("moment", ["mpirun", "ranks"])
def test_ctrl_c_while_ranks_start(moment: str) -> None:
    job = Job(f"start-{moment}", *SPLITS[2])
    if moment == "mpirun":
        job.waits_for(lambda: len(processes_with(job.marker)) > 1)
    else:
        job.waits_for(lambda: 0 in ranks_of(job.marker))
    job.process.send_signal(signal.SIGINT)
    code, error = job.ends()
    assert code == 130
    if job.text:  # the launcher repeats the signal, which may come when all is loaded
        assert "stopped" in error
    else:
        assert error == "ggpipe: error: stopped while loading\n"


def test_a_second_ctrl_c_ends_ranks_at_once() -> None:
    job = Job("twice", *SPLITS[2])
    job.waits_for(lambda: job.text)
    head = ranks_of(job.marker)[0]
    os.kill(head, signal.SIGSTOP)  # it will not stop by itself
    job.waits_for(lambda: is_interrupted(job.process))
    code, _ = job.ends()
    assert code in (130, -signal.SIGINT)


def is_interrupted(process: subprocess.Popen[bytes]) -> bool:
    """It has ended; else it gets one more Ctrl-C."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    return process.poll() is not None


INTERRUPTED = """
import os, signal, sys

class Interrupt:
    def find_spec(self, name, path, target=None):
        if name == sys.argv[1]:
            os.kill(os.getpid(), signal.SIGINT)

sys.meta_path.insert(0, Interrupt())
from ggpipe.cli import main
main(sys.argv[2:])
"""


@pytest.mark.parametrize(
    "module", ["ggpipe.cli.command_line", "ggpipe.cli.app", "ggpipe.cli.commands.generate", "llama_cpp"]
)
def test_ctrl_c_while_modules_are_imported(module: str) -> None:
    result = subprocess.run(
        [sys.executable, "-P", "-c", INTERRUPTED, module, *map(str, TEXT), "-p", "Once"], capture_output=True, text=True
    )
    assert (result.returncode, result.stdout, result.stderr) == (-signal.SIGINT, "", "")


EXITS = """
import sys, tempfile
from ggpipe.launch import mpirun
mpirun.find_mpirun = lambda: sys.argv[1]
ranks = mpirun.RankProcesses(2, None, {})
"""


def test_a_process_that_exits_leaves_nothing(tmp_path: Path) -> None:
    program = tmp_path / "mpirun"
    program.write_text("#!/bin/sh\n[ $1 = --version ] && exit\ntrap '' TERM\nsleep 60\n")
    program.chmod(0o700)
    command = [sys.executable, "-c", EXITS, str(program)]
    subprocess.run(command, env={**os.environ, "TMPDIR": str(tmp_path)}, check=True, timeout=HANG_S)
    assert list(tmp_path.iterdir()) == [program]
    assert processes_with(str(program)) == []


def test_a_ctrl_c_while_ranks_are_ended_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = tmp_path / "mpirun"
    program.write_text(
        "#!/bin/sh\n[ $1 = --version ] && exit\ntrap 'kill -INT $PPID' TERM\necho >$0.ready\n"
        "while :; do sleep 60 & wait; done\n"
    )
    program.chmod(0o700)
    monkeypatch.setattr(mpirun, "find_mpirun", lambda: str(program))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    ranks = mpirun.RankProcesses(2, None, {})
    wait_for(program.with_name("mpirun.ready").exists)
    with pytest.raises(KeyboardInterrupt):
        ranks.end()
    assert ranks.exit_code() == 128 + signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} == {"mpirun", "mpirun.ready"}
