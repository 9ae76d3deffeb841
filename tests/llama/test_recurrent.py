"""ggpipe's own kernels for recurrent layers: ggml's logits but for rounding, and the same bits for every run, number of
threads and place of a state."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from support.architectures import SMALL, write
from support.pipeline import Pipeline
from support.reference import Logits

from ggpipe.config.context import ContextConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, Run
from ggpipe.llama import machine

# Delta nets with a gate for each head, or for each column; convolutions of width 3; state spaces of two kinds
MODELS = ("qwen35", "qwen35moe", "kimi-linear", "lfm2", "granitehybrid", "jamba")
CONTEXT = ContextConfig(n_ctx=1280, n_seq=3)
ROWS = ((0, 37), (1, 1), (2, 5), (0, 1), (1, 18), (0, 16), (2, 3), (1, 1), (2, 1))
"""Sequence and number of rows of each run."""

pytestmark = pytest.mark.skipif(
    not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()), reason="needs a CPU with AVX2"
)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp("recurrent") / "model.gguf", sizes=SMALL)


def rows() -> Iterator[tuple[Row, ...]]:
    """Of each run."""
    rng = np.random.default_rng(1)
    length = [0, 0, 0]
    for seq, n in ROWS:
        positions = range(length[seq], length[seq] + n)
        tokens = rng.integers(0, 100, n).tolist()
        yield tuple(
            Row(token=token, pos=pos, seqs=(seq,), request=0, logits_request=0)
            for token, pos in zip(tokens, positions, strict=True)
        )
        length[seq] += n


def logits(
    path: Path, context: ContextConfig = CONTEXT, threads: int = 1, *, apart: bool = False, mixed: bool = False
) -> Logits:
    """Of all rows, (rows, vocabulary), in the order of `rows`. `apart`: each in a run of its own. `mixed`: two
    sequences in most runs."""
    runs = [(row,) for run in rows() for row in run] if apart else list(rows())
    if mixed:  # no two runs one after another are of the same sequence
        runs = [a + b for a, b in zip(runs[::2], [*runs[1::2], ()], strict=True)]
    with Pipeline(path, (), context, threads=threads) as pipeline:
        return np.concatenate(
            [
                pipeline.decode(Run(id=i, rows=run, ops=(), logits_requests=(LogitsRequest(LogitsKind.FULL),)))
                for i, run in enumerate(runs, 1)
            ]
        )


def test_equals_ggml_but_for_rounding(model: Path) -> None:
    """A few rows may differ by more: experts whose scores are nearly tied."""
    ours, ggmls = logits(model), logits(model, replace(CONTEXT, fast_kernels=False))
    differences = np.abs(ours - ggmls).max(axis=1) / ggmls.std()
    assert 0 < np.median(differences) < 0.01
    assert np.quantile(differences, 0.95) < 0.05


@pytest.mark.parametrize("threads", [2, 5])
def test_same_bits_for_every_number_of_threads(model: Path, threads: int) -> None:
    np.testing.assert_array_equal(logits(model, threads=threads), logits(model))


def test_same_bits_for_rows_alone_and_together(model: Path) -> None:
    """Also if runs have rows of several sequences, whose states libllama moves to other cells."""
    together = logits(model)
    np.testing.assert_array_equal(logits(model, apart=True), together)
    np.testing.assert_array_equal(logits(model, mixed=True), together)
