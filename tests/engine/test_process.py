"""A rank's life around its work: all ranks leave together, whatever comes."""

from __future__ import annotations

import subprocess
import sys

import pytest
from support.commands import HANG_S, TARGET, on_ranks

LEAVING = """
import os, signal, sys, time
from pathlib import Path
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.errors import RunError, Terminated
from ggpipe.engine import process
from ggpipe.engine.process import run_alike

case = sys.argv[2]
process._LEAVE_S = 0.1 if case in ("late", "error") else process._LEAVE_S  # less than a rank sleeps

def work(transport, attend, say):
    if transport.rank == 0 and case != "late":
        raise Terminated("reason") if case == "terminated" else RunError("reason")
    if transport.rank == 1 and case == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    if transport.rank == 1:
        time.sleep(3600 if case == "terminated" else 1)  # as one that frees much memory
    return "left"

try:
    config = EngineConfig(ModelConfig(path=Path(sys.argv[1])))
    left = run_alike(config, work, lambda error: print(error, file=sys.stderr))
except RunError as e:
    left = str(e)
print(left)
"""


def test_ranks_wait_for_one_that_takes_long_to_leave() -> None:
    result = on_ranks(2, LEAVING, TARGET, "late")
    assert (result.returncode, result.stdout.count("left"), result.stderr) == (0, 2, "")


def test_an_error_is_reported_before_the_ranks_have_left() -> None:
    result = on_ranks(2, LEAVING, TARGET, "error")
    assert (result.returncode, result.stderr) == (0, "reason\n")
    assert "left" in result.stdout
    assert "reason" in result.stdout


def test_a_terminated_rank_ends_the_others() -> None:
    result = on_ranks(2, LEAVING, TARGET, "terminated")
    assert result.returncode != 0
    assert result.stderr.startswith("reason\n")


def test_a_rank_that_died_is_not_waited_for() -> None:
    result = on_ranks(2, LEAVING, TARGET, "dead")
    assert result.returncode != 0
    assert "reason\n" in result.stderr


ABORTING = """
import sys
from pathlib import Path
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.llama.libllama import lib
from ggpipe.engine.process import run_rank

def head(ranks):
    lib._lib.ggml_abort(b"/src/" + sys.argv[2].encode(), 7, b"GGML_ASSERT(%s) failed", b"a/b == 1")

run_rank(EngineConfig(ModelConfig(path=Path(sys.argv[1]))), head, None, lambda error: print(error))
"""


@pytest.mark.parametrize(
    ("file", "code", "line"),
    [
        ("ggml-backend-meta.cpp", 2, "this 'llama' model cannot be divided as a group (ggml-backend-meta.cpp:7: GG"),
        ("ops.cpp", 1, "libllama stopped at ops.cpp:7: GGML_ASSERT(a/b == 1) failed"),
    ],
)
def test_an_assertion_of_ggml_is_an_error(file: str, code: int, line: str) -> None:
    command = [sys.executable, "-u", "-c", ABORTING, str(TARGET), file]
    result = subprocess.run(command, capture_output=True, text=True, timeout=HANG_S)
    assert (result.returncode, result.stderr) == (code, "")
    assert line in result.stdout
    assert result.stdout.count("\n") == 1
