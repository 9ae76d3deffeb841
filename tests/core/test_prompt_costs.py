"""What rows of prompts take, as learned from runs."""

from __future__ import annotations

import pytest

from ggpipe.core.run_cost import RunCost


def learned(*runs: tuple[int, float]) -> RunCost:
    """From runs of prompts alone: their rows, and what each beyond the first takes. A run of one row takes 10 ms."""
    cost = RunCost()
    cost.ended(1, 10e-3)
    for n_rows, row_s in runs:
        cost.prompt_ended(0, n_rows, 10e-3 + (n_rows - 1) * row_s)
    return cost


def test_rows_are_known_by_the_length_of_their_run() -> None:
    cost = learned((4, 3e-3), (200, 1e-3))
    assert cost.prompt_row_s(5) == pytest.approx(3e-3, rel=0.05)
    assert cost.prompt_row_s(255) == pytest.approx(1e-3)
    assert cost.prompt_s(0, 101) == pytest.approx(10e-3 + 100 * 1e-3), "the nearest length"


def test_a_wrong_first_time_does_not_go_into_others() -> None:
    """Once it did: short runs seemed cheap for ever, since long ones became dear whenever short ones were timed."""
    cost = learned((4, 0.1e-3), (200, 1e-3), *[(4, 3e-3)] * 15)
    assert cost.prompt_row_s(4) == pytest.approx(3e-3, rel=0.1)
    assert (cost.prompt_row_s(200) or 0.0) < 1.6e-3


def test_times_of_other_lengths_are_forgotten() -> None:
    """Rows get dearer towards the end of a prompt. Those of the next prompt show again which length is better."""
    cost = learned((20, 5e-3), *[(200, 1e-3)] * 150)
    assert cost.prompt_row_s(20) == pytest.approx(1e-3, rel=0.3)
