"""Which sockets a machine has, as its kernel describes them, and which rank runs on which."""

from __future__ import annotations

import ast
import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.commands import TARGET, on_ranks
from support.sysfs import TWO, sysfs

from ggpipe.config.draft import DraftConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.engine.process import own_cores, own_socket
from ggpipe.launch import sockets
from ggpipe.launch.sockets import cores_of, cpus_of, free_sockets, sharing
from ggpipe.transport.local import LocalWorld

FIRST, SECOND = frozenset((0, 1, 2, 3, 8, 9, 10, 11)), frozenset((4, 5, 6, 7, 12, 13, 14, 15))
ALL = range(16)


def test_sockets_as_the_kernel_names_them(tmp_path: Path) -> None:
    assert sockets.sockets(sysfs(tmp_path / "two", TWO)) == (FIRST, SECOND)
    halves = {"0-1": [0, 0], "2-3": [0, 0], "4-5": [1, 1], "6-7": [1, 1]}
    assert sockets.sockets(sysfs(tmp_path / "nodes", halves)) == (frozenset(range(4)), frozenset(range(4, 8)))
    swapped = {"4-5": [1, 1], "0-1": [0, 0]}
    assert sockets.sockets(sysfs(tmp_path / "swapped", swapped)) == (frozenset((0, 1)), frozenset((4, 5)))


@pytest.mark.parametrize(
    "nodes",
    [{"0-3": [0] * 4}, {"0-3": [0, 1, 2, 3]}, {"0-1": [0, 0], "2-3": [0, 0]}, {"0-1": [0, 1], "2-3": [1, 1]}],
    ids=["one", "memory of one node", "two nodes of one socket", "a node of two sockets"],
)
def test_machines_that_count_as_one_socket(nodes: Mapping[str, Sequence[int]], tmp_path: Path) -> None:
    assert free_sockets(range(4), sysfs(tmp_path / "sys", nodes)) == 1
    assert cpus_of(0, 2, range(4), tmp_path / "sys") is None


def test_a_socket_without_memory_and_a_kernel_that_says_nothing(tmp_path: Path) -> None:
    assert free_sockets(ALL, sysfs(tmp_path / "sys", TWO, has_memory="0\n")) == 1
    assert free_sockets(ALL, tmp_path / "missing") == 1


def test_ranks_divide_the_sockets(tmp_path: Path) -> None:
    root = sysfs(tmp_path / "sys", TWO)
    assert [cpus_of(i, 2, ALL, root) for i in range(2)] == [FIRST, SECOND]
    assert [cpus_of(i, 4, ALL, root) for i in range(4)] == [FIRST, FIRST, SECOND, SECOND]
    for n_ranks in (1, 3):
        assert [cpus_of(i, n_ranks, ALL, root) for i in range(n_ranks)] == [None] * n_ranks


def test_who_was_bound_already_stays(tmp_path: Path) -> None:
    root = sysfs(tmp_path / "sys", TWO)
    assert cpus_of(1, 2, FIRST, root) is None
    assert cpus_of(0, 2, range(15), root) is None


def test_ranks_share_cores() -> None:
    assert sharing(ALL, [ALL, ALL, ALL]) == 3
    assert sharing(FIRST, [FIRST, SECOND]) == 1
    assert sharing(FIRST, [FIRST, SECOND, ALL]) == 1.5
    assert sharing(ALL, [FIRST, SECOND, ALL]) == 3


