"""`/metrics`: llama-server's names for Prometheus, and ggpipe's own of ranks and restarts."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ggpipe.server.backend import Backend, Status
from ggpipe.server.json import rate


def registry(backend: Backend) -> CollectorRegistry:
    """What `prometheus_client.generate_latest` writes."""
    found = CollectorRegistry(auto_describe=False)
    found.register(_Figures(backend))
    return found


class _Figures(Collector):
    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        totals, backend = self._backend.totals, self._backend
        counters = (
            ("prompt_tokens", "Prompt tokens processed.", totals.prompt_tokens),
            ("prompt_seconds", "Time until the first token, in seconds.", totals.prompt_s),
            ("tokens_predicted", "Tokens generated.", totals.predicted_tokens),
            ("tokens_predicted_seconds", "Time from the first token to the last, in seconds.", totals.predicted_s),
            ("n_decode", "Runs of the first stage.", next((rank.runs for rank in backend.ranks), 0)),
            ("spec_decode_num_draft_tokens", "Draft tokens submitted.", totals.draft_tokens),
            ("spec_decode_num_accepted_tokens", "Draft tokens accepted.", totals.accepted_tokens),
            ("spec_decode_num_drafts", "Runs with draft tokens that were verified.", totals.drafts),
        )
        for name, help, value in counters:
            yield CounterMetricFamily(f"llamacpp:{name}", help, value=value)
        n_active = backend.n_active
        n_deferred = max(n_active - backend.n_slots, 0)
        gauges = (
            ("llamacpp:prompt_tokens_seconds", "Average prompt throughput in tokens/s.",
             rate(totals.prompt_tokens, totals.prompt_s)),
            ("llamacpp:predicted_tokens_seconds", "Average generation throughput in tokens/s.",
             rate(totals.predicted_tokens - totals.n_requests, totals.predicted_s)),
            ("llamacpp:requests_processing", "Requests that are being served.", n_active - n_deferred),
            ("llamacpp:requests_deferred", "Requests that wait.", n_deferred),
            ("llamacpp:n_tokens_max", "Most tokens of a prompt and its text.", totals.most_tokens),
            ("ggpipe:up", "The model is loaded, and no rank is away.", int(backend.status is Status.OK)),
        )  # fmt: skip
        for name, help, gauge in gauges:
            yield GaugeMetricFamily(name, help, value=gauge)
        yield CounterMetricFamily("ggpipe:requests", "Requests that ended.", value=totals.n_requests)
        yield CounterMetricFamily("ggpipe:cached_tokens", "Prompt tokens not computed again.", totals.cached_tokens)
        yield CounterMetricFamily("ggpipe:restarts", "Times that ranks were started again.", backend.n_restarts)
        yield from self._ranks()

    def _ranks(self) -> Iterator[Metric]:
        labels = ("rank", "host", "draft")
        busy = CounterMetricFamily("ggpipe:rank_busy_seconds", "Time on runs, since the rank's start.", labels=labels)
        sent = CounterMetricFamily("ggpipe:rank_sent_bytes", "Bytes sent to the next rank.", labels=labels)
        resident = GaugeMetricFamily("ggpipe:rank_resident_bytes", "Resident memory, as last measured.", labels=labels)
        for rank in list(self._backend.ranks):
            values = (str(rank.rank), rank.host, str(int(rank.draft)))
            busy.add_metric(values, rank.busy_s)
            sent.add_metric(values, rank.sent_bytes)
            resident.add_metric(values, rank.resident_bytes)
        yield from (busy, sent, resident)
