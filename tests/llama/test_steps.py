"""Operations between which the threads do not wait for each other: the bits are those of one thread, which computes one
after another."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from support.architectures import ARCHITECTURES, MIXTURES, NEVER_SMALL, SMALL, write
from support.pipeline import Pipeline
from support.reference import Logits, run_of

from ggpipe.config.context import ContextConfig
from ggpipe.llama import machine
from ggpipe.llama.libllama import native

RUNS = (11, 1, 1, 4, 1, 70, 2)
"""From one row, most of whose operations are small, to as many as no operation is small for."""
CONTEXT = ContextConfig(n_ctx=256)

pytestmark = pytest.mark.skipif(
    not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()), reason="needs a CPU with AVX2"
)


def logits(
    path: Path, threads: int, context: ContextConfig = CONTEXT, shares: Sequence[Sequence[float]] = ()
) -> Logits:
    """Of the same random tokens, decoded in RUNS: (rows, vocabulary)."""
    tokens = np.random.default_rng(0).integers(1, 100, sum(RUNS)).tolist()
    rows, pos = [], 0
    with Pipeline(path, (), context, threads=threads, shares=shares) as pipeline:
        for i, n in enumerate(RUNS, 1):
            rows.append(pipeline.decode(run_of(i, tokens[pos : pos + n], pos)))
            pos += n
    return np.concatenate(rows)


def waits(path: Path, threads: int, n_rows: int) -> tuple[int, int]:
    """Of a run's threads for each other, and its operations."""
    with Pipeline(path, (), CONTEXT, threads=threads) as pipeline:
        pipeline.decode(run_of(1, [5] * n_rows, 0))
        return pipeline.stages[0]._native.waits


@pytest.mark.parametrize("name", sorted({*ARCHITECTURES, *MIXTURES} - NEVER_SMALL))
def test_same_bits_as_one_thread(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model.gguf", sizes=SMALL)
    np.testing.assert_array_equal(logits(path, 3), logits(path, 1))


@pytest.mark.parametrize("name", ["qwen3moe", "deepseek2", "qwen35moe", "gpt-oss", "gemma2"])
@pytest.mark.parametrize("threads", [2, 8])
def test_exact_bits_with_any_number_of_threads(name: str, threads: int, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model.gguf", sizes=SMALL)
    context = ContextConfig(n_ctx=256, exact=True, fast_kernels=True)
    np.testing.assert_array_equal(logits(path, threads, context), logits(path, 1, context))


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "qwen35moe"])
def test_same_bits_in_a_group(name: str, tmp_path: Path) -> None:
    """Whose graphs are cut where sums are, and repeated without ggml's meta device."""
    path = write(name, tmp_path / "model.gguf")
    np.testing.assert_array_equal(logits(path, 3, shares=((1, 1),)), logits(path, 1, shares=((1, 1),)))


@pytest.mark.parametrize("name", ["llama", "qwen3moe", "qwen35moe", "deepseek2", "deepseek4"])
def test_waits_are_fewer_than_operations(name: str, tmp_path: Path) -> None:
    path = write(name, tmp_path / "model.gguf", sizes=SMALL)
    n_waits, n_operations = waits(path, 2, 1)
    assert n_waits < 0.6 * n_operations
    n_waits_of_many, _ = waits(path, 2, 200)
    assert n_waits < n_waits_of_many < n_operations


@pytest.mark.parametrize(("n_used", "n_columns", "n_tokens"), [(2, 64, 1), (8, 200, 1), (8, 2048, 5), (3, 33, 40)])
def test_experts_are_weighted_and_added_as_ggml_does_it(n_used: int, n_columns: int, n_tokens: int) -> None:
    """To the bit."""
    rng = np.random.default_rng(n_columns)
    experts = rng.standard_normal(n_tokens * n_used * n_columns, np.float32).tolist()
    weights = rng.random(n_tokens * n_used, np.float32).tolist()
    ggmls = native.sum_experts(experts=experts, weights=weights, n_used=n_used, fast=False)
    for threads in (1, 3):
        assert native.sum_experts(experts=experts, weights=weights, n_used=n_used, n_threads=threads) == ggmls


@pytest.mark.parametrize("n_rows", [1, 40])
@pytest.mark.parametrize(("width", "stride"), [(8, 8), (64, 192), (136, 136), (4096, 4096)])
@pytest.mark.parametrize("kind", ["plain", "weighted", "l2"])
def test_norms_are_those_of_ggml(kind: str, width: int, stride: int, n_rows: int) -> None:
    """Squares are added up in another order, but in doubles."""
    rng = np.random.default_rng(width)
    rows = (rng.standard_normal(n_rows * stride) * 3).tolist()
    weights = rng.standard_normal(width).tolist() if kind == "weighted" else []
    settings = {"rows": rows, "width": width, "stride": stride, "weights": weights, "is_l2": kind == "l2"}
    ggmls = native.normalize(**settings, fast=False)
    for threads in (1, 3):
        found = native.normalize(**settings, n_threads=threads)
        np.testing.assert_allclose(found, ggmls, rtol=2e-7)


@pytest.mark.parametrize("number", [np.float32, np.float16])
@pytest.mark.parametrize("dim", range(4))
@pytest.mark.parametrize("shape", [(1, 1, 1, 1), (7, 3, 2, 2), (512, 1, 130, 1)])
def test_tensors_are_joined(shape: tuple[int, ...], dim: int, number: type[np.floating]) -> None:
    rng = np.random.default_rng(dim)
    other = tuple(n + 2 * (i == dim) for i, n in enumerate(shape))
    first, second = (rng.standard_normal(each[::-1]).astype(number) for each in (shape, other))
    for threads in (1, 3):
        joined = native.join(
            type=int(number is np.float16),
            shape=shape,
            data=first.tobytes(),
            shape2=other,
            data2=second.tobytes(),
            dim=dim,
            n_threads=threads,
        )
        assert joined == np.concatenate([first, second], axis=3 - dim).tobytes()
