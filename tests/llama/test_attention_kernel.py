"""ggpipe's own attention alone: double precision's results but for rounding, and the same bits for a row whatever else
is in the run and in the cache."""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray

from ggpipe.llama import machine
from ggpipe.llama.libllama import native

pytestmark = pytest.mark.skipif(
    not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()), reason="needs a CPU with AVX2"
)

Floats = NDArray[np.float32]
Type = GGMLQuantizationType
TYPES = (Type.F16, Type.F32, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.IQ4_NL)
"""Of KV cells."""
WIDTHS = ((64, 64), (128, 128), (256, 256), (80, 80), (192, 128), (576, 512), (72, 40), (20, 12))
"""Of keys and values; not all are multiples of a vector."""
HEADS = ((3, 3), (4, 2), (6, 2), (8, 1), (40, 1))
"""Of queries, and of keys and values."""
ROWS = (1, 2, 3, 5, 11, 70)


@dataclass(frozen=True)
class Cells:
    """Keys or values of a type, as in libllama's cache."""

    kind: Type
    data: NDArray[np.uint8]
    """(cells, KV heads, bytes)"""

    @classmethod
    def random(cls, kind: Type, shape: tuple[int, ...], rng: np.random.Generator) -> "Cells":
        """Normally distributed numbers: (cells, KV heads, width)."""
        if kind is not Type.IQ4_NL:
            return cls(kind, quantize(rng.normal(size=shape).astype(np.float32), kind).view(np.uint8))
        blocks = rng.integers(0, 256, (*shape[:2], shape[2] // 32, 18), dtype=np.uint8)  # gguf cannot quantize these
        scales = rng.normal(scale=1 / 60, size=blocks.shape[:3]).astype(np.float16)
        blocks[:, :, :, :2] = scales[:, :, :, None].view(np.uint8)
        return cls(kind, blocks.reshape(*shape[:2], -1))

    def __getitem__(self, seen: NDArray[np.bool_]) -> "Cells":
        return Cells(self.kind, self.data[seen])

    def numbers(self) -> NDArray[np.float64]:
        """(cells, KV heads, width)"""
        data = self.data.view({Type.F16: np.float16, Type.F32: np.float32}.get(self.kind, np.uint8))
        return np.asarray(dequantize(data, self.kind), np.float64)

    def products(self, queries: Floats) -> NDArray[np.float64]:
        """Of queries (rows, heads, width), which ggml rounds before it multiplies these keys: (rows, heads, cells)."""
        keys = self._of_heads(self.numbers(), queries)
        if self.kind is Type.BF16:
            queries = dequantize(quantize(queries, Type.BF16), Type.BF16)
        if self.kind in (Type.F32, Type.F16, Type.BF16):
            return np.asarray(np.einsum("rhd,chd->rhc", queries, keys, dtype=np.float64))
        blocks = queries.reshape(*queries.shape[:2], -1, 32)
        most = np.abs(blocks).max(axis=-1, keepdims=True)
        numbers, scales = np.rint(blocks * (np.float32(127) / most)), most / np.float32(127)
        rounded = numbers * scales.astype(np.float16).astype(np.float64)
        products = np.einsum("rhd,chd->rhc", rounded.reshape(queries.shape), keys)
        if self.kind in (Type.Q4_1, Type.Q5_1):  # minima are multiplied by sums, which are rounded to f16
            sums = (numbers.sum(axis=-1) * scales[..., 0]).astype(np.float16)
            minima = np.ascontiguousarray(self.data.reshape(*self.data.shape[:2], sums.shape[-1], -1)[..., 2:4])
            errors = sums - rounded.sum(axis=-1)
            products += np.einsum("rhb,chb->rhc", errors, self._of_heads(minima.view(np.float16)[..., 0], queries))
        return np.asarray(products)

    @staticmethod
    def _of_heads(numbers: NDArray[Any], queries: Floats) -> NDArray[Any]:
        """One for each head of queries: (cells, heads, …)."""
        return np.repeat(numbers, queries.shape[1] // numbers.shape[1], axis=1)


@dataclass(frozen=True)
class Case:
    """Inputs of one attention."""

    queries: Floats
    """(rows, heads, width)"""
    keys: Cells
    values: Cells
    sees: NDArray[np.bool_]
    """(rows, cells)"""
    sinks: Floats | None = None
    max_bias: float = 0
    """Of ALiBi: the mask has distances then."""
    softcap: float = 0

    def own(self, n_threads: int = 1, fast: bool = True) -> Floats:
        """Results of the kernel, or of ggml's: (rows, heads, width)."""
        mask = np.where(self.sees, self.distances(), -np.inf).astype(np.float16)
        results = native.attend(
            queries=self.queries, keys=self.keys.data, values=self.values.data,
            types=(self.keys.kind.value, self.values.kind.value), mask=mask.view(np.uint16), sinks=self.sinks,
            max_bias=self.max_bias, softcap=self.softcap, n_threads=n_threads, fast=fast,
        )  # fmt: skip
        return np.array(results, np.float32).reshape(*self.queries.shape[:2], -1)

    def distances(self) -> NDArray[np.float64]:
        """Of cells from rows, below 0, in the order of the cells that a row sees: (rows, cells)."""
        ranks = np.cumsum(self.sees, axis=1)
        return np.where(self.max_bias > 0, ranks - ranks[:, -1:], 0.0)

    def exact(self) -> NDArray[np.float64]:
        """Results in double precision."""
        n_heads = self.queries.shape[1]
        values = np.repeat(self.values.numbers(), n_heads // self.keys.data.shape[1], axis=1)
        scores = self.keys.products(self.queries) / np.sqrt(self.queries.shape[2])
        if self.softcap:
            scores = self.softcap * np.tanh(scores / self.softcap)
        scores += slopes(n_heads, self.max_bias)[:, None] * self.distances()[:, None]
        scores = np.where(self.sees[:, None], scores, -np.inf)
        sinks = np.full(n_heads, -np.inf) if self.sinks is None else self.sinks
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


def slopes(n_heads: int, max_bias: float) -> NDArray[np.float64]:
    """ALiBi's: a geometric sequence for a power of 2 heads, and every other number of a finer one for the rest."""
    n = 1 << (n_heads.bit_length() - 1)
    exponents = [(i + 1) / n if i < n else (i - n + 0.5) / n for i in range(n_heads)]
    return np.exp2(-max_bias * np.array(exponents))


def random_case(
    widths: tuple[int, int],
    heads: tuple[int, int],
    n_rows: int,
    n_cells: int,
    *,
    types: tuple[Type, Type] = (Type.F16, Type.F16),
    sinks: bool = False,
    scale: float = 1,
    max_bias: float = 0,
    softcap: float = 0,
) -> Case:
    """Rows that see most cells before their own, each other ones. `scale` is of the queries."""
    rng = np.random.default_rng(n_rows + n_cells)
    (n_heads, n_kv_heads), (key_width, value_width) = heads, widths
    sees = rng.random((n_rows, n_cells)) < 0.8
    sees &= np.arange(n_cells) <= np.arange(n_cells - n_rows, n_cells)[:, None]
    sees[:, 0] = True
    return Case(
        queries=(scale * rng.normal(size=(n_rows, n_heads, key_width))).astype(np.float32),
        keys=Cells.random(types[0], (n_cells, n_kv_heads, key_width), rng),
        values=Cells.random(types[1], (n_cells, n_kv_heads, value_width), rng),
        sees=sees,
        sinks=rng.normal(size=n_heads).astype(np.float32) if sinks else None,
        max_bias=max_bias,
        softcap=softcap,
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


@pytest.mark.pairwise
@pytest.mark.parametrize(("max_bias", "softcap"), [(0, 0), (8, 0), (0, 2)])
@pytest.mark.parametrize("widths", [(64, 64), (96, 96), (576, 512)])
@pytest.mark.parametrize("heads", [(3, 3), (6, 2), (24, 2)])
@pytest.mark.parametrize("n_rows", [1, 3, 20, 70])
@pytest.mark.parametrize("values", TYPES)
@pytest.mark.parametrize("keys", TYPES)
def test_all_types_of_cells(
    keys: Type,
    values: Type,
    n_rows: int,
    heads: tuple[int, int],
    widths: tuple[int, int],
    max_bias: float,
    softcap: float,
) -> None:
    """Also with ALiBi and with capped scores."""
    case = random_case(
        widths, heads, n_rows, 140, types=(keys, values), sinks=n_rows == 3, max_bias=max_bias, softcap=softcap
    )
    results = case.own()
    np.testing.assert_allclose(results, case.exact(), rtol=0, atol=4e-6)
    np.testing.assert_array_equal(case.own(n_threads=3), results)
    for row in range(0, n_rows, 4):
        np.testing.assert_array_equal(case.alone(row).own()[0], results[row])


@pytest.mark.parametrize("n_rows", [1, 20])
@pytest.mark.parametrize(("max_bias", "softcap"), [(0, 0), (8, 0), (0, 2)])
@pytest.mark.parametrize("kind", [kind for kind in TYPES if kind is not Type.F16])
def test_equals_ggmls_kernel_but_for_rounding(kind: Type, max_bias: float, softcap: float, n_rows: int) -> None:
    """Queries are rounded in the same way."""
    case = random_case((128, 128), (6, 2), n_rows, 200, types=(kind, kind), max_bias=max_bias, softcap=softcap)
    np.testing.assert_allclose(case.own(), case.own(fast=False), rtol=0, atol=4e-6)


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
