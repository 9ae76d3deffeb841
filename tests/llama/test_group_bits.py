"""The bits of a group's logits: the same in each run, and those of one process with as many devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.devices import tensor_parallel
from support.pipeline import Pipeline
from support.reference import Logits, Reference, run_of
from support.runs import TREE
from support.zoo import make

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig

CONTEXT = ContextConfig(n_ctx=256, n_seq=4, fast_kernels=False)
FIELDS = {"n_seq_max": 4, "kv_unified": True, "swa_full": True, "flash_attn_type": 1}
RUNS = (*(run for run in TREE if run.rows), run_of(9, [5], 12, (2,)))


def logits_of_group(path: Path, shares: tuple[float, ...], repack: bool = False) -> Logits:
    model = ModelConfig(path=path, repack=repack)
    with Pipeline(path, context=CONTEXT, model=model, shares=[shares]) as pipeline:
        logits = []
        for run in TREE:
            outcome = pipeline.outcome(run)
            logits += [row.logits for row in outcome.rows]
        return np.array([*logits, *pipeline.decode(RUNS[-1])])


@pytest.mark.parametrize("shares", [(1, 1), (3, 1), (1, 1, 1)], ids=str)
@pytest.mark.parametrize(("name", "weight_type"), [("llama", "f32"), ("llama", "q4_0"), ("qwen3moe", "q8_0")])
def test_one_process_with_as_many_devices(
    name: str, weight_type: str, shares: tuple[float, ...], tmp_path: Path
) -> None:
    """libllama's kernels on the same slices, and its own sum, whose order differs from three devices on. Each device
    has a KV head, each head whole blocks of weights: ggml multiplies what is in the memory of an empty slice by 0, and
    that may be no number."""
    path = make(name, tmp_path / "model.gguf", n_ff=512, weight_type=weight_type, n_head_kv=4, width=256)
    with Reference(path, 256, model=tensor_parallel(shares), context=FIELDS) as reference:
        expected = []
        for run in TREE:
            if run.rows:
                expected.append(reference.decode(run))
            else:
                for op in run.ops:
                    reference.apply(op)
        rows = np.concatenate([*expected, reference.decode(RUNS[-1])])
    logits = logits_of_group(path, shares)
    assert logits.shape == rows.shape
    if len(shares) == 2:
        np.testing.assert_array_equal(logits, rows)
    else:
        assert np.abs(logits - rows).max() < 0.1 * rows.std()
