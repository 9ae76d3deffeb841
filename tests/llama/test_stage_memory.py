"""A stage reads its own share of a model and keeps no more than that in memory."""

import gc
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path

import pytest
from support.architectures import SMALL, write
from support.commands import HANG_S, TARGET
from support.reference import run_of
from support.zoo import _copy, pair_script

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import LoadMode, ModelConfig
from ggpipe.core.messages import KvKind, KvOp, Run
from ggpipe.errors import RunError
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import shape_of
from ggpipe.llama.stage import Stage
from scripts.models.quantize import quantize

MB = 1_000_000
N_LAYER = 6
STAGES = {"first": (0, 2), "middle": (2, 4), "last": (4, N_LAYER), "all": (0, N_LAYER)}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    """150,000 tokens, so the embedding and the head have 65 MB each, all layers together 20; and the same, tied."""
    folder = tmp_path_factory.mktemp("memory")
    whole, draft, tied = (folder / f"{name}.gguf" for name in ("whole", "draft", "tied"))
    shape = pair_script().Shape(n_layer=N_LAYER, width=768, n_head=12, n_head_kv=4, n_ff=2048, n_vocab=150_000)
    pair_script().make_pair(whole, draft, shape)
    draft.unlink()
    _copy(whole, tied, r"^output\.weight")
    return {"whole": whole, "tied": tied}


def share_bytes(file: ModelFile, first: int, last: int) -> int:
    """Bytes of the weights that layers [first, last) need, with the embedding and the head at the ends."""
    names = {name for name in file.tensors if name.startswith(tuple(f"blk.{i}." for i in range(first, last)))}
    if first == 0:
        names.add("token_embd.weight")
    if last == file.n_layer:
        names |= {"output_norm.weight", "token_embd.weight" if file.tied_output else "output.weight"}
    return sum(file.tensors[name].size for name in names)


def probe(path: Path, layers: tuple[int, int], mode: str, repack: bool) -> dict[str, int]:
    """What tests/probe_stage.py measures of this stage."""
    script = Path(__file__).parents[1] / "support" / "probe_stage.py"
    arguments = [str(path), *map(str, layers), mode, str(repack)]
    done = subprocess.run(
        [sys.executable, script, *arguments], capture_output=True, text=True, check=False, timeout=HANG_S
    )
    assert done.returncode == 0, done.stderr
    result: dict[str, int] = json.loads(done.stdout)
    return result


@pytest.mark.parametrize(("stage", "repack"), [*((stage, True) for stage in STAGES), ("middle", False)])
def test_reads_its_share(stage: str, repack: bool, models: Mapping[str, Path]) -> None:
    file = ModelFile.open(models["whole"])
    got = probe(models["whole"], STAGES[stage], "none", repack)
    share, header = share_bytes(file, *STAGES[stage]), sum(file.header_bytes)
    assert share <= got["read"] <= share + header + MB
    assert got["grown"] < share + 60 * MB  # the vocabulary alone takes 25


@pytest.mark.parametrize("stage", ["first", "middle", "last"])
def test_reads_a_tied_head_once(stage: str, models: Mapping[str, Path]) -> None:
    file = ModelFile.open(models["tied"])
    assert file.tied_output
    got = probe(models["tied"], STAGES[stage], "none", True)
    share, header = share_bytes(file, *STAGES[stage]), sum(file.header_bytes)
    assert share <= got["read"] <= share + header + MB


@pytest.mark.parametrize("name", ["whole", "tied"])
@pytest.mark.parametrize("stage", STAGES)
def test_mapped_share_is_resident(stage: str, name: str, models: Mapping[str, Path]) -> None:
    """Mapped weights are not read but resident; of the embedding only the rows of tokens that were met."""
    file = ModelFile.open(models[name])
    got = probe(models[name], STAGES[stage], "mmap", False)
    first, last = STAGES[stage]
    share = share_bytes(file, first, last)
    if first == 0 and not (last == N_LAYER and name == "tied"):
        share -= file.tensors["token_embd.weight"].size
    assert got["read"] <= 2 * sum(file.header_bytes) + MB
    assert share <= got["grown"] <= share + 60 * MB
    assert got["resident"] < share + 150 * MB


