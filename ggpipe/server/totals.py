"""Counts over all requests since the server started, in constant memory."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import threading
from collections.abc import Sequence

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics

from ggpipe.core.request import Finish
from ggpipe.stats.activity import part, parts_of
from ggpipe.stats.records import RankStats, RequestStats

_MOST_POSITIONS = 64
"""Draft tokens further ahead count for the last position."""
RANK_LABELS = ("rank", "host", "draft")
_TIMES_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)


class Totals:
    """Counts over all ended requests. Sums are updated by the engine's thread, everything else by the event loop."""

    def __init__(self) -> None:
        """Call it in the event loop."""
        self._loop = asyncio.get_running_loop()
        self._lock = threading.Lock()
        self.n_requests = 0
        self.prompt_tokens = 0
        """Without those found in the prefix cache."""
        self.cached_tokens = 0
        self.prompt_s = 0.0
        """From arrival to the first token, or to the end of requests without tokens."""
        self.predicted_tokens = 0
        self.predicted_s = 0.0
        """From the first token of each output to its last."""
        self.later_tokens = 0
        """Generated tokens without the first of each output, which took `predicted_s`."""
        self.most_tokens = 0
        """Most tokens of a prompt and its output."""
        self.draft_tokens = 0
        self.accepted_tokens = 0
        self.drafts = 0
        """Verified runs with draft tokens."""
        self.n_cache_hits = 0
        """Requests with tokens in the prefix cache."""
        self.runs = 0.0
        self.run_parts = 0
        """Sum over all runs of the requests that shared each."""
        disable_created_metrics()  # type: ignore[no-untyped-call]
        self.registry = CollectorRegistry(auto_describe=False)
        """The metrics below."""
        self.ttft = self._histogram("time_to_first_token", "From a request's arrival to its first token.")
        self.itl = self._histogram("inter_token_latency", "From one token to the next.")
        self.queued = self._histogram("request_queue_time", "From arrival until the first run.")
        self.duration = self._histogram("e2e_request_latency", "From arrival to the end.")
        self.responses = self._counter("ggpipe:http_responses", "HTTP responses.", "path", "status")
        self._ended = self._counter("ggpipe:requests", "Ended requests, by reason.", "finish")
        name = "llamacpp:spec_decode_num_accepted_tokens_per_pos"
        self._accepted_at = self._counter(name, "Draft tokens accepted, by draft tokens before them.", "position")
        help = "Time from a run's end here to its start in the next stage: on the link, and waiting there."
        self._link_s = self._counter("ggpipe:link_seconds", help, *RANK_LABELS)
        self._link_runs = self._counter("ggpipe:link_runs", "Runs whose link time is known.", *RANK_LABELS)

    def _histogram(self, name: str, help: str) -> Histogram:
        return Histogram(f"ggpipe:{name}_seconds", help, buckets=_TIMES_S, registry=self.registry)

    def _counter(self, name: str, help: str, *labels: str) -> Counter:
        return Counter(name, help, labels, registry=self.registry)

    def add(self, stats: RequestStats, ranks: Sequence[RankStats]) -> None:
        """Count a request that has ended."""
        counters = stats.counters
        with self._lock:
            self.n_requests += 1
            self.cached_tokens += counters.cached_tokens
            if stats.n_generated or stats.finish is Finish.LENGTH:
                self.prompt_tokens += stats.n_prompt - counters.cached_tokens
                first = stats.token_times[0] if stats.token_times else stats.ended
                self.prompt_s += first - stats.arrived if first is not None else 0.0
            self.predicted_tokens += stats.n_generated
            self.predicted_s += stats.decode_s
            self.later_tokens += max(stats.n_generated - 1, 0)
            self.most_tokens = max(self.most_tokens, stats.n_prompt + stats.n_generated)
            self.draft_tokens += counters.submitted_tokens
            self.accepted_tokens += counters.accepted_tokens
            self.drafts += counters.verified_runs
        with contextlib.suppress(RuntimeError):  # the loop is closed
            self._loop.call_soon_threadsafe(self._measure, stats, ranks)

    def _measure(self, stats: RequestStats, ranks: Sequence[RankStats]) -> None:
        counters = stats.counters
        self._ended.labels(stats.finish.value if stats.finish is not None else "error").inc()
        self.n_cache_hits += counters.cached_tokens > 0
        for lead, (_, n_accepted) in counters.by_lead.items():
            self._accepted_at.labels(min(max(lead - 1, 0), _MOST_POSITIONS - 1)).inc(n_accepted)
        self.runs += sum(run.share for run in stats.runs)
        self.run_parts += len(stats.runs)
        for histogram, seconds in (
            (self.ttft, [stats.ttft_s]),
            (self.itl, stats.itl_s),
            (self.queued, [stats.queue_s]),
            (self.duration, [stats.ended - stats.arrived if stats.ended is not None else None]),
        ):
            for value in seconds:
                if value is not None:
                    histogram.observe(value)
        self._measure_links(stats, ranks)
        for runs in (stats.runs, stats.draft_runs):  # a slot keeps the stats of its last request
            runs.clear()

    def _measure_links(self, stats: RequestStats, ranks: Sequence[RankStats]) -> None:
        """`ranks`: all ranks, with the offsets of their clocks."""
        speakers = {part(rank): rank for rank, number in zip(ranks, parts_of(ranks), strict=True) if number == 0}
        for run in (*stats.runs, *stats.draft_runs):
            spans = [(speakers[span.rank, run.model], span) for span in run.spans if (span.rank, run.model) in speakers]
            for (own, span), (other, next_span) in itertools.pairwise(spans if not run.cancelled else ()):
                if own.host != other.host and own.clock_offset_s == other.clock_offset_s:
                    continue  # their clocks have not been compared yet
                ended_s = span.start_s + span.busy_s + own.clock_offset_s
                took_s = next_span.start_s + other.clock_offset_s - ended_s
                if took_s >= 0:
                    self._link_s.labels(*rank_labels(own)).inc(took_s * run.share)
                    self._link_runs.labels(*rank_labels(own)).inc()


def rank_labels(rank: RankStats) -> tuple[str, str, str]:
    """The values of RANK_LABELS."""
    return str(rank.rank), rank.host, str(rank.model)
