"""A rank's life around its work: all ranks leave together, whatever comes."""

from __future__ import annotations

from support.commands import TARGET, on_ranks

LEAVING = """
import os, signal, sys, time
from pathlib import Path
from ggpipe.config import EngineConfig, ModelConfig
from ggpipe.errors import RunError, Terminated
from ggpipe.runtime.process import run_alike

case = sys.argv[2]

def work(transport, attend, say):
    if transport.rank == 0 and case != "late":
        raise Terminated("reason") if case == "terminated" else RunError("reason")
    if transport.rank == 1 and case == "dead":
        os.kill(os.getpid(), signal.SIGKILL)
    if transport.rank == 1:
        time.sleep(3600 if case == "terminated" else 7)  # as one that frees much memory
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
