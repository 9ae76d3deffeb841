"""`/metrics`: llama-server's names for Prometheus, and ggpipe's own of ranks, links, the queue and restarts."""

from __future__ import annotations

import time
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from ggpipe.server.backend import Backend, Status
from ggpipe.stats.activity import part
from ggpipe.stats.records import RankStats, rate


def registry(backend: Backend) -> CollectorRegistry:
    """What `prometheus_client.generate_latest` writes."""
    disable_created_metrics()  # type: ignore[no-untyped-call]
    found = CollectorRegistry(auto_describe=False)
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
        yield from self._labelled()
        yield from self._histograms()
        yield from self._ranks()
        yield from self._links()

    def _counters(self) -> Iterator[Metric]:
        totals, backend = self._totals, self._backend
        first_runs = next((rank.runs for rank in backend.ranks), 0)
        for name, help, value in (
            ("llamacpp:prompt_tokens", "Prompt tokens processed.", totals.prompt_tokens),
            ("llamacpp:prompt_tokens_cached", "Prompt tokens that the prefix cache had.", totals.cached_tokens),
            ("llamacpp:prompt_seconds", "Time until the first token, in seconds.", totals.prompt_s),
            ("llamacpp:tokens_predicted", "Tokens generated.", totals.predicted_tokens),
            ("llamacpp:tokens_predicted_seconds", "Time from first tokens to last, in seconds.", totals.predicted_s),
            ("llamacpp:n_decode", "Runs of the first stage.", first_runs),
            ("llamacpp:spec_decode_num_draft_tokens", "Draft tokens submitted.", totals.draft_tokens),
            ("llamacpp:spec_decode_num_accepted_tokens", "Draft tokens accepted.", totals.accepted_tokens),
            ("llamacpp:spec_decode_num_drafts", "Runs with draft tokens that were verified.", totals.drafts),
            ("ggpipe:prefix_cache_hits", "Requests of which the prefix cache had a part.", totals.n_cache_hits),
            ("ggpipe:restarts", "Times that ranks were started again.", backend.n_restarts),
        ):
            yield CounterMetricFamily(name, help, value=value)

    def _gauges(self) -> Iterator[Metric]:
        totals, backend = self._totals, self._backend
        n_active = backend.n_active
        n_deferred = max(n_active - backend.n_slots, 0)
        for name, help, value in (
            ("llamacpp:prompt_tokens_seconds", "Average prompt throughput in tokens/s.",
             rate(totals.prompt_tokens, totals.prompt_s)),
            ("llamacpp:predicted_tokens_seconds", "Average generation throughput in tokens/s.",
             rate(totals.later_tokens, totals.predicted_s)),
            ("llamacpp:requests_processing", "Requests that are being served.", n_active - n_deferred),
            ("llamacpp:requests_deferred", "Requests that wait.", n_deferred),
            ("llamacpp:kv_cache_tokens", "KV cells in use: of requests, kept prefixes and draft tokens.",
             backend.n_cells),
            ("llamacpp:kv_cache_usage_ratio", "The share of all KV cells that this is, 0 to 1.",
             backend.n_cells / max(backend.n_ctx, 1)),
            ("llamacpp:n_tokens_max", "Most tokens of a prompt and its text.", totals.most_tokens),
            ("llamacpp:n_busy_slots_per_decode", "Average number of requests that share a run.",
             rate(totals.run_parts, totals.runs)),
            ("ggpipe:slots", "Requests that are served at the same time, at most.", backend.n_slots),
            ("ggpipe:ctx_size", "KV cells, for all requests together.", backend.n_ctx),
            ("ggpipe:up", "The model is loaded, and no rank is away.", int(backend.status is Status.OK)),
            ("ggpipe:loaded_ratio", "Share of the loading that is done.", backend.progress),
            ("ggpipe:start_time_seconds", "When the server started, in seconds since 1970.", backend.began),
        ):  # fmt: skip
            yield GaugeMetricFamily(name, help, value=value)

    def _labelled(self) -> Iterator[Metric]:
        totals, backend = self._totals, self._backend
        state = GaugeMetricFamily("ggpipe:state", "1 for what the server does now.", labels=("state",))
        for status in Status:
            state.add_metric((status.value,), int(backend.status is status))
        requests = CounterMetricFamily("ggpipe:requests", "Requests that ended, by why.", labels=("finish",))
        for finish, n in sorted((finish.value if finish else "error", n) for finish, n in totals.by_finish.items()):
            requests.add_metric((finish,), n)
        responses = CounterMetricFamily("ggpipe:http_responses", "Answers over HTTP.", labels=("path", "status"))
        for (path, code), n in sorted(totals.responses.items()):
            responses.add_metric((path, str(code)), n)
        yield from (state, requests, responses)
        if totals.accepted_at:
            name = "llamacpp:spec_decode_num_accepted_tokens_per_pos"
            accepted = CounterMetricFamily(name, "Draft tokens accepted, by position.", labels=("position",))
            for position, n in enumerate(totals.accepted_at):
                accepted.add_metric((str(position),), n)
            yield accepted

    def _histograms(self) -> Iterator[Metric]:
        totals = self._totals
        for histogram in (totals.ttft, totals.itl, totals.queued, totals.duration):
            yield from histogram.collect()

    def _ranks(self) -> Iterator[Metric]:
        ranks, labels = list(self._backend.ranks), ("rank", "host", "draft")
        shares = self._backend.occupancy.sample(ranks, time.monotonic())
        busy = CounterMetricFamily("ggpipe:rank_busy_seconds", "Time on runs, since the rank's start.", labels=labels)
        compute = CounterMetricFamily("ggpipe:rank_compute_seconds", "Time in libllama's decode.", labels=labels)
        runs = CounterMetricFamily("ggpipe:rank_runs", "Runs, since the rank's start.", labels=labels)
        occupied = GaugeMetricFamily("ggpipe:rank_occupancy", "Busy share of the last seconds, 0 to 1.", labels=labels)
        resident = GaugeMetricFamily("ggpipe:rank_resident_bytes", "Resident memory, as last measured.", labels=labels)
        loaded = GaugeMetricFamily("ggpipe:rank_loaded_ratio", "Share of its loading that is done.", labels=labels)
        layers = GaugeMetricFamily("ggpipe:rank_layers", "Layers that it holds.", labels=labels)
        for rank, share in zip(ranks, shares, strict=True):
            values = _labels(rank)
            busy.add_metric(values, rank.busy_s)
            compute.add_metric(values, rank.compute_s)
            runs.add_metric(values, rank.runs)
            occupied.add_metric(values, share)
            if rank.resident_bytes:
                resident.add_metric(values, rank.resident_bytes)
            loaded.add_metric(values, rank.loaded)
            layers.add_metric(values, rank.layers[1] - rank.layers[0])
        yield from (busy, compute, runs, occupied, resident, loaded, layers)

    def _links(self) -> Iterator[Metric]:
        links, labels = self._totals.links, ("rank", "host", "draft")
        sent = CounterMetricFamily("ggpipe:link_sent_bytes", "Bytes sent to the next rank.", labels=labels)
        took = CounterMetricFamily(
            "ggpipe:link_seconds", "Time from a run's end here to its start in the next stage.", labels=labels
        )
        n_runs = CounterMetricFamily("ggpipe:link_runs", "Runs of which that is known.", labels=labels)
        for rank in list(self._backend.ranks):
            values, key = _labels(rank), part(rank)
            sent.add_metric(values, rank.sent_bytes)
            if links.n_runs[key]:
                took.add_metric(values, links.seconds[key])
                n_runs.add_metric(values, links.n_runs[key])
        yield from (sent, took, n_runs)


def _labels(rank: RankStats) -> tuple[str, str, str]:
    return str(rank.rank), rank.host, str(rank.model)
