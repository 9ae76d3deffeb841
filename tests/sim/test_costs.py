"""How long a stage takes for a run."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ggpipe.cluster.model_shape import ATTENTION_SPEED
from ggpipe.cluster.profile import Point
from ggpipe.core.row_work import Attention
from ggpipe.sim.costs import MeasuredCost, Roofline, StreamedCost

ROOFLINE = Roofline(
    weight_bytes=10e9, cell_bytes=1e5, token_flop=20e9, bytes_per_s=50e9, flop_per_s=500e9, fixed_s=1e-3
)


def test_memory_then_arithmetic() -> None:
    assert ROOFLINE.seconds(1, 0) == pytest.approx(1e-3 + 10e9 / 50e9, rel=1e-4)
    assert ROOFLINE.seconds(4, 0) == pytest.approx(ROOFLINE.seconds(1, 0), rel=1e-4), "rows are free while memory is it"
    assert ROOFLINE.seconds(100, 0) == pytest.approx(1e-3 + 100 * 20e9 / 500e9, rel=1e-3)


def test_the_context_is_read() -> None:
    assert ROOFLINE.seconds(1, 10_000) - ROOFLINE.seconds(1, 0) == pytest.approx(10_000 * 1e5 / 50e9)


def test_attention_takes_longer_than_reading_its_cells() -> None:
    cost = replace(ROOFLINE, attention=(Attention(cell=1e6), Attention(cell=1e6, most_cells=1000)))
    flop = 1e6 * (10_001 + 1000)
    expected = ROOFLINE.seconds(1, 0) + flop / (ATTENTION_SPEED * 500e9)
    assert cost.seconds(1, 10_000) == pytest.approx(expected, rel=1e-4)
    assert cost.seconds(1, 10) == pytest.approx(ROOFLINE.seconds(1, 10), rel=1e-3), "few cells are free"
    assert cost.seconds(8, 10_000) > cost.seconds(1, 10_000) + 6 * flop / (ATTENTION_SPEED * 500e9)


def test_other_requests_cells_are_only_read() -> None:
    cost = replace(ROOFLINE, attention=(Attention(cell=1e5),))
    assert cost.seconds(2, 1000, 500) - cost.seconds(2, 1000) < 501 * 1e5 / 50e9


def test_experts_are_read_as_rows_use_them() -> None:
    experts = Roofline(
        weight_bytes=10e9,
        cell_bytes=0,
        token_flop=1,
        bytes_per_s=1e9,
        flop_per_s=1e15,
        fixed_s=0,
        expert_bytes=8e9,
        untouched=0.75,
    )
    assert experts.seconds(1, 0) == pytest.approx(2 + 8 * 0.25)
    assert experts.seconds(2, 0) == pytest.approx(2 + 8 * (1 - 0.75**2))
    assert experts.seconds(1000, 0) == pytest.approx(10)


@given(st.integers(1, 600), st.integers(1, 600), st.integers(0, 8192), st.integers(0, 8192), st.floats(0, 1))
def test_more_rows_take_longer(rows: int, more_rows: int, past: int, more_past: int, unused: float) -> None:
    cost = Roofline(
        weight_bytes=10e9,
        cell_bytes=1e5,
        token_flop=20e9,
        bytes_per_s=50e9,
        flop_per_s=500e9,
        fixed_s=1e-3,
        expert_bytes=6e9,
        untouched=unused,
    )
    (rows, more_rows), (past, more_past) = sorted((rows, more_rows)), sorted((past, more_past))
    assert 0 < cost.seconds(rows, past) <= cost.seconds(more_rows, more_past)


def points(times: dict[tuple[int, int], float]) -> list[Point]:
    return [Point(rows, past, seconds) for (rows, past), seconds in times.items()]


MEASURED = {(1, 32): 0.010, (2, 32): 0.011, (8, 32): 0.030, (1, 512): 0.012, (2, 512): 0.013, (8, 512): 0.040}


def test_measured_points_are_met() -> None:
    cost = MeasuredCost(points(MEASURED))
    for (rows, past), seconds in MEASURED.items():
        assert cost.seconds(rows, past) == pytest.approx(seconds)


def test_between_and_beyond_measured_points() -> None:
    cost = MeasuredCost(points(MEASURED))
    assert cost.seconds(5, 32) == pytest.approx((0.011 + 0.030) / 2)
    assert cost.seconds(1, 272) == pytest.approx(0.011)
    assert cost.seconds(14, 32) == pytest.approx(0.030 + 0.019)
    assert cost.seconds(1, 992) == pytest.approx(0.014)
    assert cost.seconds(1, 0) == pytest.approx(0.010 - 0.002 * 32 / 480)


def test_a_stage_of_another_size() -> None:
    cost = MeasuredCost(points(MEASURED), 0.5, 0.002)
    assert cost.seconds(1, 32) == pytest.approx(0.002 + 0.004)
    assert cost.seconds(8, 512) == pytest.approx(0.002 + 0.019)


def test_a_single_point() -> None:
    cost = MeasuredCost([Point(4, 32, 0.01)])
    assert cost.seconds(1, 0) == cost.seconds(4, 100) == 0.01
    assert cost.seconds(8, 0) == pytest.approx(0.02)
    with pytest.raises(ValueError, match="at least one point"):
        MeasuredCost([])


@given(
    st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1), min_size=1, max_size=6),
    st.dictionaries(st.integers(1, 64), st.floats(1e-4, 1), min_size=1, max_size=6),
    st.integers(1, 600),
    st.integers(0, 8192),
)
def test_any_times_give_times(short: dict[int, float], long: dict[int, float], rows: int, past: int) -> None:
    """However noisy they are."""
    cost = MeasuredCost([*(Point(n, 32, s) for n, s in short.items()), *(Point(n, 512, s) for n, s in long.items())])
    assert cost.seconds(rows, past) > 0


@given(
    st.lists(st.floats(1e-4, 1), min_size=6, max_size=6),
    st.integers(1, 600),
    st.integers(1, 600),
    st.integers(32, 8192),
    st.integers(32, 8192),
)
def test_rising_times_stay_rising(times: list[float], rows: int, more: int, past: int, more_past: int) -> None:
    one, two, three, *extra = sorted(times)
    (rows, more), (past, more_past) = sorted((rows, more)), sorted((past, more_past))
    context = extra[0]
    cost = MeasuredCost(
        [Point(n, p, s + context * (p > 32)) for p in (32, 512) for n, s in ((1, one), (2, two), (8, three))]
    )
    assert cost.seconds(rows, past) <= cost.seconds(more, past) + 1e-9
    assert cost.seconds(rows, past) <= cost.seconds(rows, more_past) + 1e-9


def test_weights_are_read_while_others_are_computed_with() -> None:
    cost = StreamedCost(in_memory=ROOFLINE, run_bytes=2e9, expert_bytes=0, untouched=0, bytes_per_s=2e9)
    assert cost.seconds(1, 0) == cost.seconds(8, 0) == 1.0, "rows are free while the disk is it"
    assert cost.seconds(100, 0) == ROOFLINE.seconds(100, 0)


def test_experts_are_read_once_it_is_known_which() -> None:
    cost = StreamedCost(in_memory=ROOFLINE, run_bytes=0, expert_bytes=4e9, untouched=0.75, bytes_per_s=2e9)
    for rows in (1, 2, 8):
        assert cost.seconds(rows, 0) - ROOFLINE.seconds(rows, 0) == pytest.approx(2 * (1 - 0.75**rows))
