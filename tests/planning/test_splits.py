"""Good splits, compared with all possible splits."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.planning.splits import Times, good_splits, shortest

N_LAYER = 6


def place(layer_s: float, most_layers: int, n_layer: int = N_LAYER) -> Times:
    """A place where a layer takes `layer_s`, and at most `most_layers` fit."""
    times = np.full((n_layer + 1, n_layer + 1), np.inf)
    for a, b in itertools.combinations(range(n_layer + 1), 2):
        if b - a <= most_layers:
            times[a, b] = 0.1 + layer_s * (b - a) + (0.5 if b == n_layer else 0)
    return times


def all_splits(places: Sequence[Times], may_skip: Sequence[bool]) -> Iterator[tuple[tuple[int, ...], float, float]]:
    """Each split with the time of all stages, and of the slowest."""
    n_layer = len(places[0]) - 1
    for counts in itertools.product(range(n_layer + 1), repeat=len(places)):
        if sum(counts) != n_layer or any(n == 0 and not skip for n, skip in zip(counts, may_skip, strict=True)):
            continue
        ends = list(itertools.accumulate(counts))
        stages = [float(places[i][end - n, end]) for i, (n, end) in enumerate(zip(counts, ends, strict=True)) if n]
        if math.isfinite(sum(stages)):
            yield counts, sum(stages), max(stages)


places_strategy = st.lists(
    st.builds(place, st.floats(0.5, 4), st.integers(0, N_LAYER)), min_size=1, max_size=4
).flatmap(
    lambda places: st.tuples(st.just(places), st.lists(st.booleans(), min_size=len(places), max_size=len(places)))
)


@given(places_strategy)
def test_nothing_beats_the_ends(case: tuple[list[Times], list[bool]]) -> None:
    places, may_skip = case
    everything = {counts: (all_s, slowest_s) for counts, all_s, slowest_s in all_splits(places, may_skip)}
    found = good_splits(places, may_skip)
    assert bool(found) == bool(everything)
    if found:
        assert set(found) <= set(everything)
        assert everything[found[0]][1] == pytest.approx(min(slowest for _, slowest in everything.values()))
        assert everything[found[-1]][0] == pytest.approx(min(all_s for all_s, _ in everything.values()), rel=1e-3)


@given(places_strategy, st.floats(1, 12))
def test_the_shortest_within_a_bound(case: tuple[list[Times], list[bool]], bound_s: float) -> None:
    places, may_skip = case
    possible = [all_s for _, all_s, slowest_s in all_splits(places, may_skip) if slowest_s <= bound_s]
    found = shortest(places, may_skip, bound_s)
    if found is None:
        assert not possible
    else:
        (all_s,) = (all_s for counts, all_s, _ in all_splits(places, may_skip) if counts == found)
        assert all_s == pytest.approx(min(possible), rel=1e-3)


def test_equal_machines_get_equal_parts() -> None:
    assert good_splits([place(1, 12, 12)] * 4, [False] * 4)[0] == (3, 3, 3, 3)
    assert sorted(good_splits([place(1, 12, 12)] * 5, [False] * 5)[0]) == [2, 2, 2, 3, 3]


def test_machines_that_are_not_needed_get_nothing() -> None:
    fast, slow = place(1, N_LAYER), place(9, N_LAYER)
    assert good_splits([slow, fast, slow], [True] * 3) == [(0, 6, 0)]
    assert good_splits([slow, fast], [False, False]) == [(1, 5)]
