"""Work of attention: what runs of any length add up to."""

from __future__ import annotations

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from ggpipe.core.row_work import LONG_CELLS, LONG_ROWS, Attention, RowWork, together

ATTENTION = st.builds(
    Attention,
    cell=st.floats(0, 10),
    most_cells=st.integers(0, 300),
    index=st.floats(0, 1),
    near_cell=st.floats(0, 10),
    n_near=st.integers(0, 300),
    long_cell=st.floats(0, 10),
    expansion=st.floats(0, 100),
)


@given(ATTENTION, st.integers(1, 600), st.integers(0, 2000))
def test_each_row_sees_the_cells_before_it_and_its_own(attention: Attention, n_rows: int, n_past: int) -> None:
    before = range(n_past, n_past + n_rows)
    seen = sum(min(past + 1, attention.most_cells or past + 1) for past in before)
    expected = attention.cell * seen + attention.index * sum(past + 1 for past in before)
    expected += attention.near_cell * sum(min(past + 1, attention.n_near) for past in before)
    assert attention.never_long().of_run(n_rows, n_past) == pytest.approx(expected)


@given(ATTENTION, st.integers(1, 2000), st.integers(0, 2000), st.integers(1, LONG_ROWS - 1))
def test_a_prompt_is_its_short_runs(attention: Attention, n_tokens: int, n_past: int, n_rows: int) -> None:
    runs = [(at, min(n_rows, n_tokens - at)) for at in range(0, n_tokens, n_rows)]
    expected = sum(attention.of_run(n, n_past + at) for at, n in runs)
    assert attention.in_short_runs(n_tokens, n_past) == pytest.approx(expected)


@given(ATTENTION, st.integers(1, 600), st.integers(0, 2000))
def test_long_runs_are_computed_as_short_ones_where_that_is_less(
    attention: Attention, n_rows: int, n_past: int
) -> None:
    assert attention.of_run(n_rows, n_past) <= attention.never_long().of_run(n_rows, n_past)


def test_latent_vectors_are_expanded_once_for_all_rows() -> None:
    latent = Attention(cell=1088, long_cell=320, expansion=131072)
    n_past = 8 * LONG_CELLS
    for n_rows in (LONG_ROWS, 512, 1024):
        pairs = n_rows * (n_past + (n_rows + 1) / 2)
        assert latent.of_run(n_rows, n_past) == pytest.approx(320 * pairs + 131072 * (n_past + n_rows))
    short = latent.never_long()
    assert latent.of_run(LONG_ROWS - 1, n_past) == short.of_run(LONG_ROWS - 1, n_past)
    assert latent.of_run(LONG_ROWS, 10) == short.of_run(LONG_ROWS, 10)


@example([Attention(cell=0, near_cell=1, n_near=1)], 1, 0)
@given(st.lists(ATTENTION, max_size=6), st.integers(1, 600), st.integers(0, 2000))
def test_layers_are_added_up(layers: list[Attention], n_rows: int, n_past: int) -> None:
    total = sum(part.of_run(n_rows, n_past) for part in together([*layers, *layers]))
    assert total == pytest.approx(2 * sum(layer.of_run(n_rows, n_past) for layer in layers))


def test_equal_layers_are_one() -> None:
    window, whole = Attention(cell=1, most_cells=128), Attention(cell=1)
    assert together([window, whole] * 4) == (window.times(4), whole.times(4))
    assert RowWork(attention=(whole,)).never_long() == RowWork(attention=(whole,))
