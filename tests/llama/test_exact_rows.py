"""--exact: a row's logits have the same bits in runs of any length, whatever the weights' type and the architecture. In
default numerics, this holds where ggpipe's own kernels multiply all weights."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import get_args
from unittest.mock import patch

import numpy as np
import pytest
from support.pipeline import Pipeline, even_cuts
from support.reference import Logits, run_of
from support.zoo import ZOO, ZooModel, make

from ggpipe.config.context import ContextConfig, FlashAttention, KvType
from ggpipe.config.model import ModelConfig
from ggpipe.llama import machine
from scripts.models.quantize import quantize

RUNS = (16, 1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 17)
TYPES = (
    "F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q2_K", "Q3_K_M", "Q4_K_M", "Q5_K_M", "Q6_K",
    "IQ4_NL", "IQ4_XS", "IQ3_S", "IQ2_XS", "IQ1_M", "MXFP4_MOE",
)  # fmt: skip
# Rows of 256 weights, as K-quants need them. A router has float weights in all MoE models.
EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 256}
WIDE = {"dense": ZOO["llama"], "moe": ZooModel("qwen3moe", EXPERTS, width=256, n_head=4, n_head_kv=4, n_ff=256)}
WHOLE = ("mamba", "mamba2", "rwkv6", "rwkv7", "hrm_text")  # models that cannot be cut


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exact")


def logits(
    path: Path,
    runs: Sequence[int],
    cuts: Sequence[int] = (),
    threads: int = 1,
    repack: bool = True,
    flash_attn: FlashAttention = "on",
    cells: KvType = "f16",
    exact: bool = True,
    fast: bool | None = None,
    shares: Sequence[Sequence[float]] = (),
) -> Logits:
    """Logits of the same random tokens, decoded in runs of these lengths."""
    tokens = np.random.default_rng(0).integers(1, 100, sum(runs)).tolist()
    context = ContextConfig(
        n_ctx=256, exact=exact, fast_kernels=fast, flash_attn=flash_attn, cache_type_k=cells, cache_type_v=cells
    )
    rows, pos = [], 0
    with Pipeline(path, cuts, context, ModelConfig(path=path, repack=repack), threads, shares=shares) as pipeline:
        for i, n in enumerate(runs):
            rows.append(pipeline.decode(run_of(i + 1, tokens[pos : pos + n], pos)))
            pos += n
    return np.concatenate(rows)


@pytest.mark.each_value
@pytest.mark.parametrize("fast", [False, True], ids=["ggml", "fast"])
@pytest.mark.parametrize("repack", [True, False])
@pytest.mark.parametrize("ftype", TYPES)
@pytest.mark.parametrize("name", WIDE)
def test_types_of_weights(name: str, ftype: str, repack: bool, fast: bool, folder: Path) -> None:
    with patch.dict(ZOO, WIDE):
        path = make(name, folder / f"{name}.gguf")
    if ftype != "F32":
        whole, path = path, folder / f"{name}-{ftype}.gguf"
        if not path.exists():
            quantize(whole, path, ftype)
    one_by_one = logits(path, [1] * sum(RUNS), repack=repack, fast=fast)
    np.testing.assert_array_equal(logits(path, RUNS, (1,), threads=2, repack=repack, fast=fast), one_by_one)


@pytest.mark.pairwise
@pytest.mark.parametrize("fast", [False, True], ids=["ggml", "fast"])
@pytest.mark.parametrize("flash_attn", ["on", "off"])
@pytest.mark.parametrize("name", ZOO)
def test_architectures(name: str, flash_attn: FlashAttention, fast: bool, folder: Path) -> None:
    path = make(name, folder / f"{name}.gguf")
    cuts = () if name in WHOLE else even_cuts(ZOO[name].n_layer, 2)
    one_by_one = logits(path, [1] * sum(RUNS), flash_attn=flash_attn, fast=fast)
    np.testing.assert_array_equal(logits(path, RUNS, cuts, threads=2, flash_attn=flash_attn, fast=fast), one_by_one)


@pytest.mark.parametrize("cells", get_args(KvType))
def test_types_of_cells(cells: KvType, folder: Path) -> None:
    path = make("llama", folder / "llama.gguf")
    one_by_one = logits(path, [1] * sum(RUNS), cells=cells)
    np.testing.assert_array_equal(logits(path, RUNS, (1,), threads=2, cells=cells), one_by_one)


@pytest.mark.skipif(not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()), reason="needs a CPU with AVX2")
@pytest.mark.parametrize("ftype", ["F32", "Q8_0", "Q4_K_M"])
def test_mixtures_in_default_numerics(ftype: str, folder: Path) -> None:
    """A router's products are floats, and must not depend on the number of rows either."""
    mixture = ZooModel("qwen3moe", EXPERTS, width=256, n_head=8, n_head_kv=8, n_ff=256)
    with patch.dict(ZOO, {"narrow-heads": mixture}):
        path = make("narrow-heads", folder / "narrow-heads.gguf")
    if ftype != "F32":
        whole, path = path, folder / f"narrow-heads-{ftype}.gguf"
        quantize(whole, path, ftype)
    one_by_one = logits(path, [1] * sum(RUNS), exact=False)
    np.testing.assert_array_equal(logits(path, RUNS, (1,), threads=2, exact=False), one_by_one)
    if ftype == "Q4_K_M":  # whose rows of one block cannot be divided
        return
    group = [(1, 1)]
    alone = logits(path, [1] * sum(RUNS), exact=False, shares=group)
    np.testing.assert_array_equal(logits(path, RUNS, exact=False, shares=group), alone)
