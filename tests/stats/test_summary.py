"""Requests in a few numbers: pooled, and None where there is nothing to pool."""

from __future__ import annotations

import pytest
from support.screen import speculated_request

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.request import Counters
from ggpipe.stats.records import RankStats, RequestStats
from ggpipe.stats.summary import summary_of


def request(step_s: float, mode: str = "async", **counters: int) -> RequestStats:
    """Three tokens: the first after a second, the others `step_s` apart; one stage that was busy half of the time."""
    end_s = 1 + 2 * step_s
    stage = RankStats(rank=0, layers=(0, 8), compute_s=end_s / 4, busy_s=end_s / 2, sent_bytes=300)
    draft = RankStats(rank=1, model=1, layers=(0, 2), busy_s=end_s / 5)
    return RequestStats(
        arrived=10.0,
        token_times=[11.0, 11.0 + step_s, 11.0 + 2 * step_s],
        ended=10.0 + end_s,
        ranks=[stage, draft],
        speculation=SpeculationConfig(mode=mode),  # type: ignore[arg-type]
        counters=Counters(**counters),  # type: ignore[arg-type]
    )


def test_requests_are_pooled() -> None:
    first = request(0.1, submitted_tokens=10, accepted_tokens=9, speculative_runs=4, verified_runs=3, cancelled_runs=1)
    other = request(0.3, submitted_tokens=30, accepted_tokens=1, speculative_runs=4, verified_runs=1, cancelled_runs=3)
    own = summary_of([first, other])
    assert own.n_requests == 2
    assert own.tokens_per_s == pytest.approx(4 / 0.8), "by all tokens, not the mean of the requests' speeds"
    assert (own.ttft_s, own.itl_mean_s, own.itl_p50_s, own.itl_p99_s) == pytest.approx((1.0, 0.2, 0.1, 0.3))
    assert (own.acceptance, own.accepted_per_run) == (0.25, 2.5)
    assert (own.cancelled_runs, own.cancelled) == (4, 0.5)
    assert (own.occupancy, own.draft_occupancy) == pytest.approx((0.5, 0.2))
    assert own.sent_bytes_per_token == 100


def test_without_a_draft() -> None:
    own = summary_of([request(0.1, "iterative")])
    assert (own.acceptance, own.accepted_per_run, own.cancelled_runs, own.cancelled) == (None,) * 4
    assert (own.wasted, own.draft_occupancy) == (None, None)


def test_a_single_token_has_no_speed() -> None:
    stats = RequestStats(arrived=10.0, token_times=[11.0], ended=11.0)
    own = summary_of([stats])
    assert own.ttft_s == 1
    assert (own.tokens_per_s, own.itl_mean_s, own.itl_p50_s, own.occupancy) == (None,) * 4


def test_wasted_is_the_decode_time_of_cancelled_runs_and_rejected_rows() -> None:
    stats = speculated_request()
    for rank in stats.ranks:
        rank.layers = (0, 8)
    assert summary_of([stats]).wasted == pytest.approx((0.07 + 0.025) / (0.31 + 0.3))
