"""ggpipe's own attention alone: double precision's results but for rounding, and the same bits for a row whatever else
is in the run and in the cache."""

from dataclasses import dataclass, replace

import numpy as np
import pytest
from numpy.typing import NDArray

from ggpipe.llama import machine
from ggpipe.llama.libllama import native

pytestmark = pytest.mark.skipif(
    not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()), reason="needs a CPU with AVX2"
)

Floats = NDArray[np.float32]
WIDTHS = ((64, 64), (128, 128), (256, 256), (80, 80), (192, 128), (576, 512), (72, 40), (20, 12))
"""Of keys and values; not all are multiples of a vector."""
HEADS = ((3, 3), (4, 2), (6, 2), (8, 1), (40, 1))
"""Of queries, and of keys and values."""
ROWS = (1, 2, 3, 5, 11, 70)


@dataclass(frozen=True)
class Case:
    """Inputs of one attention."""

    queries: Floats
    """(rows, heads, width)"""
    keys: NDArray[np.float16]
    """(cells, KV heads, width)"""
    values: NDArray[np.float16]
    sees: NDArray[np.bool_]
    """(rows, cells)"""
    sinks: Floats | None = None

    def own(self, n_threads: int = 1, fast: bool = True) -> Floats:
        """Results of the kernel, or of ggml's: (rows, heads, width)."""
        mask = np.where(self.sees, 0, -np.inf).astype(np.float16)
        results = native.attend(
            queries=self.queries, keys=self.keys.view(np.uint16), values=self.values.view(np.uint16),
            mask=mask.view(np.uint16), sinks=self.sinks, n_threads=n_threads, fast=fast,
        )  # fmt: skip
        return np.array(results, np.float32).reshape(*self.queries.shape[:2], -1)

    def exact(self) -> NDArray[np.float64]:
        """Results in double precision."""
        group = self.queries.shape[1] // self.keys.shape[1]
        keys, values = (np.repeat(x.astype(np.float64), group, axis=1) for x in (self.keys, self.values))
        scores = np.einsum("rhd,chd->rhc", self.queries, keys) / np.sqrt(self.queries.shape[2])
        scores = np.where(self.sees[:, None], scores, -np.inf)
        sinks = np.full(len(keys[0]), -np.inf) if self.sinks is None else self.sinks
        highest = np.maximum(scores.max(axis=2), sinks)
        weights = np.exp(scores - highest[:, :, None])
        weights /= (weights.sum(axis=2) + np.exp(sinks - highest))[:, :, None]
        results: NDArray[np.float64] = np.einsum("rhc,chd->rhd", weights, values)
        return results

    def alone(self, row: int) -> "Case":
        """One row, in a cache with only the cells that it sees."""
        seen = self.sees[row]
        return replace(
            self, queries=self.queries[row : row + 1], keys=self.keys[seen], values=self.values[seen],
            sees=np.ones((1, seen.sum()), bool),
        )  # fmt: skip


def random_case(
    widths: tuple[int, int], heads: tuple[int, int], n_rows: int, n_cells: int, *, sinks: bool = False, scale: float = 1
) -> Case:
    """Rows that see most cells before their own, each other ones. `scale` is of the queries."""
    rng = np.random.default_rng(n_rows + n_cells)
    (n_heads, n_kv_heads), (key_width, value_width) = heads, widths
    sees = rng.random((n_rows, n_cells)) < 0.8
    sees &= np.arange(n_cells) <= np.arange(n_cells - n_rows, n_cells)[:, None]
    sees[:, 0] = True
    return Case(
        queries=(scale * rng.normal(size=(n_rows, n_heads, key_width))).astype(np.float32),
        keys=rng.normal(size=(n_cells, n_kv_heads, key_width)).astype(np.float16),
        values=rng.normal(size=(n_cells, n_kv_heads, value_width)).astype(np.float16),
        sees=sees,
        sinks=rng.normal(size=n_heads).astype(np.float32) if sinks else None,
    )


@pytest.mark.pairwise
@pytest.mark.parametrize("sinks", [False, True])
@pytest.mark.parametrize("scale", [1, 30])
@pytest.mark.parametrize("n_cells", [75, 300])
@pytest.mark.parametrize("n_rows", ROWS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("widths", WIDTHS)
def test_equals_double_precision_in_any_company(
    widths: tuple[int, int], heads: tuple[int, int], n_rows: int, n_cells: int, scale: float, sinks: bool
) -> None:
    """Each row has the bits it has alone, in a cache without holes. With a `scale` of 30, scores differ by hundreds."""
    case = random_case(widths, heads, n_rows, n_cells, sinks=sinks, scale=scale)
    results = case.own()
    np.testing.assert_allclose(results, case.exact(), rtol=0, atol=2e-6 * scale)
    np.testing.assert_array_equal(case.own(n_threads=3), results)
    for row in range(0, n_rows, 4):
        np.testing.assert_array_equal(case.alone(row).own()[0], results[row])


@pytest.mark.parametrize("n_rows", [1, 20])
def test_ggmls_kernel_agrees(n_rows: int) -> None:
    """ggml adds up in f16."""
    case = random_case((128, 128), (6, 2), n_rows, 200, sinks=True)
    np.testing.assert_allclose(case.own(fast=False), case.exact(), rtol=0, atol=0.01)


def test_a_row_that_sees_nothing_is_zero() -> None:
    case = random_case((64, 64), (4, 4), 3, 40)
    sees = case.sees.copy()
    sees[1] = False
    results = replace(case, sees=sees).own()
    assert not results[1].any()
    np.testing.assert_array_equal(results[[0, 2]], case.own()[[0, 2]])


def test_numbers_that_overflow_stay_in_their_row() -> None:
    case = random_case((64, 64), (4, 4), 3, 40)
    queries = case.queries.copy()
    queries[1] = np.inf
    np.testing.assert_array_equal(replace(case, queries=queries).own()[[0, 2]], case.own()[[0, 2]])
