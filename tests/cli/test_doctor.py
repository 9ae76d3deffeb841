"""`ggpipe doctor` on this machine: what it prints, and its exit codes."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from support.commands import TARGET
from support.in_process import ggpipe

from ggpipe.cli.commands import doctor
from ggpipe.engine.doctor.checkup import Checkup
from ggpipe.engine.doctor.rules import Finding, Wanted
from ggpipe.options.commands import COMMANDS

DRAFT = TARGET.with_name("tales-draft.gguf")
LIMIT = ("--launch-timeout", 60)


def test_a_healthy_machine() -> None:
    result = ggpipe("doctor", "-m", TARGET, "-t", 1, *LIMIT)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("localhost  ok       ")


def test_a_model_that_is_missing(tmp_path: Path) -> None:
    missing = tmp_path / "none.gguf"
    result = ggpipe("doctor", "-m", missing, *LIMIT)
    assert result.returncode == 1
    assert (
        f"localhost  fails    cannot open model file {missing}: No such file or directory. To mend: " in result.stdout
    )
    assert result.stderr == "ggpipe: a run would fail: 1 of 1 findings must be mended first\n"


def test_json_and_report() -> None:
    content = json.loads(ggpipe("doctor", "--json", *LIMIT).stdout)
    assert content["findings"] == []
    assert content["machines"]["localhost"]["libllama"]
    report = ggpipe("doctor", "--report", *LIMIT).stdout
    assert report.startswith("ggpipe ")
    assert "\n  mpirun: " in report


def test_it_takes_the_flags_of_a_run() -> None:
    """So that a command line can be checked as it is."""
    words = ("-m", TARGET, "-c", 512, "-ctk", "q8_0", "--mpi-layer-split", "0.5,0.5", "-t", 1)
    assert ggpipe("doctor", *words, *LIMIT).returncode == 0


@pytest.mark.parametrize("split", [(), ("--mpi-layer-split", "0.5,0.5"), ("--mpi-layer-split", "0.5,0.5/1.0")])
def test_a_draft_model_counts_wherever_it_runs(split: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []

    def no_checkup(_: object, __: object, wanted: Callable[[str], Wanted], ___: float) -> Checkup:
        asked.append(wanted("localhost").needed_bytes)
        return Checkup(facts={}, findings=(Finding(host="localhost", is_fatal=False, problem="none", cure="none"),))

    monkeypatch.setattr(doctor, "check_up", no_checkup)
    for draft in ((), ("-md", DRAFT)):
        own = split if draft else tuple(word.partition("/")[0] for word in split)
        assert ggpipe("doctor", "-m", TARGET, *draft, *own).returncode == 0
    alone, with_draft = asked
    assert with_draft > alone > 0


def test_questions_come_from_a_doctor(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GGPIPE_FACTS", raising=False)
    result = ggpipe("facts")
    assert result.returncode == 2
    assert "is only for `ggpipe doctor`" in result.stderr
    assert next(command for command in COMMANDS if command.name == "facts").hidden
