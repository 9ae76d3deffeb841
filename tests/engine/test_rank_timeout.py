"""Ranks that are stopped, killed or cut off end the job in time, with one line; ranks that are busy do not."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

import pytest
from support.commands import SPLITS, TARGET, Endless, Job, ggpipe, on_ranks, processes_with, ranks_of
from support.virtual_hosts import virtual_hosts, why_not

TIMEOUT = ("--rank-timeout", 3)
DRAFT = TARGET.with_name("tales-draft.gguf")
DRAFTING = ("-md", DRAFT, "--mpi-layer-split", "0.5,0.5/1.0")


def errors_of(stderr: str) -> list[str]:
    return [line for line in stderr.splitlines() if line.startswith("ggpipe: error:")]


@pytest.mark.parametrize(
    ("rank", "split"), [(0, SPLITS[3]), pytest.param(1, SPLITS[3], marks=pytest.mark.only_full), (2, DRAFTING)]
)
def test_a_stopped_rank_ends_the_job(rank: int, split: tuple[object, ...]) -> None:
    job = Endless(f"stop{rank}", *split, *TIMEOUT)
    stopped = job.ranks[rank]
    os.kill(stopped, signal.SIGSTOP)
    code, stderr = job.ends()
    assert code == 1
    assert len(job.text) > 200
    (error,) = errors_of(stderr)
    assert f"rank {rank} (" in error
    assert "sent nothing for 3 s" in error
    with contextlib.suppress(ProcessLookupError):
        os.kill(stopped, signal.SIGCONT)
    assert not processes_with(job.marker)


def test_a_rank_that_was_stopped_for_less_than_the_timeout_goes_on() -> None:
    job = Endless("pause", *SPLITS[3], "--rank-timeout", 60)
    for rank in job.ranks.values():
        os.kill(rank, signal.SIGSTOP)
        time.sleep(1.2)  # longer than from one beat to the next
        os.kill(rank, signal.SIGCONT)
    before = len(job.text)
    job.waits_for(lambda: len(job.text) > before + 200)
    job.process.send_signal(signal.SIGINT)
    assert job.ends()[0] == 130


BUSY = """
import sys, threading, time
from pathlib import Path
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.engine.process import run_alike

def work(transport, attend, say):
    done = threading.Event()
    threading.Thread(target=lambda: (time.sleep(4.5), done.set())).start()
    n = 0
    while not done.is_set():  # never looks at messages, and holds the GIL where it can
        n += sum(range(1000))
    return n

config = EngineConfig(ModelConfig(path=Path(sys.argv[1])), pipeline=PipelineConfig(rank_timeout_s=3))
print("left" if run_alike(config, work) else "")
"""


def test_busy_ranks_are_not_silent() -> None:
    result = on_ranks(3, BUSY, TARGET)
    assert (result.returncode, result.stdout.count("left"), result.stderr) == (0, 3, "")


def test_a_run_longer_than_the_timeout(tmp_path: Path) -> None:
    prompt = tmp_path / "long.txt"
    prompt.write_text("Once upon a time there was a girl who lived in a house by the sea. " * 220)
    long = ("generate", "-m", TARGET, "-f", prompt, "-n", 4, "-c", 8192, "-b", 8192, "-ub", 8192, "-t", 1)
    result = ggpipe(*long, "--mpi-layer-split", "0.875,0.125", *TIMEOUT)
    assert result.returncode == 0, result.stderr
    assert result.stdout


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
@pytest.mark.parametrize("cut_off", [1, pytest.param(2, marks=pytest.mark.only_full), 3])
def test_a_machine_without_network_ends_the_job(cut_off: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with virtual_hosts(3) as hosts:
        for name, value in hosts.environment.items():
            monkeypatch.setenv(name, value)
        job = Job(f"cut{cut_off}", *SPLITS[3], "--hostfile", hosts.hostfile, *TIMEOUT, launch=hosts.on(1))
        job.waits_for(lambda: len(job.text) > 200)
        hosts.cut_off(cut_off)
        job.waits_for(lambda: job.process.poll() is not None and not ranks_of(job.marker))
        hosts.connect(cut_off)  # mpirun's daemons, which hold stderr here, find out now that mpirun has gone
        job.waits_for(lambda: not hosts.processes())
        code, stderr = job.ends()
        assert code == 1
        assert len(job.text) > 200
        (error,) = errors_of(stderr)
        assert f"rank {cut_off - 1 or 1} (node{cut_off if cut_off > 1 else 2})" in error


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_the_first_rank_on_another_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The front end sees its text, and gives it up in time when it is cut off."""
    with virtual_hosts(3) as hosts:
        for name, value in hosts.environment.items():
            monkeypatch.setenv(name, value)
        others = tmp_path / "hosts"
        others.write_text(hosts.lines_for(2, 3))
        job = Job("elsewhere", *SPLITS[2], "--hostfile", others, *TIMEOUT, launch=hosts.on(1))
        job.waits_for(lambda: len(job.text) > 200)
        hosts.cut_off(2)
        job.waits_for(lambda: job.process.poll() is not None)
        hosts.connect(2)
        job.waits_for(lambda: not hosts.processes())
        code, stderr = job.ends()
        assert code == 1
        (error,) = errors_of(stderr)
        assert "rank 0 (node2)" in error
