"""Two of the faults of `scripts/bench/check_faults`: ranks die while four streams are served, and nothing is lost."""

from __future__ import annotations

import pytest
from support.faults import Fault, Kind, Texts, play, undisturbed


@pytest.fixture(scope="module")
def expected() -> Texts:
    return undisturbed(60)


@pytest.mark.parametrize(
    "fault",
    [
        Fault(number=0, kind=Kind.KILL, rank=0, after_tokens=0, after_s=0.0, on_hosts=False),  # prompts are being read
        Fault(number=1, kind=Kind.KILL, rank=1, after_tokens=100, after_s=0.0, on_hosts=False),
    ],
)
def test_streams_end_whole(fault: Fault, expected: Texts) -> None:
    outcome, wrong = play(fault, expected, 3, rank_timeout_s=60)
    assert not wrong, outcome.lines
    assert any("starting the ranks again" in line for line in outcome.lines)
