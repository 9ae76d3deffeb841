"""Groups over MPI, as their users start them."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
from pathlib import Path

import pytest
from support.commands import TARGET, Endless, Job, ggpipe, mpirun, output, ranks_of
from support.virtual_hosts import virtual_hosts, why_not

DRAFT = TARGET.with_name("tales-draft.gguf")
TEXT = ("generate", "-m", TARGET, "-f", "prompts/tale.txt", "-n", 60, "-c", 512, "-t", 1, "--temp", 0, "--ignore-eos")
WHOLE = ("--mpi-layer-split", "1.0*2")
GROUP = ("--mpi-layer-split", "0.5*2,0.5")


@functools.cache
def by_two_parts() -> str:
    """The text that a group of two on one machine writes."""
    return output(*TEXT, *WHOLE)


@pytest.mark.parametrize(
    ("split", "parts"),
    [
        ("1.0*2", [0, 1]),
        pytest.param("0.5*2,0.5/1.0", [0, 1, 0, 0], marks=pytest.mark.only_full),
        ("0.3,0.7*2/1.0*2", [0, 0, 1, 0, 1]),
    ],
)
def test_a_text(split: str, parts: list[int], tmp_path: Path) -> None:
    out, trace = tmp_path / "all.json", tmp_path / "trace.json"
    draft = ("-md", DRAFT, "--mode", "speculative", "--draft", 3) if "/" in split else ()
    result = ggpipe(*TEXT, *draft, "--mpi-layer-split", split, "--json", out, "--trace", trace)
    assert result.returncode == 0, result.stderr
    assert "part 1" in result.stderr
    content = json.loads(out.read_text())
    assert content["n_generated_tokens"] == 60
    assert [rank["part"] for rank in content["ranks"]] == parts
    assert all(rank["runs"] > 0 for rank in content["ranks"])
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events if event["ph"] == "X"} == set(range(len(parts)))


def test_the_users_own_mpirun() -> None:
    own = mpirun(2, *TEXT, *WHOLE)
    assert (own.returncode, own.stdout) == (0, by_two_parts()), own.stderr


def test_a_group_of_another_number_of_ranks() -> None:
    result = mpirun(2, *TEXT, *GROUP)
    assert result.returncode == 2
    assert "--mpi-layer-split names 3 ranks, but 2 were started: use mpirun -n 3" in result.stderr


def test_a_killed_part_ends_the_job() -> None:
    job = Endless("kill-part", *GROUP)
    os.kill(job.ranks[1], signal.SIGKILL)
    code, error = job.ends()
    assert code != 0
    assert "sent nothing for" not in error, "it was noticed before any heartbeat was missed"
    assert len(job.text) > 200


def test_a_stopped_part_is_named() -> None:
    job = Endless("stop-part", *GROUP, "--rank-timeout", 3)
    os.kill(job.ranks[1], signal.SIGSTOP)
    code, stderr = job.ends()
    assert code == 1
    (error,) = (line for line in stderr.splitlines() if line.startswith("ggpipe: error:"))
    assert "rank 1 (" in error
    assert "sent nothing for 3 s" in error


def test_ranks_of_a_group_are_started_again() -> None:
    job = Job("restart-part", *WHOLE, "-n", 700, "-c", 2048, "--restart", 5, "--rank-timeout", 4)
    job.waits_for(lambda: len(job.text) > 200)
    with contextlib.suppress(ProcessLookupError):
        os.kill(ranks_of(job.marker)[1], signal.SIGKILL)
    out = Path("/tmp", job.marker)
    job.waits_for(lambda: job.process.poll() is not None)
    assert job.process.returncode == 0
    assert json.loads(out.read_text())["n_generated_tokens"] == 700
    job.ends()


@pytest.mark.skipif(why_not() is not None, reason=why_not() or "")
def test_a_group_over_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parts share no memory, so they send each other messages; their sums are the same."""
    whole, expected = (*WHOLE, *TEXT[5:]), by_two_parts()
    with virtual_hosts(2) as hosts:
        for name, value in hosts.environment.items():
            monkeypatch.setenv(name, value)
        for wire in ("f32", "f16"):
            job = Job(f"wire-{wire}", *whole, "--tensor-wire", wire, "--hostfile", hosts.hostfile, launch=hosts.on(1))
            job.waits_for(lambda job=job: job.process.poll() is not None)
            code, stderr = job.ends()
            assert code == 0, stderr
            assert len(job.text) > 100
            if wire == "f32":
                assert job.text == expected
