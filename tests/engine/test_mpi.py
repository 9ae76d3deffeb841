"""The main job over MPI: the same text from any number of ranks, and a clean end however it comes."""

from __future__ import annotations

import functools
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from support import in_process
from support.commands import HANG_S, ROOT, SPLITS, TARGET, Endless, ggpipe, mpirun, names_killed, output

GREEDY = ("generate", "-m", TARGET, "-f", "prompts/tale.txt", "-n", 60, "-c", 512, "-t", 1, "--temp", 0)


@functools.cache
def on_one_rank(*sampling: object) -> str:
    """The text that all splits write."""
    return in_process.output(*GREEDY, "--exact", *sampling)


HEAD_WITHOUT_LAYERS = ("--mpi-layer-split", "0,0.5,0.5")


@pytest.mark.parametrize(
    ("sampling", "split"),
    [
        ((), SPLITS[2]),
        (("--temp", 0.8, "-s", 5), HEAD_WITHOUT_LAYERS),
        (("--temp", 0.8, "--top-k", 0, "-s", 5), SPLITS[4]),
    ],
)
def test_the_same_text_on_any_number_of_ranks(
    sampling: tuple[object, ...], split: tuple[object, ...], full: bool
) -> None:
    """Without `full`, one split for each sampling: ranks in one process write them all, in test_exact.py."""
    assert len(on_one_rank(*sampling)) > 100
    for each in (SPLITS[2], HEAD_WITHOUT_LAYERS, SPLITS[3], SPLITS[4]) if full else (split,):
        assert output(*GREEDY, "--exact", *sampling, *each) == on_one_rank(*sampling), each


def test_under_a_users_mpirun() -> None:
    result = mpirun(2, *GREEDY, "--exact")
    assert result.returncode == 0, result.stderr
    assert result.stdout == on_one_rank()
    assert "\x1b" not in result.stderr  # no terminal, no control codes
    assert "decode" in result.stderr


LONG = ("generate", "-m", TARGET, "-f", "prompts/long.txt", "-n", 20, "-c", 1024, "-t", 1, "--temp", 0, "--exact")


def test_threads_of_each_rank_and_load_modes_and_a_prompt_of_many_chunks() -> None:
    expected = in_process.output(*LONG)
    several = ("-t", "1,2,1", "-tb", "2", "--no-mmap", "--no-repack", "--numa")
    for start, extra in ((ggpipe, several), (in_process.ggpipe_on_threads, ("-lm", "dio"))):
        result = start(*LONG, "-ub", 32, *SPLITS[3], *extra)
        assert (result.returncode, result.stdout) == (0, expected), (extra, result.stderr)


def test_measurements(tmp_path: Path) -> None:
    csv, out = tmp_path / "results.csv", tmp_path / "all.json"
    for start, split in ((in_process.ggpipe, ()), (in_process.ggpipe_on_threads, SPLITS[3])):
        result = start(*GREEDY, "--csv", csv, "--json", out, *split)
        assert result.returncode == 0, result.stderr
    lines = csv.read_text().splitlines()
    assert len(lines) == 2
    assert all(float(x) > 0 for line in lines for x in line.split(","))
    content = json.loads(out.read_text())
    assert "60" in json.dumps(content)
    assert result.stdout.count("\x1b") == 0


def test_the_text_ends_where_the_context_does() -> None:
    result = in_process.ggpipe_on_threads(
        "generate", "-m", TARGET, "-f", "prompts/tale.txt", "-c", 256, "--temp", 0, "--ignore-eos", *SPLITS[2]
    )
    assert result.returncode == 0
    assert "context full" in result.stderr


def test_no_tokens_are_asked_for() -> None:
    result = in_process.ggpipe_on_threads(*GREEDY[:5], "-n", 0, *SPLITS[2])
    assert (result.returncode, result.stdout) == (0, "")


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_killed_rank_ends_the_job(rank: int) -> None:
    job = Endless(f"kill{rank}")
    os.kill(job.ranks[rank], signal.SIGKILL)
    assert names_killed(rank, has_failed(job))


def test_a_killed_mpirun_ends_the_job() -> None:
    job = Endless("kill-mpirun")
    launched = Path(f"/proc/{job.process.pid}/task/{job.process.pid}/children").read_text().split()
    os.kill(int(launched[0]), signal.SIGKILL)
    has_failed(job)


def has_failed(job: Endless) -> str:
    """With the text so far and its figures, and one line that is no more than that. What it wrote to stderr."""
    code, error = job.ends()
    assert code == 1
    assert len(job.text) > 200
    assert "decode" in error  # the summary
    assert error.count("ggpipe: ") == 1
    assert error.splitlines()[-1].startswith("ggpipe: error: ")
    assert "sent nothing for" not in error, "it was noticed before any heartbeat was missed"
    return error


def test_ctrl_c_ends_cleanly() -> None:
    job = Endless("interrupt")
    job.process.send_signal(signal.SIGINT)
    code, error = job.ends()
    assert code == 130
    assert "stopped" in error
    assert "decode" in error  # the summary


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_ranks_die_with_their_launcher(number: signal.Signals) -> None:
    job = Endless(f"launcher{number}")
    job.process.send_signal(number)
    code, _ = job.ends()
    assert code != 0


def test_a_reader_who_has_enough() -> None:
    command = (
        f"{sys.executable} -m ggpipe generate -m {TARGET} -p Once -n 400 --ignore-eos -t 1 2>/dev/null | head -c 20"
    )
    result = subprocess.run(command, shell=True, capture_output=True, timeout=HANG_S, cwd=ROOT)
    assert len(result.stdout) == 20
