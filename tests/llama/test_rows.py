"""The best logits of a row, as the last rank sends them."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from ggpipe.llama.libllama import native

Logits = NDArray[np.float32]


def numpy_top(row: Logits, k: int, banned: list[int]) -> tuple[list[int], list[float]]:
    kept = np.setdiff1d(np.arange(len(row)), banned)
    order = kept[np.argsort(-row[kept], kind="stable")][:k]
    return order.tolist(), row[order].tolist()


@settings(max_examples=300, deadline=None)
@given(st.integers(1, 400), st.integers(0, 2**32), st.sampled_from([3, 1000]), st.data())
def test_top_is_numpys(n_vocab: int, seed: int, n_values: int, data: st.DataObject) -> None:
    """Few different values: ties everywhere."""
    row = (np.random.default_rng(seed).integers(0, n_values, n_vocab) / 7).astype(np.float32)
    k = data.draw(st.integers(0, n_vocab + 3))
    banned = data.draw(st.lists(st.integers(0, n_vocab - 1), max_size=5))
    ids, logits, log_sum_exp, _ = native.top(row.ctypes.data, n_vocab, k, banned)
    assert (ids, logits) == numpy_top(row, k, banned)
    kept = np.delete(row.astype(np.float64), banned)
    if k <= 1:
        assert math.isnan(log_sum_exp)
    elif len(kept):
        assert log_sum_exp == pytest.approx(np.logaddexp.reduce(kept), rel=1e-6, abs=1e-6)


def test_of_equal_logits_the_lower_id_is_the_better_one() -> None:
    row = np.array([1, 3, 2, 3, 3, 2], np.float32)
    ids, logits, *_ = native.top(row.ctypes.data, 6, 4, [])
    assert (ids, logits) == ([1, 3, 4, 2], [3, 3, 3, 2])
    assert native.top(row.ctypes.data, 6, 2, [])[0] == [1, 3]
    assert native.top(row.ctypes.data, 6, 2, [1, 4, 1])[0] == [3, 2]


def test_fewer_are_left_than_wanted() -> None:
    row = np.array([1, 2, 3], np.float32)
    assert native.top(row.ctypes.data, 3, 3, [2])[0] == [1, 0]
    assert native.top(row.ctypes.data, 3, 9, [])[0] == [2, 1, 0]
    assert native.top(row.ctypes.data, 3, 2**60, [])[0] == [2, 1, 0]
    assert native.top(row.ctypes.data, 3, 0, [])[0] == []


def test_banned_tokens_that_do_not_exist() -> None:
    row = np.array([1, 2, 3], np.float32)
    assert native.top(row.ctypes.data, 3, 2, [-1, -(2**31), 3, 2**31 - 1]) == native.top(row.ctypes.data, 3, 2, [])


def test_minus_infinity_is_the_worst() -> None:
    row = np.array([-np.inf, 2, -np.inf, 1], np.float32)
    ids, logits, log_sum_exp, _ = native.top(row.ctypes.data, 4, 4, [])
    assert (ids, logits) == ([1, 3, 0, 2], [2, 1, -np.inf, -np.inf])
    assert log_sum_exp == pytest.approx(np.logaddexp(2, 1))


def test_what_is_not_a_number_is_the_worst() -> None:
    row = np.array([np.nan, 2, np.nan, 1] * 50, np.float32)
    ids, logits, *_ = native.top(row.ctypes.data, 200, 60, [], sums=False)
    assert ids == [*range(1, 200, 4), *range(3, 43, 4)]
    assert logits == [2] * 50 + [1] * 10


@pytest.mark.parametrize("offset", [-1e4, 0.0, 1e4])
def test_the_log_sum_exp_of_large_logits(offset: float) -> None:
    row = np.random.default_rng(1).standard_normal(50_000).astype(np.float32) * 5 + np.float32(offset)
    _, best, log_sum_exp, _ = native.top(row.ctypes.data, len(row), 2, [])
    assert best[0] == row.max()
    assert log_sum_exp == pytest.approx(np.logaddexp.reduce(row.astype(np.float64)), rel=1e-7)


def test_without_a_sum() -> None:
    row = np.array([1, 3, 2], np.float32)
    ids, _, log_sum_exp, _ = native.top(row.ctypes.data, 3, 2, [], sums=False)
    assert ids == [1, 2]
    assert np.isnan(log_sum_exp)


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_the_share_of_smaller_ids(temperature: float) -> None:
    row = np.random.default_rng(2).standard_normal(1000).astype(np.float32) * 3
    banned = (0, 17, 500, 999)
    ids, logits, log_sum_exp, below = native.top(row.ctypes.data, len(row), 9, banned, True, temperature)
    assert (ids, logits) == native.top(row.ctypes.data, len(row), 9, banned)[:2]
    scaled = row.astype(np.float64) / temperature
    scaled[list(banned)] = -np.inf
    assert log_sum_exp == pytest.approx(np.logaddexp.reduce(scaled), rel=1e-6)
    shares = np.exp(scaled - np.logaddexp.reduce(scaled))
    assert below == pytest.approx([shares[:id].sum() for id in ids], abs=1e-6)
    assert native.top(row.ctypes.data, len(row), 9, banned)[3] == []


@pytest.mark.parametrize("temperature", [0.3, 1.0, 2.5])
def test_draws_are_spread_as_the_probabilities(temperature: float) -> None:
    row = np.random.default_rng(3).standard_normal(30).astype(np.float32)
    banned = [0, 17, 29]
    scaled = row.astype(np.float64) / temperature
    scaled[banned] = -np.inf
    ends = np.exp(scaled - np.logaddexp.reduce(scaled)).cumsum()
    for number in np.random.default_rng(4).random(300):
        token = native.draw(row.ctypes.data, len(row), banned, temperature, number)
        assert token == np.searchsorted(ends, number)


def test_draws_at_the_ends() -> None:
    row = np.array([1.0, 2.0, -np.inf, 3.0], np.float32)
    assert native.draw(row.ctypes.data, 4, [], 1.0, 0.0) == 0
    assert native.draw(row.ctypes.data, 4, [3], 1.0, np.nextafter(1.0, 0.0)) == 1
    assert native.draw(row.ctypes.data, 4, [0, 1], 1.0, 0.5) == 3


def test_likely_tokens() -> None:
    row = np.array([3.0, 1.0, 3.0, 3.0 + np.log(0.5), 9.0, -np.inf], np.float32)
    assert native.likely(row.ctypes.data, 6, [4], 0.5) == ([0, 2, 3], row[[0, 2, 3]].tolist())
    assert native.likely(row.ctypes.data, 6, [], 1.0) == ([4], [9.0])
