"""For each bundled cluster with a mixture of experts, `plan` prints a command that runs; here on toys of the kind."""

from __future__ import annotations

import functools
import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from support import architectures, zoo
from support.in_process import ggpipe, ggpipe_on_threads

from ggpipe.cluster.toml import read_cluster, shipped
from ggpipe.planning.planner import PlanRequest

N_LAYER = 12
TOYS = {
    "deepseek-v3-xeons": "deepseek2",
    "glm-5-xeons": "glm-dsa",
    "gpt-oss-120b-pcs": "gpt-oss",
    "gpt-oss-120b-pcs-2g5": "gpt-oss",
    "gpt-oss-120b-two-pcs": "gpt-oss",
    "qwen3-235b-xeons": "qwen3moe",
    "qwen3-next-80b-pcs": "qwen3next",
}


def toys(name: str, n_heads: int, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[Path, Path]:
    """A target of this architecture that a group of up to `n_heads` parts can divide, and a draft model for it."""
    target, draft = folder / "target.gguf", folder / "draft.gguf"
    if name in zoo.ZOO:
        own = zoo.ZOO[name]
        n_kv = own.n_head_kv if own.n_head_kv == 1 else n_heads
        monkeypatch.setitem(zoo.ZOO, name, replace(own, n_head=n_heads, n_head_kv=n_kv))
        return zoo.make(name, target, n_layer=N_LAYER), zoo.make("llama", draft, tokenizer="test")
    architectures.write("llama", draft)
    monkeypatch.setattr(architectures, "N_HEAD", n_heads)
    monkeypatch.setattr(architectures, "N_FF", 256)
    monkeypatch.setitem(architectures._LAYERS, name, N_LAYER)
    return architectures.write(name, target), draft


def test_all_bundled_mixtures_are_tried() -> None:
    targets = {name: read_cluster(Path(name)).target for name in shipped()}
    assert {name for name, target in targets.items() if target is not None and target.n_expert} == set(TOYS)


@pytest.mark.parametrize("cluster", TOYS)
def test_the_command_of_a_plan_runs(cluster: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        "ggpipe.cli.commands.plan.PlanRequest", functools.partial(PlanRequest, effort=0.05, tunes=False)
    )
    monkeypatch.setattr("ggpipe.planning.evaluate._SHORT", 8)  # any plan's command must run, not only the best one's
    monkeypatch.setattr("ggpipe.planning.evaluate._LONG", 16)
    done = ggpipe("plan", cluster)
    assert done.returncode == 0, done.stderr
    (line,) = (line for line in done.stdout.splitlines() if line.startswith("ggpipe generate"))
    target, draft = toys(TOYS[cluster], 8, tmp_path, monkeypatch)
    mine = {
        "target.gguf": target,
        "draft.gguf": draft,
        "-c": "-c 256",
        "-t": "-t 1",
        "--hostfile": "",
        "-f": "-p 0102 -n 4",
    }
    words, left = [], iter(shlex.split(line)[1:])
    for word in left:
        words += str(mine.get(word, word)).split()
        if word in ("-c", "-t", "--hostfile", "-f"):
            next(left)
    ran = ggpipe_on_threads(*words)
    assert ran.returncode == 0, (words, ran.stderr)


def test_exact_plans_stream_nothing() -> None:
    """A run with --exact does not stream unasked."""
    done = ggpipe("plan", "gpt-oss-120b-two-pcs", "--exact", "--mode", "iterative")
    assert done.returncode == 2
    assert "does not fit" in done.stderr
    assert "start the ranks anyway" not in done.stderr
