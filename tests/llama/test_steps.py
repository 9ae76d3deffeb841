"""Operations that are computed together, or on one thread, without a wait between them: the bits are those of one thread,
which computes one operation after another."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from support.architectures import ARCHITECTURES, MIXTURES, SMALL, write
from support.pipeline import Pipeline
from support.reference import Logits, run_of

from ggpipe.config.context import ContextConfig
from ggpipe.llama import machine

RUNS = (11, 1, 1, 4, 1, 70, 2)
"""From one row, most of whose operations are small, to as many as nothing is small for."""

pytestmark = pytest.mark.skipif(
    not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()), reason="needs a CPU with AVX2"
)


def logits(path: Path, threads: int, context: ContextConfig) -> Logits:
    """Of the same random tokens, decoded in RUNS: (rows, vocabulary)."""
    tokens = np.random.default_rng(0).integers(1, 100, sum(RUNS)).tolist()
    rows, pos = [], 0
    with Pipeline(path, (), context, threads=threads) as pipeline:
        for i, n in enumerate(RUNS, 1):
            rows.append(pipeline.decode(run_of(i, tokens[pos : pos + n], pos)))
            pos += n
    return np.concatenate(rows)


@pytest.mark.parametrize("threads", [2, 3])
@pytest.mark.parametrize("name", sorted({*ARCHITECTURES, *MIXTURES} - {"plm", "rwkv6qwen2"}))
def test_same_bits_as_one_thread(name: str, threads: int, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model.gguf", sizes=SMALL)
    context = ContextConfig(n_ctx=256)
    np.testing.assert_array_equal(logits(path, threads, context), logits(path, 1, context))
