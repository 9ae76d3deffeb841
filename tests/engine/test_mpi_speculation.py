"""Speculation over MPI, as its users start it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from support import dflash, in_process
from support.commands import TARGET, Endless, ggpipe, mpirun
from support.tale import GREEDY, plain, prompt
from support.zoo import make

from ggpipe.llama.bundled import BUNDLED_HEAD

DRAFT = TARGET.with_name("tales-draft.gguf")
PAIR = ("generate", "-m", TARGET, "-md", DRAFT, "-f", "prompts/tale.txt", "-n", 60, "-c", 512, "-t", 1)
ITERATIVE = ("--mode", "iterative")
Start = Callable[..., subprocess.CompletedProcess[str]]


SAMPLINGS = (("--temp", 0), ("--temp", 0.8, "-s", 5), ("--temp", 0.8, "--top-k", 0, "-s", 5))
LAYOUTS = (
    ("--mpi-layer-split", "0.5,0.5"),  # the draft inside the head
    ("--mpi-layer-split", "0,0.5,0.5/0.5,0.5", "--draft", 3),
    ("--mpi-layer-split", "0.5,0.5/1.0", "--no-cancel", "-t", "1,1,2"),
    ("--mpi-layer-split", "1.0/1.0"),
    ("--mpi-layer-split", "0.5,0.5/1.0", "--mode", "speculative", "--spec-draft-n-max", 4),
    ("--mpi-layer-split", "0.5,0.5/1.0", "--spec-type", "draft,ngram"),
)


@pytest.mark.parametrize("number", range(len(SAMPLINGS)))
def test_the_same_text_everywhere(number: int, full: bool) -> None:
    """Without `full`, each layout with one sampling, and the last three of them on threads: ranks in one process write
    them all, in test_speculation.py."""
    exact = (*PAIR, "--exact", *SAMPLINGS[number])
    expected = in_process.output(*exact, *ITERATIVE)
    assert len(expected) > 100
    own, on_threads = LAYOUTS[number :: len(SAMPLINGS)]
    starts = [(ggpipe, each) for each in (LAYOUTS if full else (own,))]
    for start, arguments in (*starts, (in_process.ggpipe_on_threads, on_threads)):
        result = start(*exact, *arguments)
        assert (result.returncode, result.stdout) == (0, expected), (arguments, result.stderr)


@pytest.mark.parametrize("mode", ["async", "speculative"])
def test_drafting_without_a_draft_model(mode: str, tmp_path: Path) -> None:
    prompt, grammar = "One two three four five six.", 'root ::= (" One two three four five six.")+'
    arguments = ("generate", "-m", TARGET, "-p", prompt, "-n", 90, "-c", 512, "-t", 1, "--exact", "--grammar", grammar)
    greedy, out = ("--temp", 0, "--ignore-eos"), tmp_path / "all.json"
    result = in_process.ggpipe_on_threads(
        *arguments, *greedy, "--mpi-layer-split", "0.5,0.5", "--mode", mode, "--spec-type", "ngram", "--json", out
    )
    assert (result.returncode, result.stdout) == (0, in_process.output(*arguments, *greedy)), result.stderr
    content = json.loads(out.read_text())
    assert content["mode"] == mode
    assert content["accepted_tokens"] > 20, "the grammar leaves nothing but a repetition"


@pytest.mark.parametrize(("split", "length"), [("0.1,0.4,0.5/1.0", ("-n", 40)), ("0.1,0.4,0.25,0.25", ())])
def test_pipeinfers_command(split: str, length: tuple[object, ...], full: bool) -> None:
    """Its README's, with fewer threads; with the part after the / or without, with -n or without, and -b below the
    prompt. Without `full`, one length for each split."""
    for n in (("-n", 40), ()) if full else (length,):
        result = mpirun(
            4, "generate", "-md", DRAFT, "-m", TARGET, "-e", "-f", "prompts/program.txt", *n, "--mpi-layer-split",
            split, *(["--ignore-eos"] if n else []), "--temp", "-1.0", "--repeat-last-n", 0, "--draft", 4,
            "-tb", "1,2,1,1", "-t", "1,1,2,1", "-c", 512, "-pa", 0.001, "-ps", 0.8, "--numa", "-pr", 0.4, "-pd", 0.01,
            "-np", 3, "-b", 32,
        )  # fmt: skip
        assert result.returncode == 0, result.stderr
        assert len(result.stdout) > 20


def test_measurements_and_trace(tmp_path: Path) -> None:
    out, trace = tmp_path / "all.json", tmp_path / "trace.json"
    result = ggpipe(*PAIR, "--mpi-layer-split", "0.5,0.5/1.0", "--temp", 0, "--json", out, "--trace", trace)
    assert result.returncode == 0, result.stderr
    content = json.loads(out.read_text())
    assert content["mode"] == "async"
    assert content["accepted_tokens"] <= content["submitted_tokens"] <= content["drafted_tokens"]
    assert [rank["draft"] for rank in content["ranks"]] == [False, False, True]
    events = json.loads(trace.read_text())["traceEvents"]
    assert {event["pid"] for event in events} == {0, 1, 2}
    assert "async" in result.stderr


def test_two_draft_models(tmp_path: Path) -> None:
    """Each on a rank of its own; the second one is the target itself."""
    out, trace = tmp_path / "all.json", tmp_path / "trace.json"
    split = ("-md", TARGET, "--mpi-layer-split", "0.5,0.5/1.0/1.0")
    result = in_process.ggpipe_on_threads(*PAIR, *split, "--temp", 0, "--exact", "--json", out, "--trace", trace)
    assert result.returncode == 0, result.stderr
    content = json.loads(out.read_text())
    assert [rank["model"] for rank in content["ranks"]] == [0, 0, 1, 2]
    names = [drafter["drafter"] for drafter in content["drafters"]]
    models = {"draft model 1", "draft model 2"}
    assert models & set(names)
    assert set(names) <= models | {"ngram"}
    assert {event["pid"] for event in json.loads(trace.read_text())["traceEvents"]} == {0, 1, 2, 3}
    assert result.stdout == in_process.output(*PAIR, "--temp", 0, "--exact")


@pytest.mark.parametrize(
    "rank", [pytest.param(0, marks=pytest.mark.only_full), pytest.param(1, marks=pytest.mark.only_full), 2]
)
def test_a_killed_rank_ends_the_job(rank: int) -> None:
    job = Endless(f"kill-draft{rank}", "-md", DRAFT, "--mpi-layer-split", "0.5,0.5/1.0")
    os.kill(job.ranks[rank], signal.SIGKILL)
    code, error = job.ends()
    assert code != 0
    assert "sent nothing for" not in error, "it was noticed before any heartbeat was missed"
    assert len(job.text) > 200


def test_ctrl_c_ends_cleanly() -> None:
    job = Endless("interrupt-draft", "-md", DRAFT, "--mpi-layer-split", "0.5,0.5/1.0")
    job.process.send_signal(signal.SIGINT)
    code, error = job.ends()
    assert code == 130
    assert "stopped" in error


def test_a_draft_model_that_cannot_take_tokens_back(tmp_path: Path) -> None:
    model = make("mamba", tmp_path / "mamba.gguf")
    arguments = ("generate", "-m", model, "-p", "Once", "-n", 8, "--ignore-eos", "--temp", 0, "-t", 1, "-c", 256)
    result = in_process.ggpipe(*arguments, "-md", model)
    assert result.returncode == 0, result.stderr
    assert result.stdout == in_process.output(*arguments)
    assert result.stderr.count("cannot roll back") == 1  # the draft model; the target takes n-grams back


@pytest.mark.parametrize(("start", "split"), [(ggpipe, "0.4,0.3,0.3/1.0"), (in_process.ggpipe_on_threads, "0.5,0.5")])
def test_an_eagle3_head(start: Start, split: str, tmp_path: Path) -> None:
    """On a rank of its own, and inside the first one's process: states come from the ranks that compute them."""
    exact = ("generate", "-m", TARGET, "-f", "prompts/tale.txt", "-n", 60, "-c", 512, "-t", 1, "--exact", "--temp", 0)
    head, out = ("-md", BUNDLED_HEAD, "--spec-type", "draft-eagle3", "--mode", "speculative"), tmp_path / "all.json"
    result = start(*exact, *head, "--mpi-layer-split", split, "--json", out)
    assert (result.returncode, result.stdout) == (0, in_process.output(*exact)), result.stderr
    (drafter,) = json.loads(out.read_text())["drafters"]
    assert drafter["drafter"] == "eagle3"
    assert drafter["right_tokens"] > 0.4 * drafter["judged_tokens"]


def test_a_dflash_head(tmp_path: Path) -> None:
    head = dflash.write(tmp_path / "head.gguf", TARGET, follows=[*prompt(), *plain(GREEDY, prompt())])
    exact = ("generate", "-m", TARGET, "-f", "prompts/tale.txt", "-n", 30, "-c", 512, "-t", 1, "--exact", "--temp", 0)
    out, own = tmp_path / "all.json", ("-md", head, "--spec-type", "draft-dflash", "--mode", "speculative")
    result = in_process.ggpipe_on_threads(*exact, *own, "--mpi-layer-split", "0.5,0.5/1.0", "--json", out)
    assert (result.returncode, result.stdout) == (0, in_process.output(*exact)), result.stderr
    (drafter,) = json.loads(out.read_text())["drafters"]
    assert drafter["drafter"] == "dflash"
    assert drafter["judged_tokens"] > 0
