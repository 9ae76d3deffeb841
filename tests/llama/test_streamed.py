"""Weights that are read from the file when they are needed: the bits are those of weights in memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.architectures import ARCHITECTURES, MIXTURES, NEVER_SMALL, SMALL, write
from support.commands import TARGET
from support.pipeline import Pipeline
from support.reference import Logits, run_of
from support.zoo import split

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.errors import MemoryNeededError, RunError
from ggpipe.llama.bundled import inflated_pair
from ggpipe.llama.completed import EMBEDDINGS
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.inflate import Inflation, Mixture

RUNS = (11, 1, 1, 4, 1, 70, 2)
FEW_MATRICES = {"mamba2"}
"""There is room for all that may be streamed."""
CONTEXT = ContextConfig(n_ctx=256)


def logits(
    path: Path,
    memory_gb: float | None,
    context: ContextConfig = CONTEXT,
    threads: int = 1,
    shares: Sequence[Sequence[float]] = (),
) -> tuple[Logits, int]:
    """Of random tokens, decoded in RUNS: (rows, vocabulary), and how many bytes were read meanwhile. `memory_gb`: None:
    the weights are in memory."""
    model = ModelConfig(
        path=path, repack=False, load_mode="mmap" if memory_gb is None else "stream", stream_memory_gb=memory_gb
    )
    tokens = np.random.default_rng(0).integers(1, 100, sum(RUNS)).tolist()
    rows, pos = [], 0
    with Pipeline(path, (), context, model=model, threads=threads, shares=shares) as pipeline:
        if memory_gb is not None:
            for stage in pipeline.stages:
                stage._native.take_stream_times()
        for i, n in enumerate(RUNS, 1):
            rows.append(pipeline.decode(run_of(i, tokens[pos : pos + n], pos)))
            pos += n
        n_read = 0 if memory_gb is None else sum(stage._native.take_stream_times()[0] for stage in pipeline.stages)
    return np.concatenate(rows), n_read


def least_gb(path: Path, context: ContextConfig = CONTEXT, shares: Sequence[Sequence[float]] = ()) -> float:
    """The memory without which weights cannot be streamed."""
    model = ModelConfig(path=path, load_mode="stream", stream_memory_gb=1e-9)
    with pytest.raises(MemoryNeededError, match="needs at least") as refused:
        Pipeline(path, (), context, model=model, shares=shares)
    found = re.search(r"at least (\S+) GB", str(refused.value))
    assert found is not None
    return float(found[1]) * 1.01  # it is rounded


def decode_rows(pipeline: Pipeline, n: int) -> None:
    """Runs of one row, after one of three."""
    for i in range(n):
        pipeline.decode(run_of(i + 2, [5], i + 3))


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES, *MIXTURES} - NEVER_SMALL))
def test_same_bits_with_the_least_memory(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model.gguf", sizes=SMALL)
    streamed, n_read = logits(path, least_gb(path), threads=2)
    np.testing.assert_array_equal(streamed, logits(path, None, threads=2)[0])
    assert n_read > 0 or name in FEW_MATRICES


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "deepseek2", "qwen35moe", "gpt-oss"])
def test_same_bits_in_exact_runs(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model.gguf", sizes=SMALL)
    context = ContextConfig(n_ctx=256, exact=True, fast_kernels=True)
    streamed, n_read = logits(path, least_gb(path), context)
    np.testing.assert_array_equal(streamed, logits(path, None, context)[0])
    assert n_read > 0


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "qwen35moe"])
def test_same_bits_in_a_group(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model.gguf")
    shares = ((1, 1),)
    streamed, n_read = logits(path, 1.3 * least_gb(path, shares=shares), shares=shares)  # the parts' weights differ
    np.testing.assert_array_equal(streamed, logits(path, None, shares=shares)[0])
    assert n_read > 0 or name == "qwen35moe"


def test_weights_that_are_not_streamed_count(tmp_path: Path) -> None:
    """The embeddings, and slices within the rows of matrices in a group."""
    path = write("llama", tmp_path / "model.gguf")
    sizes = {name: tensor.size for name, tensor in ModelFile.open(path).tensors.items()}
    layers = sum(size for name, size in sizes.items() if name.startswith("blk."))
    within_rows = sum(size for name, size in sizes.items() if "ffn_down" in name or "attn_output" in name)
    assert least_gb(path) * 1e9 > sum(sizes.values()) - layers
    assert least_gb(path, shares=((1, 1),)) * 1e9 > sizes[EMBEDDINGS] + within_rows / 2


def test_nothing_is_read_where_everything_fits(tmp_path: Path) -> None:
    path = write("qwen3moe", tmp_path / "model.gguf", sizes=SMALL)
    assert logits(path, 1.0)[1] == 0


@pytest.mark.parametrize("name", ["llama", "qwen3moe"])
def test_a_file_that_cannot_be_read(name: str, tmp_path: Path) -> None:
    """It becomes empty for whoever reads it: mapped weights stay."""
    path = write(name, tmp_path / "model.gguf", sizes=SMALL)
    model = ModelConfig(path=path, load_mode="stream", stream_memory_gb=least_gb(path))
    with Pipeline(path, (), CONTEXT, model=model) as pipeline:
        pipeline.decode(run_of(1, [1, 2, 3], 0))
        with (tmp_path / "empty").open("w+b") as empty:
            for link in Path("/proc/self/fd").iterdir():
                if link.is_symlink() and link.resolve() == path:
                    os.dup2(empty.fileno(), int(link.name))
        with pytest.raises(RunError, match=f"cannot read {re.escape(str(path))}: it is shorter than it was"):
            decode_rows(pipeline, 8)


def test_experts_of_the_next_layer_are_predicted(tmp_path: Path) -> None:
    """Of two layers, the second adds nothing: what the next router reads is known."""
    path = tmp_path / "mixture.gguf"
    Inflation(TARGET, widen=4, deepen=2, mixture=Mixture(n_expert=8, n_used=2)).write(path)
    model = ModelConfig(path=path, load_mode="stream", stream_memory_gb=0.4 * path.stat().st_size / 1e9)
    with Pipeline(path, (), CONTEXT, model=model) as pipeline:
        native = pipeline.stages[0]._native
        pipeline.decode(run_of(1, [1, 2, 3], 0))
        native.take_stream_times()
        decode_rows(pipeline, 20)
        _, _, n_predicted, n_right = native.take_stream_times()
    assert n_predicted > 20
    assert n_right > 0.5 * n_predicted


def test_files_in_parts(tmp_path: Path) -> None:
    path = write("llama", tmp_path / "model.gguf", sizes=SMALL)
    first = split(path, tmp_path / "part", 3)[0]
    np.testing.assert_array_equal(logits(first, least_gb(first))[0], logits(path, None)[0])


MEMORY = """
import sys
from pathlib import Path
from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import Row, Run
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.machine import resident_bytes
from ggpipe.llama.stage import Stage
path = Path(sys.argv[1])
before = resident_bytes()
file = ModelFile.open(path)
model = ModelConfig(path=path, load_mode="stream", stream_memory_gb=0.15)
stage = Stage(file, (0, file.n_layer), model, ContextConfig(n_ctx=256), (1, 1))
for i in range(4):
    stage.decode(Run(id=i + 1, rows=(Row(token=5, pos=i, seqs=(0,), request=0, logits_request=-1),)), None)
print(resident_bytes() - before)
"""


def test_memory_is_what_is_given() -> None:
    """And the program's own."""
    path = inflated_pair().target
    assert path.stat().st_size > 400e6
    result = subprocess.run([sys.executable, "-c", MEMORY, path], stdout=subprocess.PIPE, text=True, check=True)
    assert 0.1e9 < int(result.stdout) < 0.25e9
