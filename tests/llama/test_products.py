"""ggpipe's own products of weights: what the weights and the rounded activations give, the same bits for any
number of rows and threads."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType as Type
from gguf.quants import dequantize, quantize
from numpy.typing import NDArray
from support.weight_types import FewBits, Kind, block_of, dequantized

from ggpipe.llama import machine
from ggpipe.llama.libllama import native

pytestmark = pytest.mark.skipif(
    not {"AVX2", "FMA", "F16C"} <= set(machine.cpu_features()), reason="needs a CPU with AVX2"
)

SMALL = (
    Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q5_0, Type.Q5_1, Type.IQ4_NL, Type.MXFP4, Type.NVFP4, FewBits.Q1_0,
    FewBits.Q2_0,
)  # fmt: skip
"""Types whose blocks have 32 to 128 columns; others have 256."""
GRIDS = (Type.IQ2_XXS, Type.IQ2_XS, Type.IQ2_S, Type.IQ3_XXS, Type.IQ3_S, Type.IQ1_S, Type.IQ1_M)
"""Types whose numbers come from tables."""
TERNARY = (Type.TQ1_0, Type.TQ2_0)
BY_256 = (Type.Q2_K, Type.Q3_K, Type.Q4_K, Type.Q5_K, Type.Q6_K, Type.IQ4_XS, *TERNARY, *GRIDS)
FLOATS = (Type.F32, Type.F16, Type.BF16)
"""Types without blocks: any number of columns."""
REPACKED = (Type.Q4_0, Type.IQ4_NL, Type.MXFP4, Type.Q2_K, Type.Q4_K)
"""Types that ggml may repack."""
QUANTIZED = [
    *(pytest.param(kind, True, id=kind.name) for kind in (*SMALL, *BY_256)),
    *(pytest.param(kind, False, id=f"{kind.name}-as-in-the-file") for kind in REPACKED),
]
"""All types with blocks, and whether ggml repacks them where it can."""
ALL = [*QUANTIZED, *(pytest.param(kind, True, id=kind.name) for kind in FLOATS)]
OF_EACH_KIND = (Type.Q4_0, Type.Q8_0, Type.NVFP4, *FewBits, *TERNARY, *FLOATS)
SCALE_AT = {"Q6_K": 208, "Q3_K": 108, "Q2_K": 80, "TQ1_0": 52, "TQ2_0": 64}
"""In a block, in bytes; others begin with it."""
WITH_MINIMA = ("Q2_K", "Q4_1", "Q5_1", "Q4_K", "Q5_K")
ROUNDING = 2e-6
"""Of single precision, in standard deviations of the results."""


def _random_weights(kind: Kind, shape: tuple[int, int], rng: np.random.Generator) -> NDArray[np.uint8]:
    """Blocks of any bytes, but scales of about 1: (rows, bytes)."""
    if isinstance(kind, Type) and kind in FLOATS:
        return quantize(rng.standard_normal(shape).astype(np.float32), kind).view(np.uint8)
    block, size = block_of(kind)
    rows, columns = shape
    data = rng.integers(0, 256, (rows, columns // block, size), dtype=np.uint8)
    first = SCALE_AT.get(kind.name, 0)
    halves = (first, first + 2) if kind.name in WITH_MINIMA else (first,)
    if kind is Type.IQ1_M:
        _set_quarters(data, rng.uniform(-1, 1, data.shape[:2]).astype(np.float16).view(np.uint16))
    elif kind is Type.NVFP4:
        data[:2, :, :4] = [
            [[0, 127, 126, 128]],
            [[1, 7, 8, 255]],
        ]  # also 0, none, and the highest
    elif kind is Type.MXFP4:
        data[:, :, 0] = rng.integers(0, 130, data.shape[:2])
        data[0, 0, 0], data[-1, -1, 0] = 0, 1  # not normal numbers
    else:
        for at in halves:
            scale = rng.uniform(-1, 1, data.shape[:2]).astype(np.float16)
            data[:, :, at : at + 2] = scale[:, :, None].view(np.uint8)
    return data.reshape(rows, -1)


def _set_quarters(data: NDArray[np.uint8], scales: NDArray[np.uint16]) -> None:
    """Scales of blocks of IQ1_M: four bits of each in the upper half of every other byte."""
    for i in range(4):
        data[:, :, 49 + 2 * i] = data[:, :, 49 + 2 * i] & 15 | (scales >> 4 * i & 15) << 4


def _rounded(kind: Kind, activations: NDArray[np.float32]) -> NDArray[np.float64]:
    """Activations as they are multiplied: in the weights' type if that is a float, else in 8 bits with scales."""
    if isinstance(kind, Type) and kind in FLOATS:
        return dequantize(quantize(activations, kind), kind).astype(np.float64)
    n = 256 if kind in BY_256 else 32
    blocks = activations.astype(np.float32).reshape(len(activations), -1, n)
    highest = np.abs(blocks).max(axis=2, keepdims=True)
    inverse = np.divide(np.float32(127), highest, out=np.zeros_like(highest), where=highest > 0)
    scale = highest / np.float32(127)
    if n == 32:
        scale = scale.astype(np.float16)
    rounded: NDArray[np.float64] = np.rint(blocks * inverse).astype(np.float64) * scale
    return rounded.reshape(activations.shape)


