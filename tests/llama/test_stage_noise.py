"""For timing, a stage computes on noise when nothing comes in."""

import ctypes
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from support.reference import run_of
from support.zoo import ZOO, make

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.stage import Stage

_M_PERTURB = -6  # of mallopt


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "bloom", "deepseek2", "jamba"])
def test_nothing_comes_in(name: str, tmp_path: Path) -> None:
    """For timing: a later stage without the one before it computes on noise, and what it computes are numbers."""
    path, n_layer = make(name, tmp_path / "model.gguf"), ZOO[name].n_layer
    file = ModelFile.open(path)
    middle = Stage(file, (1, 2), ModelConfig(path=path), ContextConfig(n_ctx=64), (1, 1))
    last = Stage(file, (n_layer - 1, n_layer), ModelConfig(path=path), ContextConfig(n_ctx=64), (1, 1))
    run = run_of(1, range(5), 0)
    outcome = middle.decode(run, None)
    width = file.metadata[f"{file.architecture}.embedding_length"]
    assert isinstance(width, int)
    rows = np.frombuffer(outcome.outgoing[-5 * width * 4 :], np.float32).reshape(5, width)
    assert np.isfinite(rows).all()
    assert len(np.unique(rows, axis=0)) == 5
    for row in last.decode(run, None).rows:
        assert np.isfinite(row.logits).all()
    middle.close()
    last.close()


@pytest.fixture
def freed_memory_changes() -> Iterator[None]:
    """glibc overwrites memory when it is freed, so reading it later shows."""
    libc = ctypes.CDLL(None)
    if not hasattr(libc, "mallopt"):
        pytest.skip("glibc's mallopt is needed")
    libc.mallopt(_M_PERTURB, 0xA5)
    yield
    libc.mallopt(_M_PERTURB, 0)


@pytest.mark.usefixtures("freed_memory_changes")
def test_noise_stays_until_it_is_read(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "model.gguf")
    stage = Stage(ModelFile.open(path), (1, 2), ModelConfig(path=path), ContextConfig(n_ctx=256), (1, 1))
    for i, n_rows in enumerate((2, 8, 64)):
        stage.forget_all()
        stage.decode(run_of(i + 1, range(n_rows), 0), None)
        assert stage._native.missing == 0, f"the noise for {n_rows} rows was lost"
    stage.close()
