"""Summaries of requests: the metrics of a mode for benchmarks, simulations and displays."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ggpipe.config.model import TARGET
from ggpipe.stats.activity import drafters_of, speculates, wasted_s
from ggpipe.stats.records import RankStats, RequestStats, Spread, percentile, quartiles

BASE_MODE = "iterative"
"""The mode that others are compared with, if it was run."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """The pooled requests of one mode. A field is None if the metric does not apply to them."""

    n_requests: int
    tokens_per_s: float | None
    """Decode speed: tokens per second after the first token of each request."""
    ttft_s: float | None
    """Mean time to first token."""
    itl_mean_s: float | None
    itl_p50_s: float | None
    itl_p99_s: float | None
    acceptance: float | None
    """Accepted draft tokens as a share of the submitted ones."""
    accepted_per_run: float | None
    """Accepted draft tokens per verified run with draft tokens."""
    cancelled_runs: int | None
    cancelled: float | None
    """Cancelled runs as a share of the runs with draft tokens."""
    wasted: float | None
    """Share of the target stages' decode time that cancelled runs and rejected rows took."""
    occupancy: float | None
    """Mean busy share of the target's stages."""
    draft_occupancy: float | None
    """Mean busy share of the draft's stages."""
    right: Mapping[str, float]
    """By drafter: how often its best token was the target's, of the positions at which it had named one."""
    draft_paused: float | None
    """Share of the generated tokens that came while a draft model paused; None where it never did."""
    sent_bytes_per_token: float | None
    """Bytes sent between stages and to the head, per generated token."""


