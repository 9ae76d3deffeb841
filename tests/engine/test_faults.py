"""Two of the faults of `scripts/bench/check_faults`: ranks die while four streams are served, and nothing is lost."""

from __future__ import annotations

import pytest
from support.faults import Fault, Kind, Texts, play, undisturbed

MOST_ROUNDS = 10
"""On a busy machine, the streams may be done before this process gets its turn and kills the rank."""


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
    for _ in range(MOST_ROUNDS):
        outcome, wrong = play(fault, expected, 3, rank_timeout_s=60)
        assert not wrong, outcome.lines
        if any("starting the ranks again" in line for line in outcome.lines):
            return
    raise AssertionError("the streams were always done before the fault")
