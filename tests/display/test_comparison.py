"""What is said of outputs with a draft model and without it."""

from __future__ import annotations

import pytest
from support.screen import finished_request, speculating_ranks, two_ranks

from ggpipe.display.tables.comparison import ComparedRound, comparison
from ggpipe.stats.records import RankStats, RequestStats


def lasting(n_tokens: int, seconds: float) -> RequestStats:
    return RequestStats(token_times=[seconds * i / (n_tokens - 1) for i in range(n_tokens)])


HERE = [
    RankStats(rank=0, host="vm", layers=(0, 4)),
    RankStats(rank=1, host="vm", layers=(4, 8)),
    RankStats(rank=2, model=1, host="vm", layers=(0, 2)),
]


def rounds(*seconds: tuple[float, float], n_tokens: int = 11) -> list[ComparedRound]:
    """A round for each (seconds with the draft model, seconds without it)."""
    return [ComparedRound(drafted=lasting(n_tokens, a), alone=lasting(n_tokens, b)) for a, b in seconds]


def test_faster_outputs() -> None:
    assert comparison(HERE, rounds((0.5, 0.9), (0.5, 1.0), (0.5, 1.1))) == [
        "3 ranks on this machine: 2 hold the target's layers, 1 runs the draft model.",
        "With the draft model: 20.0 t/s. Without: 10.0 t/s. 2.00 times as fast.",
        "(Medians of 3 rounds of 11 tokens, with and without in turn.)",
    ]


def test_slower_outputs() -> None:
    _, speeds, _ = comparison(HERE, rounds((1.0, 0.9)))
    assert speeds == (
        "With the draft model: 10.0 t/s. Without: 11.1 t/s. 0.90 times as fast: here, drafting does not pay."
    )


@pytest.mark.parametrize(
    ("seconds", "busy", "words"),
    [
        (((0.5, 1.0),) * 3, 0.4, ("too busy to tell", "other programs use 40 % of its processors")),
        (((0.5, 1.0), (1.0, 0.5), (0.5, 1.0)), 0.0, ("too busy to tell", "0.50 to 2.00 times as fast")),
    ],
)
def test_a_busy_machine(seconds: tuple[tuple[float, float], ...], busy: float, words: tuple[str, ...]) -> None:
    """A ratio would say little, whichever it is."""
    _, speeds, _ = comparison(HERE, rounds(*seconds), busy)
    assert all(word in speeds for word in words)
    assert "does not pay" not in speeds


@pytest.mark.parametrize(
    ("ranks", "text"),
    [
        (speculating_ranks(), "2 ranks on 2 machines: 2 hold the target's layers, rank 0 also runs the draft model."),
        (two_ranks(), "2 ranks on 2 machines: 2 hold the target's layers."),
        ([RankStats(rank=0, host="vm"), *HERE[1:]],
         "3 ranks on this machine: 1 holds the target's layers, 1 runs the draft model."),
        ([HERE[0], RankStats(rank=0, model=1, host="vm", layers=(0, 2))],
         "1 rank on this machine: 1 holds the target's layers, rank 0 also runs the draft model."),
    ],
)  # fmt: skip
def test_what_ranks_do(ranks: list[RankStats], text: str) -> None:
    roles, *_ = comparison(ranks, rounds((1.0, 1.0)))
    assert roles == text


def test_texts_without_a_speed() -> None:
    short = RequestStats(token_times=[1.0])
    for drafted, alone in ((lasting(10, 1.0), RequestStats()), (short, finished_request())):
        assert comparison(HERE, [ComparedRound(drafted=drafted, alone=alone)]) == []
    assert comparison(HERE, []) == []