def summary_of(requests: Sequence[RequestStats]) -> Summary:
    """Pool the requests of one mode."""
    waits_s = [wait for request in requests for wait in request.itl_s]
    ttfts_s = [request.ttft_s for request in requests if request.ttft_s is not None]
    counters = [request.counters for request in requests]
    submitted, accepted = sum(c.submitted_tokens for c in counters), sum(c.accepted_tokens for c in counters)
    verified, cancelled = sum(c.verified_runs for c in counters), sum(c.cancelled_runs for c in counters)
    n_speculative = sum(c.speculative_runs for c in counters)
    has_draft = any(map(speculates, requests))
    stages = _stages(requests, draft=False)
    compute_s = sum(rank.compute_s for _, rank in stages)
    lost_s = sum(
        seconds for request in requests for (_, model), seconds in wasted_s(request).items() if model == TARGET
    )
    n_tokens = sum(request.n_generated for request in requests)
    judged: dict[str, tuple[int, int]] = {}
    for request in requests:
        for own in drafters_of(request, request.ranks):
            n_judged, n_right = judged.get(own.label, (0, 0))
            judged[own.label] = n_judged + own.n_judged, n_right + own.n_right
    n_paused = sum(max(c.paused_tokens.values(), default=0) for c in counters)
    return Summary(
        n_requests=len(requests),
        tokens_per_s=len(waits_s) / sum(waits_s) if waits_s else None,
        ttft_s=sum(ttfts_s) / len(ttfts_s) if ttfts_s else None,
        itl_mean_s=sum(waits_s) / len(waits_s) if waits_s else None,
        itl_p50_s=percentile(waits_s, 0.5),
        itl_p99_s=percentile(waits_s, 0.99),
        acceptance=accepted / submitted if submitted else None,
        accepted_per_run=accepted / verified if verified else None,
        cancelled_runs=cancelled if has_draft else None,
        cancelled=min(cancelled / n_speculative, 1.0) if n_speculative else None,
        wasted=lost_s / compute_s if n_speculative and compute_s else None,
        occupancy=_occupancy(stages),
        draft_occupancy=_occupancy(_stages(requests, draft=True)) if has_draft else None,
        right={label: n_right / n for label, (n, n_right) in judged.items() if n},
        draft_paused=min(n_paused / n_tokens, 1.0) if n_paused and n_tokens else None,
        sent_bytes_per_token=sum(rank.sent_bytes for _, rank in stages) / n_tokens if n_tokens else None,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchRun:
    """One measured request of a benchmark."""

    mode: str
    """`iterative`, `speculative`, `async`, or `single`: the whole model in one process."""
    layout: str = ""
    """Its layer split; empty unless several are compared."""
    round: int
    prompt: str
    """The prompt's name."""
    tokens: tuple[int, ...]
    stats: RequestStats
    ranks: Sequence[RankStats]
    """The ranks that worked for it."""

    @property
    def case(self) -> str:
        """The case to which the run belongs, see `case_name`."""
        return case_name(self.layout, self.mode)


def case_name(layout: str, mode: str) -> str:
    """The name of a case, which is what a benchmark compares: a mode or, if it compares layouts, a mode on a layout."""
    return f"{layout} {mode}" if layout else mode


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSummary:
    """One case of a benchmark: its pooled runs, and how they differ."""

    case: str
    mode: str
    layout: str
    pooled: Summary
    tokens_per_s: Spread | None
    """Decode speed of each run."""
    gain: Spread | None
    """Decode speed relative to that of the base case in the same round and with the same prompt."""
    prefill_tokens_per_s: Spread | None
    ttft_s: Spread | None
    itl_s: Spread | None
    """Mean inter-token latency of each run."""
    n_differ: int
    """Number of outputs that differ from the base case's in the same round."""


def base_case(cases: Sequence[str]) -> str:
    """The base case, with which the others are compared: iterative decoding if it was run, otherwise the first case."""
    return BASE_MODE if BASE_MODE in cases else cases[0]


def summarise(runs: Sequence[BenchRun], cases: Sequence[str]) -> list[BenchSummary]:
    """One summary per case that has runs."""
    base = {(run.round, run.prompt): run for run in runs if run.case == base_case(cases)}
    of = {case: [run for run in runs if run.case == case] for case in cases}
    return [
        _bench_summary(own, [(run, base.get((run.round, run.prompt))) for run in own]) for own in of.values() if own
    ]


def median_run(runs: Sequence[BenchRun], case: str) -> BenchRun | None:
    """The run with the median speed of a case; None if the case has no runs."""
    own = sorted((run for run in runs if run.case == case), key=lambda run: run.stats.decode_tps or 0.0)
    return own[len(own) // 2] if own else None


def _bench_summary(runs: Sequence[BenchRun], pairs: Sequence[tuple[BenchRun, BenchRun | None]]) -> BenchSummary:
    stats = [run.stats for run in runs]
    gains = [_gain(run, base) for run, base in pairs if base is not None]
    return BenchSummary(
        case=runs[0].case,
        mode=runs[0].mode,
        layout=runs[0].layout,
        pooled=summary_of(stats),
        tokens_per_s=quartiles(s.decode_tps for s in stats if s.decode_tps is not None),
        gain=quartiles(gain for gain in gains if gain is not None),
        prefill_tokens_per_s=quartiles(s.prefill_tps for s in stats if s.prefill_tps is not None),
        ttft_s=quartiles(s.ttft_s for s in stats if s.ttft_s is not None),
        itl_s=quartiles(sum(s.itl_s) / len(s.itl_s) for s in stats if s.itl_s),
        n_differ=sum(run.tokens != base.tokens for run, base in pairs if base is not None),
    )


def _gain(run: BenchRun, base: BenchRun) -> float | None:
    own, other = run.stats.decode_tps, base.stats.decode_tps
    return own / other if own is not None and other is not None else None


def _stages(requests: Sequence[RequestStats], *, draft: bool) -> list[tuple[RequestStats, RankStats]]:
    """(request, rank) for each rank that holds layers of the target, or of a draft."""
    return [(s, rank) for s in requests for rank in s.ranks if rank.draft == draft and rank.layers[0] < rank.layers[1]]


def _occupancy(stages: Sequence[tuple[RequestStats, RankStats]]) -> float | None:
    time_s = sum(request.elapsed_s(request.arrived) for request, _ in stages)
    return sum(rank.busy_s for _, rank in stages) / time_s if time_s else None
