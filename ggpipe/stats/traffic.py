"""Summaries of requests that share a pipeline: their total throughput, and their latencies."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ggpipe.stats.activity import speculates
from ggpipe.stats.records import RankStats, RequestStats, percentile


@dataclass(frozen=True, slots=True, kw_only=True)
class TrafficSummary:
    """Requests that shared a pipeline. A field is None if the metric does not apply to them."""

    elapsed_s: float
    """Time from the first arrival to the last token."""
    total_tokens_per_s: float | None
    """Generated tokens of all requests per second of that time, which includes prompts."""
    requests_per_s: float | None
    ttft_p50_s: float | None
    ttft_p90_s: float | None
    ttft_p99_s: float | None
    itl_p50_s: float | None
    """Inter-token latencies of all requests together."""
    itl_p90_s: float | None
    itl_p99_s: float | None
    queue_p50_s: float | None
    """Queueing time: from a request's arrival until its first tokens entered the pipeline."""
    queue_p90_s: float | None
    queue_p99_s: float | None
    occupancy: float | None
    """Mean busy share of the target's stages."""
    draft_occupancy: float | None
    """Mean busy share of the draft's stages."""


def traffic_summary(requests: Sequence[RequestStats], ranks: Sequence[RankStats]) -> TrafficSummary:
    """Summarize requests that have ended. `ranks`: each rank's work for all of them."""
    first_s = min((request.arrived for request in requests), default=0.0)
    last_s = max((request.token_times[-1] for request in requests if request.token_times), default=first_s)
    elapsed_s = last_s - first_s
    ttft_s = _percentiles(request.ttft_s for request in requests)
    itl_s = _percentiles(wait_s for request in requests for wait_s in request.itl_s)
    queue_s = _percentiles(request.queue_s for request in requests)
    return TrafficSummary(
        elapsed_s=elapsed_s,
        total_tokens_per_s=sum(request.n_generated for request in requests) / elapsed_s if elapsed_s > 0 else None,
        requests_per_s=len(requests) / elapsed_s if elapsed_s > 0 else None,
        ttft_p50_s=ttft_s[0],
        ttft_p90_s=ttft_s[1],
        ttft_p99_s=ttft_s[2],
        itl_p50_s=itl_s[0],
        itl_p90_s=itl_s[1],
        itl_p99_s=itl_s[2],
        queue_p50_s=queue_s[0],
        queue_p90_s=queue_s[1],
        queue_p99_s=queue_s[2],
        occupancy=_occupancy(ranks, elapsed_s, draft=False),
        draft_occupancy=_occupancy(ranks, elapsed_s, draft=True) if any(map(speculates, requests)) else None,
    )


def _percentiles(values: Iterable[float | None]) -> tuple[float | None, float | None, float | None]:
    """p50, p90 and p99."""
    known = [value for value in values if value is not None]
    return percentile(known, 0.5), percentile(known, 0.9), percentile(known, 0.99)


def _occupancy(ranks: Sequence[RankStats], elapsed_s: float, *, draft: bool) -> float | None:
    own = [rank.busy_s for rank in ranks if rank.draft == draft and rank.layers[0] < rank.layers[1]]
    return sum(own) / len(own) / elapsed_s if own and elapsed_s > 0 else None
