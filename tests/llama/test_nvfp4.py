"""Models in NVFP4, whose matrices have scales as tensors of their own: alone, in stages, and in groups."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.nvfp4 import as_nvfp4
from support.pipeline import Pipeline
from support.reference import Logits, run_of
from support.zoo import make

from ggpipe.config.context import ContextConfig
from ggpipe.llama.gguf import ModelFile

CONTEXT = ContextConfig(n_ctx=256, n_seq=4)
RUNS = (run_of(1, range(5, 25), 0), run_of(2, [7], 20), run_of(3, [9, 11, 13], 21))


@pytest.fixture(scope="module", params=["llama", "qwen3moe"])
def floats(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("nvfp4")
    return make(request.param, folder / f"{request.param}.gguf", width=256, n_ff=256)


def logits(
    path: Path, cuts: tuple[int, ...] = (), shares: tuple[tuple[float, ...], ...] = (), fast: bool | None = None
) -> Logits:
    with Pipeline(path, cuts, replace(CONTEXT, fast_kernels=fast), shares=shares) as pipeline:
        return np.concatenate([pipeline.decode(run) for run in RUNS])


def distance(found: Logits, expected: Logits) -> float:
    """In standard deviations. A scale that is left out makes it about 1."""
    return float(np.sqrt(np.square(found - expected).mean()) / expected.std())


def test_alone_and_in_parts(floats: Path, tmp_path: Path) -> None:
    """Random models make much of the rounding of activations, which ggml does as well."""
    path = as_nvfp4(floats, tmp_path / "nvfp4.gguf")
    tensors = ModelFile.open(path).tensors.items()
    assert {name.split(".")[-1] for name, tensor in tensors if tensor.type == "nvfp4"} == {"weight"}
    assert any(name.endswith(".scale") for name, _ in tensors)
    whole = logits(path)
    assert distance(whole, logits(as_nvfp4(floats, tmp_path / "floats.gguf", as_float=True))) < 0.3
    assert distance(whole, logits(path, fast=False)) < 0.1
    np.testing.assert_array_equal(logits(path, (1,)), whole)
    assert distance(logits(path, (), ((1, 1),)), whole) < 0.1
