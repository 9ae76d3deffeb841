"""Thinned products: any two values still meet."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st
from support.pairwise import combinations

Row = tuple[int, ...]


def pairs(rows: list[Row]) -> set[tuple[int, int, int, int]]:
    return {(i, a, j, b) for row in rows for (i, a), (j, b) in itertools.combinations(enumerate(row), 2)}


@given(st.integers(2, 4).flatmap(lambda n: st.lists(st.tuples(*[st.integers(0, 3)] * n), min_size=1, max_size=40)))
def test_values_that_meet_still_meet(rows: list[Row]) -> None:
    chosen = combinations(rows, full=False)
    assert pairs(chosen) == pairs(rows)
    positions = iter(rows)
    assert all(row in positions for row in chosen), "some of the rows, in their order"
    assert combinations(rows, full=False) == chosen
    assert combinations(rows, full=True) == rows


@pytest.mark.parametrize(("sizes", "n"), [((5,), 5), ((7, 3), 21), ((16, 6, 4), 96), ((2, 2, 2, 2), 6)])
def test_products_get_about_as_small_as_they_can(sizes: Row, n: int) -> None:
    assert len(combinations(itertools.product(*map(range, sizes)), full=False)) == n


def test_values_that_cannot_be_hashed() -> None:
    assert combinations([({}, 1), ({}, 1)], full=False) == [({}, 1)]


@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_marked(a: int, b: int, c: int) -> None:
    """For the next one."""


def test_a_marked_test_has_fewer_combinations(request: pytest.FixtureRequest, full: bool) -> None:
    names = [item.name for item in request.session.items if item.name.startswith("test_marked[")]
    assert len(names) in (0, 27 if full else 9)  # 0: nobody asked for it
