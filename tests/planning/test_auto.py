"""`auto`: what ranks that have started are used for."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import TARGET
from support.sysfs import sysfs
from support.virtual import measured

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.errors import MemoryNeededError
from ggpipe.launch import sockets
from ggpipe.planning import auto

CONFIG = EngineConfig(ModelConfig(path=TARGET), ContextConfig(n_ctx=1024), PipelineConfig(auto=True, threads=(4,)))


def test_ranks_of_one_machine_are_a_group() -> None:
    plan = auto._plan(CONFIG, measured(("here", "here"), threads=4), in_order=True)
    split = auto._split(plan)
    assert (split.target, split.draft) == (LayerSplit((1.0,), (2,)), None)
    settled = auto._with_split(CONFIG, split)
    assert (settled.pipeline.n_ranks, settled.pipeline.auto) == (2, False)
    line = auto._chosen(plan)
    assert line.startswith("layer split 1.0*2: layers 0-7; ")
    assert line.endswith(" without groups")


@pytest.mark.parametrize("context", [{"exact": True}, {"flash_attn": "off"}], ids=str)
def test_settings_that_exclude_groups(context: dict[str, object]) -> None:
    config = replace(CONFIG, context=replace(CONFIG.context, **context))  # type: ignore[arg-type]
    split = auto._split(auto._plan(config, measured(("here", "here"), threads=4), in_order=True))
    assert split.target.sizes == (1, 1)


@pytest.mark.parametrize(
    ("hosts", "drafts", "target", "draft"),
    [
        ("abc", False, (0.5, 0.25, 0.25), None),
        ("abb", False, (0.667, 0.167, 0.167), None),
        ("abb", True, (0.667, 0.333), (1.0,)),
        ("abc", True, (0.5, 0.25, 0.25), None),
    ],
)
def test_a_model_that_does_not_fit_is_divided_by_memory(
    hosts: str, drafts: bool, target: tuple[float, ...], draft: tuple[float, ...] | None
) -> None:
    config = replace(CONFIG, drafts=(DraftConfig(model=CONFIG.model),) if drafts else ())
    memory = {"a": 4 << 30, "b": 2 << 30, "c": 2 << 30}
    ranks = [replace(rank, memory_bytes=memory[rank.host]) for rank in measured(tuple(hosts)).ranks]
    split = auto._by_memory(config, ranks)
    assert split.target.shares == pytest.approx(target, abs=1e-3)
    assert (None if split.draft is None else split.draft.shares) == draft


def test_a_model_that_does_not_fit_is_an_error_if_weights_may_not_be_streamed() -> None:
    scarce = measured()
    scarce = replace(scarce, ranks=tuple(replace(rank, memory_bytes=4 << 20) for rank in scarce.ranks))
    with pytest.raises(MemoryNeededError, match="does not fit"):
        auto._plan(CONFIG, scarce, in_order=True)
    assert auto._streams(CONFIG)
    checked = replace(CONFIG.pipeline, check_memory=True)
    for refusing in (
        replace(CONFIG, pipeline=checked),
        replace(CONFIG, model=replace(CONFIG.model, load_mode="mmap")),
        replace(CONFIG, context=replace(CONFIG.context, exact=True)),
    ):
        assert not auto._streams(refusing)
    assert auto._streams(replace(CONFIG, pipeline=checked, model=replace(CONFIG.model, load_mode="stream")))


def test_a_model_that_does_not_fit_is_planned_for_disks_that_were_measured() -> None:
    """The machine with the faster disk gets more layers."""
    scarce = measured(("a", "b"))
    ranks = tuple(
        replace(rank, memory_bytes=64_000_000, disk_bytes_per_s=speed)
        for rank, speed in zip(scarce.ranks, (2e9, 2e8), strict=True)
    )
    config = replace(CONFIG, context=replace(CONFIG.context, n_ctx=256, n_ubatch=32, flash_attn="off"))
    plan = auto._plan(config, replace(scarce, ranks=ranks), in_order=True)
    first, second = plan.ranks
    assert first.memory.streamed > second.memory.streamed
    checked = replace(config, pipeline=replace(config.pipeline, check_memory=True))
    with pytest.raises(MemoryNeededError):
        auto._plan(checked, replace(scarce, ranks=ranks), in_order=True)


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two sockets need two CPUs")
def test_a_rank_for_each_socket(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine's CPUs as two sockets."""
    own = sorted(os.sched_getaffinity(0))
    nodes = {",".join(map(str, cpus)): [i] * len(cpus) for i, cpus in enumerate((own[:1], own[1:]))}
    monkeypatch.setattr(sockets, "SYSFS", sysfs(tmp_path / "sys", nodes))
    assert auto.ranks_here(CONFIG) == 2
    assert auto.ranks_here(replace(CONFIG, drafts=(DraftConfig(model=CONFIG.model),))) == 3
    assert auto.ranks_here(replace(CONFIG, context=replace(CONFIG.context, exact=True))) == 1
    assert auto.ranks_here(replace(CONFIG, model=replace(CONFIG.model, numa="isolate"))) == 1