def test_draft_ranks_are_not_bound(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SYSFS", sysfs(tmp_path / "sys", TWO))
    model = ModelConfig(path=TARGET)
    config = EngineConfig(model, pipeline=PipelineConfig(layer_split=LayerSplit((1.0,), (2,))))
    drafts = replace(config, drafts=(DraftConfig(model=model, layer_split=LayerSplit((1.0,))),))
    auto = EngineConfig(model, pipeline=PipelineConfig(auto=True), drafts=(DraftConfig(model=model),))

    def places(config: EngineConfig, n: int) -> list[frozenset[int] | None]:
        return [own_socket(config, transport, ALL) for transport in LocalWorld(n).transports]

    assert places(config, 2) == [FIRST, SECOND]
    assert places(drafts, 3) == places(auto, 3) == [FIRST, SECOND, None]
    assert places(auto, 2) == [FIRST, SECOND]
    assert places(replace(auto, drafts=()), 3) == [None] * 3
    assert places(replace(config, model=replace(model, numa="distribute")), 2) == [None, None]


def cores_of_machine(folder: Path, siblings: Sequence[str]) -> Path:
    """A machine whose CPUs have these hardware threads of one core."""
    system = folder / "devices/system/cpu"
    for cpu, text in enumerate(siblings):
        (system / f"cpu{cpu}/topology").mkdir(parents=True)
        (system / f"cpu{cpu}/topology/thread_siblings_list").write_text(f"{text}\n")
    (system / "online").write_text(f"0-{len(siblings) - 1}\n")
    return folder


def test_stages_have_cores_of_their_own_where_drafts_want_them_too(tmp_path: Path) -> None:
    root = cores_of_machine(tmp_path / "sys", ["0,4", "1,5", "2,6", "3,7"] * 2)
    cpus, halves = range(8), [frozenset((0, 1, 4, 5)), frozenset((2, 3, 6, 7))]
    assert [cores_of(i, [2, 2], 1, cpus, root) for i in range(2)] == halves
    assert [cores_of(i, [1, 3], 1, cpus, root) for i in range(2)] == [frozenset((0, 4)), frozenset(cpus) - {0, 4}]
    for threads, n_others in (([2, 1], 1), ([2, 3], 1), ([2, 2], 0)):  # there is room, too little for stages, no draft
        assert [cores_of(i, threads, n_others, cpus, root) for i in range(2)] == [None, None]
    assert cores_of(0, [2, 2], 1, range(7), root) is None, "bound already"
    assert cores_of(0, [1, 1], 1, range(2), tmp_path / "missing") is None


def test_ranks_of_two_cores(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sockets, "SYSFS", cores_of_machine(tmp_path / "sys", ["0", "1"]))
    model = ModelConfig(path=TARGET)
    drafts = (DraftConfig(model=model, layer_split=LayerSplit((1.0,))),)
    config = EngineConfig(model, pipeline=PipelineConfig(layer_split=LayerSplit((0.5, 0.5))), drafts=drafts)

    def places(config: EngineConfig, n: int) -> list[frozenset[int] | None]:
        return [own_cores(config, transport, range(2)) for transport in LocalWorld(n).transports]

    assert places(config, 3) == [frozenset((0,)), frozenset((1,)), None]
    only_coordinates = replace(config.pipeline, layer_split=LayerSplit((0, 0.5, 0.5)))
    assert places(replace(config, pipeline=only_coordinates), 4) == [None] * 4
    assert places(replace(config, drafts=()), 2) == [None] * 2
    assert places(replace(config, model=replace(model, numa="distribute")), 3) == [None] * 3


BOUND = """
import os, sys, threading
from pathlib import Path
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig, TARGET
from ggpipe.launch import sockets
from ggpipe.engine import wiring
from ggpipe.engine.process import run_alike

sockets.SYSFS = Path(sys.argv[2])
config = EngineConfig(ModelConfig(path=Path(sys.argv[1])))

def work(transport, attend, say):
    tasks = [os.sched_getaffinity(int(task)) for task in os.listdir("/proc/self/task")]
    cpus = set().union(*tasks)
    threads, n_cores = wiring.threads_of(config, transport, TARGET), wiring.machine_cores(transport)
    return transport.rank, sorted(cpus), threads, n_cores

print(run_alike(config, work))
"""


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two sockets need two CPUs")
def test_ranks_bind_all_their_threads(tmp_path: Path) -> None:
    """This machine's CPUs as two sockets."""
    own = sorted(os.sched_getaffinity(0))
    half = len(own) // 2
    parts = own[:half], own[half:]
    nodes = {",".join(map(str, cpus)): [i] * len(cpus) for i, cpus in enumerate(parts)}
    result = on_ranks(2, BOUND, TARGET, sysfs(tmp_path / "sys", nodes))
    assert result.returncode == 0, result.stderr
    found = sorted(map(ast.literal_eval, result.stdout.split("\n")[:2]))
    for (rank, cpus, threads, n_cores), part in zip(found, parts, strict=True):
        assert cpus == list(part), rank
        assert threads[0] <= len(part)
        assert n_cores <= len(own)
