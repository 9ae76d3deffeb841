"""`ggpipe bench`, as its users start it."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import json
import os
import pty
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from support import in_process
from support.commands import HANG_S, ROOT, TARGET, ggpipe, marked, processes_with
from support.zoo import make

from ggpipe.cluster import receipt as receipts

DRAFT = TARGET.with_name("tales-draft.gguf")
MODES = ("iterative", "speculative", "async", "single")
LAYOUT = ("--mpi-layer-split",)
PAIR = ("bench", "-m", TARGET, "-md", DRAFT, "-t", 1)


def test_a_bench_over_mpi(tmp_path: Path) -> None:
    result = ggpipe(
        *PAIR, "-n", 8, "--rounds", 1, "-c", 256, "--mpi-layer-split", "0.5,0.5/1.0", "--exact",
        "--csv", tmp_path / "r.csv", "--json", tmp_path / "r.json", "--plots", tmp_path / "new" / "plots",
        "--trace", tmp_path / "traces",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    lines = result.stdout.splitlines()
    assert [line.split()[0] for line in lines[1:5]] == list(MODES)
    assert lines[-1] == "Medians [quartiles] of 1 round, 5 prompts, 8 tokens each. All outputs are the same."
    assert [line.split()[1] for line in result.stderr.splitlines()] == ["long"], "left out"
    assert len((tmp_path / "r.csv").read_text().splitlines()) == 1 + 20
    read = json.loads((tmp_path / "r.json").read_text())
    assert (read["model"], read["draft_model"]) == (TARGET.name, DRAFT.name)
    assert {run["prompt"] for run in read["runs"]} == {"chat", "edit", "program", "quote", "tale"}
    assert all(run["n_generated_tokens"] == 8 for run in read["runs"])
    assert sorted(path.stem for path in (tmp_path / "traces").iterdir()) == sorted(MODES)
    assert len(list((tmp_path / "new" / "plots").glob("*.svg"))) == 5


def test_layouts_side_by_side(tmp_path: Path) -> None:
    layouts = ("0.5,0.5/1.0", "1.0*2")
    result = ggpipe(
        *PAIR, "-n", 8, "--rounds", 1, "-c", 256, "-f", "prompts/tale.txt", "--temp", 0,
        "--mpi-layer-split", layouts[0], "--mpi-layer-split", layouts[1],
        "--csv", tmp_path / "r.csv", "--json", tmp_path / "r.json", "--trace", tmp_path / "traces",
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    titles, *lines, _, verdict = result.stdout.splitlines()
    assert titles.split()[:8] == ["layout", "mode", "t/s", "x", "first", "prefill", "t/s", "TTFT"]
    assert [line.split()[:2] for line in lines] == [[layout, "async"] for layout in layouts]
    assert verdict.startswith("Medians [quartiles] of 1 round, 1 prompt, 8 tokens each.")
    rows = list(csv.DictReader((tmp_path / "r.csv").open()))
    assert [(row["layout"], row["mode"]) for row in rows] == [(layout, "async") for layout in layouts]
    read = json.loads((tmp_path / "r.json").read_text())
    assert [(own["layout"], len(run["ranks"])) for own, run in zip(read["summary"], read["runs"], strict=True)] == [
        (layouts[0], 3),
        (layouts[1], 3),  # the draft is in the head's process
    ]
    assert {path.name for path in (tmp_path / "traces").iterdir()} == {"0.5,0.5_1.0_async.json", "1.0_2_async.json"}


def test_a_receipt(tmp_path: Path) -> None:
    """It says what was measured, and the simulator can be compared with it."""
    path, home = tmp_path / "receipt.json", tmp_path / "home"
    (home / "prompts").mkdir(parents=True)
    prompt = home / "prompts" / "own.txt"
    prompt.write_text("A king had three sons.")
    result = ggpipe(
        *PAIR, "-n", 8, "--rounds", 2, "-c", 256, "-f", prompt, "--temp", 0, "--mpi-layer-split", "0.5,0.5/1.0",
        "--receipt", path, "--seconds", 1, "--hf-token", "hf_secret", HOME=str(home),
    )  # fmt: skip
    assert result.returncode == 0, result.stderr
    own, text = receipts.read(path), path.read_text()
    assert own.modes == MODES
    assert own.command.startswith("ggpipe bench -m ")
    assert " -f ~/prompts/own.txt " in own.command
    assert "hf_secret" not in text
    assert socket.gethostname() not in text.replace(own.versions.system, "")
    assert [model.file for model in own.models] == [TARGET.name, DRAFT.name]
    assert own.models[0].sha256 == (hashlib.sha256(TARGET.read_bytes()).hexdigest(),)
    assert own.settings.layer_split == "0.5,0.5/1.0"
    assert [(rank.rank, rank.node, rank.model, rank.layers) for rank in own.ranks] == [
        (0, "node1", 0, (0, 4)),
        (1, "node1", 0, (4, 8)),
        (2, "node1", 1, (0, 3)),
    ]
    assert [facts.fingerprint for facts in own.profile.drafts] == [own.models[1].fingerprint]
    assert len(own.runs) == 2 * len(MODES)
    assert len({run.output for run in own.runs}) == 1, "greedy outputs are the same"
    assert {drafter.model for run in own.runs for drafter in run.drafters} <= {0, 1}
    assert {run.mode for run in own.runs if run.drafters} == {"speculative", "async"}
    compared = in_process.ggpipe("simulate", "--against", path)
    assert compared.returncode == 0, compared.stderr


def test_a_receipt_of_a_model_that_cannot_be_divided(tmp_path: Path) -> None:
    model, path = make("mamba", tmp_path / "mamba.gguf"), tmp_path / "receipt.json"
    flags = ("-f", "prompts/tale.txt", "-n", 4, "--rounds", 1, "-c", 128, "-t", 1, "--seconds", 0.5)
    result = in_process.ggpipe("bench", "-m", model, *flags, "--receipt", path)
    assert result.returncode == 0, result.stderr
    assert receipts.read(path).modes == ("iterative",)


def test_ctrl_c_shows_what_there_is(tmp_path: Path) -> None:
    marker = f"bench-{os.getpid()}.csv"
    command = [*PAIR, "-n", 16, "--rounds", 100_000, "-c", 256, "--mpi-layer-split", "0.5,0.5/1.0"]
    command += ["-f", "prompts/tale.txt", "--csv", tmp_path / marker]
    terminal, inner = pty.openpty()  # the bar is drawn there
    process = subprocess.Popen(
        [sys.executable, "-m", "ggpipe", *map(str, command)], cwd=ROOT,
        env={**os.environ, **marked(marker), "TERM": "xterm"},
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=inner, start_new_session=True,
    )  # fmt: skip
    os.close(inner)
    shown: list[bytes] = []
    try:
        while b"round 3" not in b"".join(shown):
            shown.append(os.read(terminal, 4096))
        process.send_signal(signal.SIGINT)
        reader = threading.Thread(target=read_all, args=(terminal, shown))
        reader.start()
        out, _ = process.communicate(timeout=HANG_S)
        reader.join(HANG_S)
    except BaseException:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    finally:
        os.close(terminal)
    assert process.returncode == 130, shown
    assert b"stopped. Results so far:" in b"".join(shown)
    assert b"Medians [quartiles] of" in out
    assert len((tmp_path / marker).read_text().splitlines()) >= 1 + 2 * len(MODES)
    assert not processes_with(marker)


def read_all(terminal: int, shown: list[bytes]) -> None:
    with contextlib.suppress(OSError):  # that is how a terminal ends
        while True:
            shown.append(os.read(terminal, 4096))


def test_a_model_alone_has_one_mode(tmp_path: Path) -> None:
    result = in_process.ggpipe(
        "bench", "-m", TARGET, "-f", "prompts/tale.txt", "-n", 4, "--rounds", 1, "-c", 128, "-t", 1
    )
    assert result.returncode == 0, result.stderr
    assert result.stderr == "ggpipe: mode single is left out: one rank already holds the whole model\n"
    assert [line.split()[0] for line in result.stdout.splitlines()[:2]] == ["mode", "iterative"]


def test_a_model_that_cannot_roll_back_is_not_speculated_for(tmp_path: Path) -> None:
    model = make("mamba", tmp_path / "mamba.gguf")
    flags = ("-f", "prompts/tale.txt", "-n", 4, "--rounds", 1, "-c", 128, "-t", 1)
    result = in_process.ggpipe("bench", "-m", model, "-md", model, *flags)
    assert result.returncode == 0, result.stderr
    assert "cannot roll back" in result.stderr
    assert [line.split()[0] for line in result.stdout.splitlines()[:2]] == ["mode", "iterative"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--modes", "iterative,psychic"), ("--modes must be iterative", "psychic")),
        (("--modes", "async"), ("-md",)),
        (("--modes", "single", "-f", "prompts/tale.txt", "-c", "256"), ("nothing to measure", "mode single")),
        (("--rounds", "0"), ("--rounds",)),
        (("-n", "1"), ("-n/--predict", "got 1")),
        (("-n", "-1"), ("-n/--predict", "got -1")),
        (("-f", "nowhere.txt"), ("nowhere.txt",)),
        (("-f", "prompts/long.txt", "-c", "256"), ("718", "raise -c")),
        (("-f", "prompts/tale.txt", "-c", "256", "-n", "200"), ("tale has 57 tokens", "raise -c/--ctx-size to 257")),
        (("-n", "500", "-c", "128"), ("raise -c",)),
        (("--plots", "here", "--plot-format", "gif"), ("--plot-format must be svg, png or pdf, got gif",)),
        (("--plots", "pyproject.toml"), ("cannot write to pyproject.toml: it is a file; name a folder",)),
        (("--trace", "pyproject.toml"), ("cannot write to pyproject.toml: it is a file; name a folder",)),
        (("--csv", "/nowhere/runs.csv"), ("/nowhere",)),
        (("--receipt", "/nowhere/r.json"), ("/nowhere",)),
        (("--receipt", "r.json", "--seconds", "0"), ("--seconds must be positive",)),
        (("--receipt", "r.json", *LAYOUT, "1.0", *LAYOUT, "1.0*2"), ("--receipt describes one layout",)),
        (("--mpi-layer-split", "0.5,0.5/1.0"), ("-md",)),
        (("--mode", "async"), ("--mode",)),
        ((*LAYOUT, "1.0", *LAYOUT, "1.0/1.0"), ("a split with ranks after the /", "-md")),
        ((*LAYOUT, "1.0", *LAYOUT, "0.05,0.05,0.9"), ("layout 0.05,0.05,0.9: rank 1 would get no layer",)),
        ((*LAYOUT, "1.0", *LAYOUT, "1.0"), ("--mpi-layer-split names 1.0 twice",)),
        ((*LAYOUT, "1.0", *LAYOUT, "1.0*2", "--modes", "single"), ("--modes single cannot be compared with layouts",)),
    ],
)  # fmt: skip
def test_flags_that_make_no_sense(arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    result = in_process.ggpipe("bench", "-m", TARGET, "-t", 1, *arguments)
    assert (result.returncode, result.stdout) == (2, ""), result
    *others, line = result.stderr.splitlines()
    assert line.startswith("ggpipe: error: "), result.stderr
    assert all("left out" in other for other in others)
    for word in words:
        assert word in line
