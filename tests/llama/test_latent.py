"""Latent attention of long prompts, with keys and values for each head: ggml's logits but for rounding, and the same
bits for every number of threads. Runs whose rows share few cells have the bits of short ones."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from support.architectures import SMALL, write
from support.pipeline import Pipeline
from support.reference import Logits

from ggpipe.config.context import ContextConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, Run
from ggpipe.llama import machine

CONTEXT = ContextConfig(n_ctx=2048, n_seq=64)
LONG = (512, 512, 300, 1, 5)
"""Rows of the runs of a prompt: in the second and the third, each head has its own keys and values."""
SHORT = (200,) * 6 + (124, 1, 5)

pytestmark = pytest.mark.skipif(
    not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()), reason="needs a CPU with AVX2"
)


@pytest.fixture(scope="module", params=["deepseek2", "mistral4", "kimi-linear"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(request.param, tmp_path_factory.mktemp("latent") / "model.gguf", sizes=SMALL)


def rows_of(n: int) -> list[Row]:
    tokens = np.random.default_rng(1).integers(0, 100, n).tolist()
    return [Row(token=token, pos=pos, seqs=(0,), request=0, logits_request=0) for pos, token in enumerate(tokens)]


def in_sequence(row: Row, seq: int) -> Row:
    return structs.replace(row, seqs=(seq,))


def logits(
    path: Path,
    rows: Sequence[Row],
    counts: Sequence[int],
    context: ContextConfig = CONTEXT,
    threads: int = 1,
    shares: tuple[float, ...] = (),
) -> Logits:
    """Of all rows, in runs of these lengths: (rows, vocabulary). `shares`: of a group, if there are any."""
    ends = np.cumsum(counts)
    with Pipeline(path, (), context, threads=threads, shares=[shares] if shares else ()) as pipeline:
        return np.concatenate(
            [
                pipeline.decode(
                    Run(
                        id=end,
                        rows=tuple(rows[end - n : end]),
                        ops=(),
                        logits_requests=(LogitsRequest(LogitsKind.FULL),),
                    )
                )
                for n, end in zip(counts, ends.tolist(), strict=True)
            ]
        )


def test_equals_short_runs_and_ggml_but_for_rounding(model: Path) -> None:
    """A few rows differ by more: experts whose scores are nearly tied."""
    rows = rows_of(sum(LONG))
    ours = logits(model, rows, LONG)
    for others in (logits(model, rows, SHORT), logits(model, rows, LONG, replace(CONTEXT, fast_kernels=False))):
        differences = np.abs(ours - others).max(axis=1) / others.std()
        assert 0 < np.median(differences[512:]) < 0.01
        assert np.quantile(differences, 0.95) < 0.05
    np.testing.assert_array_equal(ours[:512], logits(model, rows, SHORT)[:512])


@pytest.mark.parametrize("threads", [2, 3, 7])
def test_same_bits_for_every_number_of_threads(model: Path, threads: int) -> None:
    rows = rows_of(sum(LONG))
    np.testing.assert_array_equal(logits(model, rows, LONG, threads=threads), logits(model, rows, LONG))


def test_exact_runs_have_the_bits_of_short_ones(model: Path) -> None:
    exact = replace(CONTEXT, exact=True, fast_kernels=True)
    rows = rows_of(sum(LONG))
    np.testing.assert_array_equal(logits(model, rows, LONG, exact), logits(model, rows, SHORT, exact))


def test_a_group_divides_the_heads(model: Path) -> None:
    rows = rows_of(sum(LONG))
    whole, group = logits(model, rows, LONG), logits(model, rows, LONG, shares=(1, 1))
    differences = np.abs(whole - group).max(axis=1) / whole.std()
    assert np.median(differences) < 0.01
    assert np.quantile(differences, 0.95) < 0.05


def test_rows_of_many_sequences_share_too_few_cells(model: Path) -> None:
    """64 of them, with four rows each: a run has the bits of shorter ones."""
    n_seq, n = CONTEXT.n_seq, 4
    before = [in_sequence(row, seq) for row in rows_of(20) for seq in range(n_seq)]
    more = [in_sequence(row, seq) for row in rows_of(20 + n)[20:] for seq in range(n_seq)]
    rows = [*before, *more]
    together = logits(model, rows, (*[64] * 20, 256))
    np.testing.assert_array_equal(logits(model, rows, (*[64] * 24,)), together)