@dataclass
class Case:
    """Weights and activations of one product."""

    kind: Kind
    weights: NDArray[np.uint8]
    activations: NDArray[np.float32]
    experts: NDArray[np.int32] | None = None

    @classmethod
    def make(cls, kind: Kind, shape: tuple[int, int], n_tokens: int, seed: int = 1) -> "Case":
        rng = np.random.default_rng(seed)
        activations = rng.standard_normal((n_tokens, shape[1])).astype(np.float32)
        activations[:, :32] = 0  # whose scale is 0
        return cls(kind, _random_weights(kind, shape, rng), activations)

    def expected(self) -> NDArray[np.float64]:
        weights = dequantized(self.weights, self.kind).astype(np.float64)
        return _rounded(self.kind, self.activations) @ weights.T

    def computed(self, tokens: slice = slice(None), **settings: Any) -> NDArray[np.float32]:
        activations = self.activations[tokens]
        block, size = block_of(self.kind)
        shape = (len(self.weights), self.weights.shape[1] // size * block)
        results = native.multiply(
            type=self.kind,
            shape=shape,
            weights=self.weights.tobytes(),
            activations=activations.ravel().tolist(),
            **settings,
        )
        return np.array(results, np.float32).reshape(len(activations), -1)


def _assert_near(found: NDArray[np.float32], expected: NDArray[np.float64]) -> None:
    np.testing.assert_allclose(found, expected, rtol=0, atol=ROUNDING * expected.std() * 10)


@pytest.mark.parametrize(("kind", "repack"), ALL)
def test_products(kind: Kind, repack: bool) -> None:
    """Rows that are no whole tiles, and columns that are none where blocks are smaller than a tile."""
    block, _ = block_of(kind)
    odd = ((24, 256 + block), (48, block)) if kind in SMALL else ((7, 300), (21, 9)) if kind in FLOATS else ()
    for shape in ((16, 256), (8, 256), (40, 768), (264, 256), *odd):
        case = Case.make(kind, shape, n_tokens=70)
        expected = case.expected()
        for n in (1, 2, 3, 8, 21, 70):
            _assert_near(case.computed(slice(n), repack=repack), expected[:n])


@pytest.mark.parametrize(("kind", "repack"), QUANTIZED)
def test_highest_numbers(kind: Kind, repack: bool) -> None:
    """Sums of the largest numbers that weights and activations can have fit where they are added up."""
    case = Case.make(kind, (16, 512), n_tokens=4)
    case.activations[:] = [[1.0], [-1.0], [0.5], [-0.5]]
    at = SCALE_AT.get(kind.name, 0)
    scale_bytes = 1 if kind is Type.MXFP4 else 4 if kind.name in (*WITH_MINIMA, "NVFP4") else 2
    for byte in (0x00, 0x7F, 0x80, 0x88, 0xFF):
        blocks = case.weights.reshape(16, -1, block_of(kind)[1])
        scales = blocks[:, :, at : at + scale_bytes].copy()
        blocks[:] = byte
        if kind is Type.IQ1_M:
            _set_quarters(blocks, np.full((16, blocks.shape[1]), 0x3C00, np.uint16))
        else:
            blocks[:, :, at : at + scale_bytes] = scales
        expected = case.expected()
        sums = np.abs(dequantized(case.weights, kind)).sum()  # results of weights that cancel out are rounded as others
        for n in (1, 4):  # which are added up in different places
            found = case.computed(slice(n), repack=repack)
            np.testing.assert_allclose(found, expected[:n], rtol=1e-5, atol=1e-6 * float(sums) / 16)


@pytest.mark.parametrize(("kind", "repack"), ALL)
def test_bits_depend_on_nothing_else(kind: Kind, repack: bool) -> None:
    """A row has the same bits alone, with any number of others, and with any number of threads."""
    case = Case.make(kind, (72, 512 if kind in BY_256 else 512 + block_of(kind)[0]), n_tokens=70)
    whole = case.computed(repack=repack)
    for first, n in ((0, 1), (37, 1), (3, 2), (66, 3), (5, 4), (2, 6), (60, 7), (51, 19)):
        tokens = slice(first, first + n)
        np.testing.assert_array_equal(case.computed(tokens, repack=repack), whole[tokens])
    np.testing.assert_array_equal(case.computed(n_threads=3, repack=repack), whole)
    np.testing.assert_array_equal(case.computed(slice(1), n_threads=2, repack=repack), whole[:1])


def _of_each(kind: Kind, n_matrices: int, n_tokens: int) -> list[Case]:
    """Several matrices, with the same activations for each."""
    cases = [Case.make(kind, (40, 512), n_tokens, seed=i) for i in range(n_matrices)]
    for case in cases:
        case.activations = cases[0].activations
    return cases


@pytest.mark.parametrize(("kind", "repack"), ALL)
def test_experts(kind: Kind, repack: bool) -> None:
    """Each row of activations with the matrices of its experts: the bits of each matrix alone."""
    rng = np.random.default_rng(2)
    n_experts, n_tokens = 4, 30
    cases = _of_each(kind, n_experts, n_tokens)
    experts = np.array([rng.permutation(n_experts)[:2] for _ in range(n_tokens)], np.int32)
    found = native.multiply(
        type=kind, shape=(40, 512), weights=b"".join(case.weights.tobytes() for case in cases), n_matrices=n_experts,
        activations=cases[0].activations.ravel().tolist(), experts=experts.ravel().tolist(), n_threads=2, repack=repack,
    )  # fmt: skip
    each = np.stack([case.computed(repack=repack) for case in cases])
    expected = np.stack([each[experts[token], token] for token in range(n_tokens)])
    np.testing.assert_array_equal(np.array(found, np.float32).reshape(expected.shape), expected)


@pytest.mark.parametrize("kind", [Type.Q8_0, Type.Q4_K, *FLOATS], ids=lambda kind: kind.name)
def test_matrices_of_heads(kind: Type) -> None:
    """Each matrix with its own rows of activations, as in latent attention: the bits of each matrix alone. ggml does
    not repack such ones."""
    cases = _of_each(kind, 3, 12)
    found = native.multiply(
        type=kind, shape=(40, 512), weights=b"".join(case.weights.tobytes() for case in cases), n_matrices=3,
        activations=cases[0].activations.ravel().tolist(), n_threads=2,
    )  # fmt: skip
    expected = np.concatenate([case.computed(repack=False)[4 * i : 4 * i + 4] for i, case in enumerate(cases)])
    np.testing.assert_array_equal(np.array(found, np.float32).reshape(expected.shape), expected)


@pytest.mark.parametrize("kind", GRIDS, ids=lambda kind: kind.name)
def test_every_entry_of_a_grid(kind: Type) -> None:
    """Activations with a single 1 pick a column each. Each index occurs 32 times or more on average."""
    case = Case.make(kind, (2048, 256), n_tokens=1)
    case.activations = np.eye(256, dtype=np.float32)
    np.testing.assert_allclose(case.computed(), dequantize(case.weights, kind).T, rtol=1e-6)


@pytest.mark.parametrize("kind", OF_EACH_KIND, ids=lambda kind: kind.name)
def test_equals_ggml_but_for_rounding(kind: Kind) -> None:
    case = Case.make(kind, (64, 1024), 12, seed=3)
    own, ggmls = case.computed(), case.computed(fast=False)
    assert np.abs(own - ggmls).max() < 1e-5 * ggmls.std()
