"""`/metrics` for Prometheus: llama-server's metrics, and ggpipe's own about ranks, links, the queue and restarts."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ggpipe.server.backend import Backend, Status
from ggpipe.server.totals import RANK_LABELS, rank_labels
from ggpipe.stats.records import RankStats, rate


def registry(backend: Backend) -> CollectorRegistry:
    """All metrics, for `prometheus_client.generate_latest`."""
    found = CollectorRegistry(auto_describe=False)
    found.register(backend.totals.registry)
    found.register(_Figures(backend))
    return found


class _Figures(Collector):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._totals = backend.totals

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        yield from self._counters()
        yield from self._gauges()
        yield from self._ranks()

    def _counters(self) -> Iterator[Metric]:
        totals, backend = self._totals, self._backend
        first_runs = next((rank.runs for rank in backend.thread.ranks), 0)
        for name, help, value in (
            ("llamacpp:prompt_tokens", "Prompt tokens processed.", totals.prompt_tokens),
            ("llamacpp:prompt_tokens_cached", "Prompt tokens found in the prefix cache.", totals.cached_tokens),
            ("llamacpp:prompt_seconds", "Time until the first token, in seconds.", totals.prompt_s),
            ("llamacpp:tokens_predicted", "Tokens generated.", totals.predicted_tokens),
            ("llamacpp:tokens_predicted_seconds", "Time from first tokens to last, in seconds.", totals.predicted_s),
            ("llamacpp:n_decode", "Runs of the first stage.", first_runs),
            ("llamacpp:spec_decode_num_draft_tokens", "Draft tokens submitted.", totals.draft_tokens),
            ("llamacpp:spec_decode_num_accepted_tokens", "Draft tokens accepted.", totals.accepted_tokens),
            ("llamacpp:spec_decode_num_drafts", "Verified runs with draft tokens.", totals.drafts),
            ("ggpipe:prefix_cache_hits", "Requests with tokens in the prefix cache.", totals.n_cache_hits),
            ("ggpipe:restarts", "Restarts of the ranks.", backend.thread.n_restarts),
        ):
            yield CounterMetricFamily(name, help, value=value)

    def _gauges(self) -> Iterator[Metric]:
        totals, backend = self._totals, self._backend
        n_active = backend.thread.n_active
        n_deferred = max(n_active - backend.n_slots, 0)
        for name, help, value in (
            ("llamacpp:prompt_tokens_seconds", "Average prompt throughput in tokens/s.",
             rate(totals.prompt_tokens, totals.prompt_s)),
            ("llamacpp:predicted_tokens_seconds", "Average generation throughput in tokens/s.",
             rate(totals.later_tokens, totals.predicted_s)),
            ("llamacpp:requests_processing", "Running requests.", n_active - n_deferred),
            ("llamacpp:requests_deferred", "Waiting requests.", n_deferred),
            ("llamacpp:kv_cache_tokens", "KV cells in use by requests, kept prefixes and draft tokens.",
             backend.thread.n_cells),
            ("llamacpp:kv_cache_usage_ratio", "Share of all KV cells that is in use, 0 to 1.",
             backend.thread.n_cells / max(backend.n_ctx, 1)),
            ("llamacpp:n_tokens_max", "Most tokens of a prompt and its output.", totals.most_tokens),
            ("llamacpp:n_busy_slots_per_decode", "Average number of requests that share a run.",
             rate(totals.run_parts, totals.runs)),
            ("ggpipe:slots", "Maximum number of running requests.", backend.n_slots),
            ("ggpipe:ctx_size", "KV cells, shared by all requests.", backend.n_ctx),
            ("ggpipe:up", "1 if the model is loaded and all ranks run.", int(backend.status is Status.OK)),
            ("ggpipe:loaded_ratio", "How much of the weights is loaded, 0 to 1.", backend.progress),
            ("ggpipe:start_time_seconds", "When the server started, in seconds since 1970.", backend.began),
        ):  # fmt: skip
            yield GaugeMetricFamily(name, help, value=value)
        state = GaugeMetricFamily("ggpipe:state", "1 for the current state.", labels=("state",))
        for status in Status:
            state.add_metric((status.value,), int(backend.status is status))
        yield state

    def _ranks(self) -> Iterator[Metric]:
        ranks = list(self._backend.thread.ranks)
        shares = self._backend.occupancy.sample(ranks, time.monotonic())
        for name, help, of in _RANK_COUNTERS:
            yield _by_rank(CounterMetricFamily(name, help, labels=RANK_LABELS), ranks, [of(rank) for rank in ranks])
        for name, help, of in _RANK_GAUGES:
            yield _by_rank(GaugeMetricFamily(name, help, labels=RANK_LABELS), ranks, [of(rank) for rank in ranks])
        help = "Busy share of the last seconds, 0 to 1."
        yield _by_rank(GaugeMetricFamily("ggpipe:rank_occupancy", help, labels=RANK_LABELS), ranks, shares)


_RankValue = Callable[[RankStats], float | None]
_RANK_COUNTERS: tuple[tuple[str, str, _RankValue], ...] = (
    ("ggpipe:rank_busy_seconds", "Time on runs, since the rank's start.", lambda rank: rank.busy_s),
    ("ggpipe:rank_compute_seconds", "Time in libllama's decode.", lambda rank: rank.compute_s),
    ("ggpipe:rank_runs", "Runs, since the rank's start.", lambda rank: rank.runs),
    ("ggpipe:link_sent_bytes", "Bytes sent to the next rank.", lambda rank: rank.sent_bytes),
)
_RANK_GAUGES: tuple[tuple[str, str, _RankValue], ...] = (
    ("ggpipe:rank_resident_bytes", "Resident memory, as last measured.", lambda rank: rank.resident_bytes or None),
    ("ggpipe:rank_loaded_ratio", "How much of its weights is loaded.", lambda rank: rank.loaded),
    ("ggpipe:rank_layers", "Layers that it holds.", lambda rank: rank.layers[1] - rank.layers[0]),
)

Family = TypeVar("Family", CounterMetricFamily, GaugeMetricFamily)


def _by_rank(metric: Family, ranks: Sequence[RankStats], values: Sequence[float | None]) -> Family:
    """A metric with a sample per rank. None: unknown."""
    for rank, value in zip(ranks, values, strict=True):
        if value is not None:
            metric.add_metric(rank_labels(rank), value)
    return metric
