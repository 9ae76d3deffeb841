"""`ggpipe plan` with several draft models."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import TARGET
from support.in_process import ggpipe
from support.planning import boxes

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.planning import drafters
from ggpipe.planning.drafters import OnRun
from ggpipe.planning.plan import Plan
from ggpipe.planning.planner import PlanRequest, make_plan

DRAFT = TARGET.with_name("tales-draft.gguf")


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans with few simulations."""

    def few(spec: ClusterSpec, target: ModelShape, draft: ModelShape | None, request: PlanRequest, _: OnRun) -> Plan:
        return make_plan(spec, target, draft, replace(request, effort=0.04, tunes=False))

    monkeypatch.setattr(drafters, "make_plan", few)


def test_several_draft_models(tmp_path: Path, quick: None) -> None:
    """They coincide, so the better one is enough, and the command names that one."""
    (tmp_path / "second.gguf").write_bytes(DRAFT.read_bytes())
    drafts = ("-md", DRAFT, "-md", tmp_path / "second.gguf")
    (tmp_path / "cluster.toml").write_text(boxes(1).replace("core_gflops = 20", "core_gflops = 200"))  # cheap rows
    planned = ggpipe(
        "plan", tmp_path / "cluster.toml", "-m", TARGET, *drafts, "-c", 512, "-t", 1, "--mode", "async",
        "--drafters", "draft:0.3,draft:0.9", "--overlap", 1, "--json", tmp_path / "plan.json",
    )  # fmt: skip
    assert planned.returncode == 0, planned.stderr
    assert "agreement 30 % and 90 %" in planned.stdout
    assert "drafters compared by short simulations: tales-draft " in planned.stdout
    read = json.loads((tmp_path / "plan.json").read_text())
    assert len(read["drafters_tried"]) >= 2
    words = shlex.split(read["command"])
    assert words[words.index("-md") + 1] == str(tmp_path / "second.gguf"), "the better one, if one alone is used"
    assert words.count("-md") == len(read["drafters"]) == 1


def test_drafters_that_cannot_be_planned() -> None:
    for words, why in (
        (("--drafters", "draft:0.6,ngram:0.3"), "--drafters of a plan are draft, eagle3, dflash"),
        (("-m", TARGET, "-md", DRAFT, "-md", DRAFT, "--drafters", "draft:0.6"), "--drafters has 1 values for 2 draft"),
        (("--drafters", "draft:0.6", "--overlap", "2"), "--overlap must be a share"),
    ):
        done = ggpipe("plan", "nodes4-gigabit", *words)
        assert (done.returncode, done.stdout) == (2, ""), done.stderr
        assert why in done.stderr
        assert done.stderr.count("\n") == 1
