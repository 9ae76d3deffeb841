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


@given(st.lists(st.tuples(*[st.integers(0, 3)] * 3), min_size=1, max_size=40))
def test_each_value_is_left(rows: list[Row]) -> None:
    chosen = combinations(rows, full=False, meet=False)
    assert {cell for row in chosen for cell in enumerate(row)} == {cell for row in rows for cell in enumerate(row)}
    assert len(chosen) <= sum(len(set(column)) for column in zip(*rows, strict=True))
    assert combinations(rows, full=True, meet=False) == rows


@pytest.mark.pairwise
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(3))
@pytest.mark.parametrize("c", range(3))
def test_marked(a: int, b: int, c: int) -> None:
    """For the next one."""


@pytest.mark.each_value
@pytest.mark.parametrize("a", range(3))
@pytest.mark.parametrize("b", range(2))
def test_marked_once(a: int, b: int) -> None:
    """For the next one."""


@pytest.mark.only_full
def test_marked_full() -> None:
    """For the next one."""


def test_marked_tests_have_fewer_combinations(request: pytest.FixtureRequest, full: bool) -> None:
    def n(start: str) -> int:
        return sum(item.name.startswith(start) for item in request.session.items)

    assert n("test_marked[") in (0, 27 if full else 9)  # 0: nobody asked for it
    assert n("test_marked_once[") in (0, 6 if full else 3)
    assert n("test_marked_full") in (0, 1 if full else 0)
