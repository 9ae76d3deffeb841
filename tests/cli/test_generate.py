"""`ggpipe generate` where its output goes to something that does not take it."""

from __future__ import annotations

import fcntl
import itertools
import os
import signal
import struct
import subprocess
import sys
import termios
import time
from pathlib import Path

import pytest
from support import examples, in_process
from support.commands import HANG_S, ROOT, SPLITS, TARGET, Job, ggpipe, processes_with, ranks_of, wait_for

from ggpipe.launch.environment import CHANNEL_VARIABLES
from ggpipe.launch.mpirun import find_mpirun, mpirun_command

TEXT = ("generate", "-m", TARGET, "-p", "Once", "-c", 512, "-t", 1)
RANKS = (1, 2)


@pytest.mark.parametrize("n", RANKS)
@pytest.mark.parametrize("n_predict", [1, 40])
def test_a_full_disk(n: int, n_predict: int) -> None:
    with open("/dev/full", "w") as full:
        length = ("-n", str(n_predict), "--ignore-eos")
        command = [sys.executable, "-P", "-m", "ggpipe", *map(str, TEXT), *length, *SPLITS[n]]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S, cwd=ROOT)
    assert result.returncode == 1
    assert "prefill" in result.stderr  # the summary
    assert result.stderr.splitlines()[-1] == "ggpipe: error: cannot write to stdout: No space left on device"
    assert "Traceback" not in result.stderr


@pytest.mark.parametrize("n", RANKS)
def test_a_reader_who_leaves_before_the_text(n: int, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    read = os.open(tmp_path / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    write = os.open(tmp_path / "fifo", os.O_WRONLY)
    os.close(read)
    command = [sys.executable, "-P", "-m", "ggpipe", *map(str, TEXT), "-n", "400", "--ignore-eos", *SPLITS[n]]
    result = subprocess.run(command, stdout=write, stderr=subprocess.PIPE, text=True, timeout=HANG_S, cwd=ROOT)
    os.close(write)
    assert result.returncode == 0
    assert "stopped" in result.stderr


@pytest.mark.parametrize(
    ("n", "number"),
    [
        (n, number)
        for n, number in itertools.product(RANKS, (signal.SIGINT, signal.SIGTERM))
        if examples.full or (n == 1) == (number == signal.SIGTERM)
    ],
)
def test_a_reader_who_does_not_read(n: int, number: signal.Signals) -> None:
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 8192)
    job = Job(f"unread{n}-{number}", *SPLITS[n], stdout=write)
    os.close(write)
    job.waits_for(lambda: unread(read) > 4096 and is_stuck(read))
    job.process.send_signal(number)
    code, error = job.ends()
    os.close(read)
    assert (code == 130) == (number == signal.SIGINT)
    assert "decode" in error  # the summary


def test_a_reader_who_reads_neither_text_nor_messages() -> None:
    """The summary cannot be printed either."""
    read, write = os.pipe()
    fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 8192)
    command = [sys.executable, "-P", "-m", "ggpipe", *map(str, TEXT), "-n", "-1", "--ignore-eos", "-c", "100000"]
    process = subprocess.Popen(command, stdout=write, stderr=write, stdin=subprocess.DEVNULL)
    os.close(write)
    wait_for(lambda: unread(read) > 4096 and is_stuck(read))
    process.terminate()
    try:
        assert process.wait(HANG_S) != 0
    finally:
        process.kill()
        os.close(read)


def unread(fd: int) -> int:
    """How many bytes are in a pipe."""
    return int(struct.unpack("i", fcntl.ioctl(fd, termios.FIONREAD, b"0000"))[0])


def is_stuck(fd: int) -> bool:
    before = unread(fd)
    time.sleep(1)
    return unread(fd) == before


def test_text_reaches_a_file_as_it_comes(tmp_path: Path) -> None:
    """And what proves that a rank is ours is on no command line."""
    path = tmp_path / "text"
    with path.open("w") as file:
        job = Job("file", *SPLITS[2], stdout=file.fileno())
    job.waits_for(lambda: path.stat().st_size > 200)
    head = ranks_of(job.marker)[0]
    variables = (entry.partition(b"=") for entry in Path(f"/proc/{head}/environ").read_bytes().split(b"\0"))
    (secret,) = (value for name, _, value in variables if name.decode() == CHANNEL_VARIABLES[1])
    assert len(secret) == 64
    assert processes_with(secret.decode()) == []
    job.process.send_signal(signal.SIGINT)
    code, error = job.ends()
    assert code == 130
    assert "stopped" in error


def test_ctrl_c_under_a_users_mpirun() -> None:
    """Open MPI passes on whole lines, and this text has none. It ends all ranks a quarter of a second after SIGTERM, so
    these go before whatever else the machine does."""
    job = Job("users", launch=("nice", "-n", "-15", *mpirun_command(find_mpirun(), 2, None, ())))
    job.waits_for(lambda: computed_s(ranks_of(job.marker).get(1)) > 4)
    job.process.send_signal(signal.SIGINT)
    code, error = job.ends()
    assert "decode" in error  # the summary
    assert code == 0 or "\nggpipe: error: terminated" in error  # MPICH's mpirun passes SIGINT on


def computed_s(process: int | None) -> float:
    """CPU time of a process so far."""
    if process is None:
        return 0
    fields = Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) / os.sysconf("SC_CLK_TCK")


def test_an_encoding_that_lacks_characters() -> None:
    random = ("--temp", 100, "--top-k", 0, "--top-p", 1, "--min-p", 0, "-s", 1, "--ignore-eos")
    result = ggpipe(*TEXT, "-n", 200, *random, PYTHONIOENCODING="ascii")
    assert result.returncode == 0, result.stderr
    text = in_process.output(*TEXT, "-n", 200, *random)
    assert "\ufffd" in text
    assert result.stdout == text.encode("ascii", "replace").decode()


@pytest.mark.parametrize("arguments", [("--version",), ("--help",), ("plan", "nodes4-gigabit", "--mode", "iterative")])
def test_other_commands_on_a_full_disk(arguments: tuple[str, ...]) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-P", "-m", "ggpipe", *arguments]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=HANG_S)
    assert result.returncode == 1
    assert result.stderr.startswith("ggpipe: error: ")
    assert result.stderr.endswith("No space left on device\n")
    assert result.stderr.count("\n") == 1


def test_a_full_context_is_said_on_stderr() -> None:
    arguments = ("-m", TARGET, "-f", ROOT / "prompts/tale.txt", "-c", 256, "-t", 1, "--temp", 0, "--ignore-eos")
    done = in_process.ggpipe("generate", *arguments)
    assert done.returncode == 0, done.stderr
    assert "the context of 256 tokens is full: raise -c/--ctx-size for longer outputs\n" in done.stderr
    assert len(done.stdout) > 500
    assert "is full" not in done.stdout
