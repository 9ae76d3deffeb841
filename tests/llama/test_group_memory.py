"""What a part of a group holds in memory, each part being a process of its own."""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from support import zoo
from support.commands import HANG_S, ROOT

from ggpipe.llama.gguf import ModelFile

MB = 10**6
N_CELLS, N_EXPERTS, WIDTH, N_LAYER = 2048, 24, 512, 2
KV_BYTES = N_CELLS * N_LAYER * 2 * WIDTH * 2  # K and V, f16
BESIDE = 30 * MB
"""Of a process beside weights and KV cells: what it computes in, and libllama."""

PART = """
import json, sys
from pathlib import Path
from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import Row, Run
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import Group
from ggpipe.llama.libllama import native
from ggpipe.llama.stage import Stage

path, part, n_parts, memory, n_cells, load_mode = json.loads(sys.argv[1])

def resident(kind):
    with open("/proc/self/smaps_rollup") as lines:
        return sum(1024 * int(line.split()[1]) for line in lines if line.startswith(kind + ":"))

file = ModelFile.open(Path(path))
before = resident("Rss")
group = None
if n_parts > 1:
    sum_ = native.shared_sum(memory, part, n_parts)
    group = Group(part=part, n_parts=n_parts, shares=(1.0,) * n_parts, sum=sum_)
context = ContextConfig(n_ctx=n_cells, n_ubatch=64)
model = ModelConfig(path=Path(path), load_mode=load_mode)
stage = Stage(file, (0, file.n_layer), model, context, (1, 1), group=group)
for at in range(0, n_cells, 64):
    rows = tuple(Row(token=5, pos=i, seqs=(0,), request=0) for i in range(at, at + 64))
    stage.decode(Run(id=at + 1, rows=rows), None)
print(json.dumps((resident("Rss") - before, resident("Locked"))))
stage.close()
"""


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights are many and whose computing is little: experts."""
    path = tmp_path_factory.mktemp("memory") / "experts.gguf"
    experts = {"expert_count": N_EXPERTS, "expert_used_count": 1, "expert_feed_forward_length": WIDTH}
    model = replace(zoo.ZOO["qwen3moe"], metadata=experts, width=WIDTH, n_head=4, n_head_kv=4, n_layer=N_LAYER)
    zoo.ZOO["experts"] = model
    return zoo.make("experts", path)


def resident_bytes(path: Path, n_parts: int, load_mode: str = "mmap") -> list[list[int]]:
    """Of each part: what it holds for a stage, and how much of its memory is locked."""
    memory = os.memfd_create("group")
    children = [
        subprocess.Popen(
            [sys.executable, "-c", PART, json.dumps((str(path), part, n_parts, memory, N_CELLS, load_mode))],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            pass_fds=(memory,),
        )
        for part in range(n_parts)
    ]
    os.close(memory)
    outs = [child.communicate(timeout=HANG_S)[0] for child in children]
    assert not any(child.returncode for child in children)
    return [json.loads(out) for out in outs]


@pytest.mark.parametrize("load_mode", ["mmap", "none", "mmap+mlock"])
def test_a_part_of_two_holds_half(load_mode: str, path: Path) -> None:
    """A part's experts lie apart in the file, and are used there: nothing is copied but columns."""
    if "mlock" in load_mode and resource.getrlimit(resource.RLIMIT_MEMLOCK)[0] != resource.RLIM_INFINITY:
        pytest.skip("may not lock memory")
    weights = sum(tensor.size for name, tensor in ModelFile.open(path).tensors.items() if name != "token_embd.weight")
    for held, locked in resident_bytes(path, 2, load_mode):
        assert held < 0.55 * (weights + KV_BYTES) + BESIDE < weights
        assert (locked > 0.1 * weights) == ("mlock" in load_mode)
