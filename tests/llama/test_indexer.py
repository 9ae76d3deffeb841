"""The indexers of sparse attention alone: double precision's scores but for rounding, the highest of them selected, and
the same bits for a row whatever else is in the run. And in models, ggml's logits but for rounding."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from support.architectures import SMALL, write
from support.pipeline import Pipeline
from support.reference import Logits

from ggpipe.config.context import ContextConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, Run
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import native

pytestmark = pytest.mark.skipif(
    not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()), reason="needs a CPU with AVX2"
)

TYPES = (Type.F16, Type.F32, Type.BF16, Type.Q8_0, Type.Q5_1)
"""Of keys."""
SHAPES = ((128, 64, 9, 300), (128, 32, 1, 513), (64, 3, 6, 31), (96, 7, 70, 129), (32, 1, 2, 1))
"""Width and number of heads, rows, cells."""


@dataclass(frozen=True)
class Inputs:
    """Of an indexer."""

    queries: NDArray[np.float32]
    """(rows, heads, width)"""
    kind: Type
    keys: NDArray[np.uint8]
    """(cells, bytes)"""
    weights: NDArray[np.float32]
    """(rows, heads)"""
    mask: NDArray[np.float16]
    """(rows, cells)"""

    @classmethod
    def random(cls, kind: Type, shape: tuple[int, int, int, int]) -> "Inputs":
        """Each row sees its own cells, but none of the last ones."""
        width, n_heads, n_rows, n_cells = shape
        rng = np.random.default_rng(1)
        is_hidden = rng.random((n_rows, n_cells)) < rng.choice([0.0, 0.3], (n_rows, 1))
        is_hidden[:, -(n_cells // 3) :] |= n_cells >= 3
        return cls(
            queries=rng.normal(size=(n_rows, n_heads, width)).astype(np.float32),
            kind=kind,
            keys=quantize(rng.normal(size=(n_cells, width)).astype(np.float32), kind).view(np.uint8),
            weights=rng.normal(size=(n_rows, n_heads)).astype(np.float32),
            mask=np.where(is_hidden, -np.inf, 0).astype(np.float16),
        )

    def expected(self) -> NDArray[np.float64]:
        """Scores: (rows, cells)."""
        data = self.keys.view({Type.F16: np.float16, Type.F32: np.float32}.get(self.kind, np.uint8))
        keys = np.asarray(dequantize(data, self.kind), np.float64)
        products = np.einsum("rhw,cw->rhc", self.queries, keys)
        return np.asarray(np.einsum("rhc,rh->rc", np.maximum(products, 0), self.weights) + self.mask, np.float64)

    def __getitem__(self, rows: slice) -> "Inputs":
        return replace(self, queries=self.queries[rows], weights=self.weights[rows], mask=self.mask[rows])

    def scores(
        self, n_selected: int = 1, n_threads: int = 1, *, fast: bool = True
    ) -> tuple[NDArray[np.float32], NDArray[np.int32]]:
        """(rows, cells), and the selected ones: (rows, n_selected)."""
        scores, selected = native.index_cells(
            queries=self.queries, keys=self.keys, key_type=self.kind.value, weights=self.weights,
            mask=self.mask.view(np.uint16), n_selected=n_selected, n_threads=n_threads, fast=fast,
        )  # fmt: skip
        n_rows = len(self.queries)
        return np.array(scores, np.float32).reshape(n_rows, -1), np.array(selected, np.int32).reshape(n_rows, -1)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_equals_double_precision_but_for_rounding(kind: Type, shape: tuple[int, int, int, int]) -> None:
    inputs = Inputs.random(kind, shape)
    expected = inputs.expected()
    for fast in (True, False):
        scores, _ = inputs.scores(fast=fast)
        is_seen = np.isfinite(expected)
        np.testing.assert_array_equal(np.isfinite(scores), is_seen)
        size = np.sqrt(shape[0] * shape[1])
        np.testing.assert_allclose(scores[is_seen], expected[is_seen], rtol=0, atol=1e-5 * size)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_same_bits_alone_and_with_any_number_of_threads(shape: tuple[int, int, int, int]) -> None:
    inputs = Inputs.random(Type.F16, shape)
    scores, selected = inputs.scores(min(5, shape[3]))
    for n_threads in (2, 5):
        for found, expected in zip(inputs.scores(min(5, shape[3]), n_threads), (scores, selected), strict=True):
            np.testing.assert_array_equal(found, expected)
    for row in range(shape[2]):
        np.testing.assert_array_equal(inputs[row : row + 1].scores()[0][0], scores[row])


@pytest.mark.parametrize("n_selected", [1, 2, 17, 100, 200, 300])
def test_selects_the_highest(n_selected: int) -> None:
    """Of 300 cells, of which a row sees 200 or less. Of equal scores, the first ones."""
    inputs = Inputs.random(Type.F32, (128, 64, 9, 300))
    inputs.keys[100:140] = inputs.keys[0]
    scores, selected = inputs.scores(n_selected)
    for of_row, cells in zip(scores, selected, strict=True):
        best = np.argsort(-of_row, kind="stable")[:n_selected]
        np.testing.assert_array_equal(cells, np.sort(best))


def test_selects_among_any_numbers() -> None:
    """A single weight and query make scores of any size, and of both signs."""
    rng = np.random.default_rng(2)
    keys = np.abs(rng.normal(size=(5000, 32)) * 10.0 ** rng.integers(-30, 30, (5000, 1))).astype(np.float32)
    keys[::7] = 0
    for weight in (1, -1):
        inputs = Inputs(
            np.ones((1, 1, 32), np.float32), Type.F32, keys.view(np.uint8), np.full((1, 1), weight, np.float32),
            np.zeros((1, 5000), np.float16),
        )  # fmt: skip
        for n_selected in (1, 3, 500, 4999, 5000):
            scores, selected = inputs.scores(n_selected)
            best = np.sort(-np.sort(-scores[0]))[::-1][:n_selected]
            np.testing.assert_array_equal(np.sort(scores[0][selected[0]])[::-1], best)
            assert len(set(selected[0])) == n_selected


CONTEXT = ContextConfig(n_ctx=512, n_seq=2)


def logits(path: Path, context: ContextConfig = CONTEXT, *, threads: int = 1, apart: bool = False) -> Logits:
    """Of 120 rows of two sequences, (rows, vocabulary). `apart`: each in a run of its own."""
    tokens = np.random.default_rng(1).integers(0, 100, 120).tolist()
    rows = [Row(token=token, pos=i // 2, seqs=(i % 2,), request=0, logits_request=0) for i, token in enumerate(tokens)]
    runs = [(row,) for row in rows] if apart else [tuple(rows[:70]), tuple(rows[70:71]), tuple(rows[71:])]
    with Pipeline(path, (), context, threads=threads) as pipeline:
        return np.concatenate(
            [
                pipeline.decode(Run(id=i, rows=run, ops=(), logits_requests=(LogitsRequest(LogitsKind.FULL),)))
                for i, run in enumerate(runs, 1)
            ]
        )


@pytest.fixture(scope="module", params=["deepseek32", "deepseek4", "dots3note", "glm-dsa", "glm5-next", "hy_v4"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Whose rows see at most 24 cells."""
    path = tmp_path_factory.mktemp("indexer") / "model.gguf"
    return write(request.param, path, sizes=SMALL, more={"attention.indexer.top_k": 24})


def test_models_have_ggmls_logits_but_for_rounding(model: Path) -> None:
    """Rows with nearly tied scores differ by more, as they see other cells."""
    ours, ggmls = logits(model), logits(model, replace(CONTEXT, fast_kernels=False))
    differences = np.abs(ours - ggmls).max(axis=1) / ggmls.std()
    assert 0 < np.median(differences) < 0.01


def test_models_have_the_same_bits_for_rows_alone_and_any_number_of_threads(model: Path) -> None:
    """Two architectures have further operations of ggml's, whose bits depend on the number of rows."""
    together = logits(model)
    np.testing.assert_array_equal(logits(model, threads=3), together)
    if ModelFile.open(model).architecture not in ("deepseek4", "glm5-next"):
        np.testing.assert_array_equal(logits(model, apart=True), together)
