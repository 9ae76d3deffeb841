"""ggpipe's own flash attention: ggml's logits but for rounding, the same bits for every cut, run and thread count."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from msgspec import structs
from support import commands
from support.commands import TARGET
from support.pipeline import Pipeline
from support.reference import Logits
from support.zoo import make

from ggpipe.config.context import ContextConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, Run
from ggpipe.llama import machine

CONTEXT = ContextConfig(n_ctx=1280, n_seq=3)
QUANTIZED = replace(CONTEXT, cache_type_k="q8_0", cache_type_v="q8_0")
# Plain heads, grouped heads, one KV head, windows, windows and sinks, keys wider than values, ALiBi, capped scores
MODELS = ("llama", "qwen3", "falcon", "gemma3", "gpt-oss", "deepseek2", "mpt", "gemma2")
SETTINGS = (
    *((name, CONTEXT) for name in MODELS),
    *((name, QUANTIZED) for name in ("llama", "falcon", "gemma3", "mpt", "gemma2")),  # with heads of width 32
    ("llama", replace(CONTEXT, cache_type_k="q5_1", cache_type_v="q4_0")),
    ("falcon", replace(CONTEXT, cache_type_k="bf16", cache_type_v="iq4_nl")),
)
ROWS = (300, 1, 20, 70, 2, 5, 290, 1, 33, 9)
"""Rows of each run. From 64 on ggml computes in another way; a run's rows see up to 700 cells."""

pytestmark = pytest.mark.skipif(
    not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()), reason="needs a CPU with AVX2"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("attention")


def runs() -> Iterator[Run]:
    """Of three sequences, whose rows lie side by side: long parts of one beside single rows of the others."""
    rng = np.random.default_rng(1)
    length = [0, 0, 0]
    for i, n in enumerate(ROWS):
        rows: list[Row] = []
        for seq in (1, *[0] * (n - 1), 2) if i % 2 else (i // 2 % 3,) * n:
            token = int(rng.integers(0, 100))
            rows.append(Row(token=token, pos=length[seq], seqs=(seq,), request=0, logits_request=0))
            length[seq] += 1
        yield Run(id=i + 1, rows=tuple(rows), ops=(), logits_requests=(LogitsRequest(LogitsKind.FULL),))


def logits(path: Path, context: ContextConfig, cuts: tuple[int, ...] = (), threads: int = 1) -> Logits:
    """Of all rows, (rows, vocabulary)."""
    with Pipeline(path, cuts, context, threads=threads) as pipeline:
        return np.concatenate([pipeline.decode(run) for run in runs()])


def setting_id(value: str | ContextConfig) -> str:
    """The model, or types of cells."""
    return value if isinstance(value, str) else f"{value.cache_type_k}-{value.cache_type_v}"


@pytest.mark.parametrize(("name", "context"), SETTINGS, ids=setting_id)
def test_equals_ggml_but_for_rounding(name: str, context: ContextConfig, folder: Path) -> None:
    """A few rows may differ by more: experts whose scores are nearly tied."""
    path = make(name, folder / f"{name}.gguf", weight_type="f32")
    ours, ggmls = logits(path, context), logits(path, replace(context, fast_kernels=False))
    differences = np.abs(ours - ggmls).max(axis=1) / ggmls.std()
    assert 0 < np.median(differences) < 0.01
    assert np.quantile(differences, 0.95) < 0.05


@pytest.mark.parametrize(("name", "context"), SETTINGS, ids=setting_id)
def test_same_bits_for_every_cut_and_number_of_threads(name: str, context: ContextConfig, folder: Path) -> None:
    path = make(name, folder / f"{name}.gguf", weight_type="f32")
    whole = logits(path, context)
    np.testing.assert_array_equal(logits(path, context, cuts=(1,)), whole)
    np.testing.assert_array_equal(logits(path, context, threads=2), whole)


@pytest.mark.parametrize(
    ("name", "context"),
    [*((name, CONTEXT) for name in ("llama", "qwen3", "falcon", "gemma3", "mpt", "gemma2")), ("falcon", QUANTIZED)],
    ids=setting_id,
)
def test_same_bits_for_rows_alone_and_together(name: str, context: ContextConfig, folder: Path) -> None:
    """With quantized weights, whose products do not depend on the other rows either."""
    path = make(name, folder / f"{name}-q8_0.gguf", weight_type="q8_0")
    rows = (structs.replace(run, rows=(row,)) for run in runs() for row in run.rows)
    with Pipeline(path, (), context) as pipeline:
        alone = np.concatenate([pipeline.decode(structs.replace(run, id=i)) for i, run in enumerate(rows, 1)])
    np.testing.assert_array_equal(alone, logits(path, context))


@pytest.mark.parametrize(
    "context", [replace(CONTEXT, flash_attn="off"), replace(CONTEXT, exact=True)], ids=["off", "exact"]
)
def test_other_attention_stays_ggmls(context: ContextConfig, folder: Path) -> None:
    path = make("llama", folder / "llama.gguf", weight_type="f32")  # whose products have ggml's bits
    np.testing.assert_array_equal(logits(path, context), logits(path, replace(context, fast_kernels=False)))


def test_threads_may_have_small_stacks() -> None:
    """64 lanes at a time, on threads with 256 kB of stack each."""
    words = (
        "generate",
        "-m",
        TARGET,
        "-p",
        "Once upon a time there was a king. " * 12,
        "-n",
        "4",
        "--temp",
        "0",
        "-c",
        "512",
    )
    plain = commands.ggpipe(*words, "-t", "2")
    small = subprocess.run(
        ["bash", "-c", 'ulimit -s 256; exec "$@"', "-", sys.executable, "-m", "ggpipe", *map(str, words), "-t", "2"],
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert (small.returncode, small.stdout) == (0, plain.stdout), small.stderr