def test_mapped_stage_reads_only_what_it_repacks(models: Mapping[str, Path]) -> None:
    file = ModelFile.open(models["whole"])
    got = probe(models["whole"], STAGES["middle"], "mmap", True)
    share, headers = share_bytes(file, *STAGES["middle"]), 2 * sum(file.header_bytes)
    assert got["read"] <= share + headers + MB
    assert got["grown"] < share + 60 * MB


@pytest.mark.parametrize("mode", ["mmap", "none"])
def test_repacked_weights_are_loaded_step_by_step(mode: LoadMode, tmp_path: Path) -> None:
    """All bytes that are loaded count, however libllama loads them, and the user may stop in between."""
    path = quantize(TARGET, tmp_path / "target.gguf", "Q4_0")
    file = ModelFile.open(path)
    model, told = ModelConfig(path=path, load_mode=mode), list[tuple[int, int]]()

    def progress(done: int, total: int, most: float = math.inf) -> bool:
        told.append((done, total))
        return done < most

    Stage(file, (0, file.n_layer), model, ContextConfig(), (1, 1), progress).close()
    done, total = told[-1]
    assert done >= total
    assert [own for own, _ in told] == sorted(own for own, _ in told)
    with pytest.raises(RunError, match="loading was stopped"):
        Stage(file, (0, file.n_layer), model, ContextConfig(), (1, 1), partial(progress, most=1))


@pytest.mark.parametrize("warmup", [False, True])
def test_cells_have_memory_from_the_start_or_when_they_are_used(warmup: bool) -> None:
    file, context = ModelFile.open(TARGET), ContextConfig(n_ctx=32768, n_ubatch=8)
    cells = shape_of(file).cell_bytes((0, file.n_layer)) * context.n_ctx
    before = resident_bytes()
    stage = Stage(file, (0, file.n_layer), ModelConfig(path=TARGET), context, (1, 1), warmup=warmup)
    taken = resident_bytes() - before
    stage.close()
    assert cells > 100 * MB
    assert (taken > 0.9 * cells) if warmup else (taken < 0.5 * cells)


def test_ended_sequences_of_deepseek4_take_no_memory(tmp_path: Path) -> None:
    """libllama fills all cells of such a sequence with zeros."""
    path = write("deepseek4", tmp_path / "model.gguf", sizes=SMALL)
    file, context = ModelFile.open(path), ContextConfig(n_ctx=400_000, n_ubatch=512, n_seq=4)
    cells = shape_of(file).cell_bytes((0, file.n_layer)) * context.n_ctx
    assert cells > 30 * MB
    stage = Stage(file, (0, file.n_layer), ModelConfig(path=path), context, (1, 1), warmup=True)
    stage.decode(run_of(1, range(5, 100), 0), None)
    before = resident_bytes()
    stage.decode(Run(id=2, rows=(), ops=(KvOp(KvKind.RM, 0),), logits_requests=()), None)
    assert resident_bytes() - before < 0.3 * cells
    stage.close()


def resident_bytes() -> int:
    """RSS."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def test_objects_that_refer_to_themselves_do_not_stay_for_long() -> None:
    class Cycle:
        def __init__(self) -> None:
            self.own = self
            alive.add(id(self))

        def __del__(self) -> None:
            alive.discard(id(self))

    alive: set[int] = set()
    thresholds = gc.get_threshold()
    try:
        machine.collect_new_objects()
        for _ in range(20_000):
            Cycle()
        assert len(alive) < 1000
    finally:
        gc.set_threshold(*thresholds)
        gc.unfreeze()
