"""What is said of a request with a draft model and of one without."""

from __future__ import annotations

import pytest
from support.screen import finished_request, speculating_ranks, two_ranks

from ggpipe.display.tables.comparison import comparison
from ggpipe.stats.records import RankStats, RequestStats


def lasting(n_tokens: int, seconds: float) -> RequestStats:
    return RequestStats(token_times=[seconds * i / (n_tokens - 1) for i in range(n_tokens)])


HERE = [
    RankStats(rank=0, host="vm", layers=(0, 4)),
    RankStats(rank=1, host="vm", layers=(4, 8)),
    RankStats(rank=2, model=1, host="vm", layers=(0, 2)),
]


def test_a_faster_text() -> None:
    assert comparison(HERE, lasting(83, 2.0), lasting(30, 1.0)) == [
        "3 ranks on this machine: 2 hold the target's layers, 1 runs the draft model.",
        "With the draft model: 41.0 t/s. Without: 29.0 t/s (measured over 30 tokens). 1.41 times as fast.",
    ]


def test_a_slower_text() -> None:
    _, speeds = comparison(HERE, lasting(10, 1.0), lasting(11, 1.0))
    assert speeds == (
        "With the draft model: 9.00 t/s. Without: 10.0 t/s (measured over 11 tokens). "
        "0.90 times as fast: here, drafting does not pay."
    )


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
    roles, _ = comparison(ranks, lasting(10, 1.0), lasting(10, 1.0))
    assert roles == text


def test_texts_without_a_speed() -> None:
    assert comparison(HERE, lasting(10, 1.0), RequestStats()) == []
    assert comparison(HERE, RequestStats(token_times=[1.0]), finished_request()) == []
