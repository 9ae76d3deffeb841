"""Figures of requests that share a pipeline."""

from __future__ import annotations

import pytest

from ggpipe.stats.records import RankStats, RequestStats
from ggpipe.stats.traffic import traffic_summary


def request(arrived: float, started: float, *token_times: float) -> RequestStats:
    return RequestStats(n_prompt=5, arrived=arrived, started=started, token_times=list(token_times))


def test_figures_of_all_requests() -> None:
    requests = [request(10.0, 10.0, 11.0, 11.5, 12.0), request(11.0, 12.0, 14.0, 15.0)]
    ranks = [
        RankStats(rank=0, layers=(0, 2), busy_s=4.0),
        RankStats(rank=1, layers=(2, 4), busy_s=2.0),
        RankStats(rank=2, model=1, layers=(0, 1), busy_s=5.0),
    ]
    found = traffic_summary(requests, ranks)
    assert found.elapsed_s == 5.0
    assert found.total_tokens_per_s == pytest.approx(1.0)
    assert found.requests_per_s == pytest.approx(0.4)
    assert (found.ttft_p50_s, found.ttft_p99_s) == (1.0, 3.0)
    assert (found.itl_p50_s, found.itl_p90_s) == (0.5, 1.0)
    assert (found.queue_p50_s, found.queue_p90_s) == (0.0, 1.0)
    assert found.occupancy == pytest.approx(0.6)
    assert found.draft_occupancy is None, "no request speculates"


def test_figures_of_nothing() -> None:
    found = traffic_summary([], [])
    assert (found.total_tokens_per_s, found.ttft_p50_s, found.occupancy) == (None, None, None)
