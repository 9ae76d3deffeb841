"""The demo from end to end: what is shown, what is measured, and what is kept in the cache."""

from __future__ import annotations

import os
import pty
import re
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
from support import in_process
from support.commands import HANG_S, ROOT, ggpipe, mpirun

from ggpipe.llama.bundled import BUNDLED_PAIR

OPENING = "A cat met a fox in the forest, and thought to herself that he was clever."
ROLES = "3 ranks on this machine: 2 hold the target's layers, 1 runs the draft model."
SPEEDS = r"With the draft model: [\d.]+ t/s\. Without: [\d.]+ t/s\. ([\d.]+ times as fast|This machine is too busy)"
HOW = "(Medians of 2 rounds of {n} tokens, with and without in turn.)"
N = 6


@pytest.fixture(scope="module")
def text() -> str:
    """What the small target writes, alone."""
    arguments = ("-m", BUNDLED_PAIR.target, "-p", OPENING, "-n", N, "-c", 1024, "-t", 1, "--temp", 0)
    return in_process.output("generate", *arguments)


def test_the_small_models(text: str, tmp_path: Path) -> None:
    done = ggpipe("demo", "--tiny", "-n", N, XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (0, text), done.stderr
    lines = done.stderr.splitlines()
    assert lines[0].startswith("A tale by the bundled models. They are so small")
    assert lines[-3] == ROLES
    assert re.match(SPEEDS, lines[-2])
    assert lines[-1] == HOW.format(n=N)
    assert list(tmp_path.iterdir()) == []


def test_the_inflated_models_write_the_same_text(text: str, tmp_path: Path) -> None:
    first = ggpipe("demo", "-n", N, XDG_CACHE_HOME=str(tmp_path))
    assert (first.returncode, first.stdout) == (0, text), first.stderr
    assert first.stderr.startswith(
        "ggpipe: Inflating the bundled models (once) (454 MB)\nA tale by the bundled models, inf"
    )
    assert re.search(SPEEDS, first.stderr)
    made = {path: path.stat().st_mtime_ns for path in (tmp_path / "ggpipe" / "models").iterdir()}
    assert len(made) == 2
    second = ggpipe("demo", "-n", N, XDG_CACHE_HOME=str(tmp_path))
    assert (second.returncode, second.stdout) == (0, text), second.stderr
    assert second.stderr.startswith("A tale by")
    assert made == {path: path.stat().st_mtime_ns for path in (tmp_path / "ggpipe" / "models").iterdir()}


def test_flags_of_generate() -> None:
    draft_inside = in_process.ggpipe("demo", "--tiny", "-n", 60, "-p", "A wolf", "--mpi-layer-split", "1.0")
    assert draft_inside.returncode == 0, draft_inside.stderr
    assert (
        "1 rank on this machine: 1 holds the target's layers, rank 0 also runs the draft model." in draft_inside.stderr
    )
    assert re.search(SPEEDS, draft_inside.stderr)
    assert HOW.format(n=12) in draft_inside.stderr, "a part is enough"
    iterative = in_process.ggpipe_on_threads("demo", "--tiny", "-n", N, "--mode", "iterative")
    assert iterative.returncode == 0, iterative.stderr
    assert "decode" in iterative.stderr
    assert "times as fast" not in iterative.stderr


def test_under_mpirun() -> None:
    done = mpirun(3, "demo", "--tiny", "-n", N)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("A tale by") == 1
    assert ROLES in done.stderr


@pytest.mark.parametrize(
    ("arguments", "why"),
    [(("-n", -3), "-n/--predict"), (("-m", "x.gguf"), "no such option"), (("-t", "x"), "-t/--threads")],
)
def test_bad_command_lines(arguments: tuple[object, ...], why: str) -> None:
    done = in_process.ggpipe("demo", "--tiny", *arguments)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.count("\n") == 1
    assert why in done.stderr


def test_a_cache_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "ggpipe").write_text("a file where the cache's folder would be")
    done = ggpipe("demo", XDG_CACHE_HOME=str(tmp_path))
    assert (done.returncode, done.stdout) == (1, "")
    assert re.fullmatch(r"ggpipe: error: cannot write the inflated models to .*; make room .*\n", done.stderr)


def on_a_terminal(*arguments: object, **environment: str) -> tuple[int, str]:
    """`ggpipe ARGUMENTS` with all its output on a terminal of 100 columns; its exit code, and what was drawn."""
    master, slave = pty.openpty()
    termios.tcsetwinsize(slave, (40, 100))
    drawn: list[bytes] = []

    def read() -> None:
        try:
            while data := os.read(master, 65536):
                drawn.append(data)
        except OSError:  # the other end is closed
            pass

    process = subprocess.Popen(
        [sys.executable, "-P", "-m", "ggpipe", *map(str, arguments)],
        stdin=subprocess.DEVNULL, stdout=slave, stderr=slave, cwd=ROOT, start_new_session=True,
        env={**os.environ, "TERM": "xterm-256color", **environment},
    )  # fmt: skip
    os.close(slave)
    reader = threading.Thread(target=read, daemon=True)
    reader.start()
    code = process.wait(HANG_S)
    reader.join(HANG_S)
    os.close(master)
    return code, b"".join(drawn).decode(errors="replace")


def test_on_a_terminal(tmp_path: Path) -> None:
    code, drawn = on_a_terminal("demo", "-n", 30, XDG_CACHE_HOME=str(tmp_path), NO_COLOR="1")
    assert code == 0
    plain = re.sub(r"\x1b\[[?\d;]*[A-Za-z]", "", drawn).replace("\r", "")
    first = (
        "Inflating the bundled models (once) ━",
        "453.9/453.9 MB",
        "A tale by the bundled models, inflated with zeros",
        "Green: draft tokens that the target model accepted.",
        "A cat met a fox",
        "acceptance",
    )
    last = (
        "Again, without the draft model and with it, in turn:",
        ROLES,
        "With the draft model: ",
    )
    places = [*map(plain.find, first), *map(plain.rfind, last)]  # the live display is drawn in each round
    assert -1 not in places
    assert places == sorted(places)
    assert plain.rstrip().endswith("in turn.)")
