"""What each rank did for a request, and how much of it was wasted."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from ggpipe.metrics.stats import RankStats, RequestStats

Part = tuple[int, bool]
"""A rank, and whether its work for the draft is meant: a process can work for both models."""


def part(rank: RankStats) -> Part:
    """The rank, and whether the numbers are those of its work for the draft."""
    return rank.rank, rank.draft


def speculates(stats: RequestStats) -> bool:
    """A draft works for this request."""
    return stats.speculation.mode != "iterative"


def taking_part(stats: RequestStats, ranks: Sequence[RankStats]) -> list[RankStats]:
    """The ranks that work for the request: the draft's only where it speculates."""
    return [rank for rank in ranks if not rank.draft or speculates(stats)]


def with_work(stats: RequestStats, ranks: Sequence[RankStats]) -> list[tuple[RankStats, RankStats]]:
    """Each rank with what it did for the request."""
    work = {part(rank): rank for rank in stats.ranks}
    return [(rank, work.get(part(rank), rank)) for rank in ranks]


def wasted_s(stats: RequestStats) -> Mapping[Part, float]:
    """Seconds of decoding that did not help the request; 0 for a rank that wasted none.

    That is all of a cancelled run, and the share of rejected rows of any other run. A draft's run counts only when it
    was cancelled: drafting a token that is rejected was not in vain.
    """
    wasted: dict[Part, float] = collections.defaultdict(float)
    for run in stats.runs:
        rejected = stats.counters.rejected_rows.get(run.id, 0)
        share = run.share if run.cancelled else min(rejected / run.n_run_rows, 1.0)
        for span in run.spans:
            wasted[span.rank, False] += span.compute_s * share
    for run in stats.draft_runs:
        for span in run.spans:
            wasted[span.rank, True] += span.compute_s * run.share * run.cancelled
    return wasted
