"""What each rank did for a request, and how much of that was for nothing."""

from __future__ import annotations

import collections
from collections.abc import Mapping, Sequence

from ggpipe.runtime.stats import RankStats, RequestStats

Part = tuple[int, bool]
"""A rank, and whether it is meant as a rank of the draft: a process can be one of the target as well."""


def part(rank: RankStats) -> Part:
    """Whose numbers these are."""
    return rank.rank, rank.draft


def speculates(stats: RequestStats) -> bool:
    """A draft guesses for this request."""
    return stats.speculation.mode != "iterative"


def taking_part(stats: RequestStats, ranks: Sequence[RankStats]) -> list[RankStats]:
    """The ranks that work for the request: a draft that guesses nothing does not."""
    return [rank for rank in ranks if not rank.draft or speculates(stats)]


def with_work(stats: RequestStats, ranks: Sequence[RankStats]) -> list[tuple[RankStats, RankStats]]:
    """Each rank with what it did for the request."""
    work = {part(rank): rank for rank in stats.ranks}
    return [(rank, work.get(part(rank), rank)) for rank in ranks]


def wasted_s(stats: RequestStats) -> Mapping[Part, float]:
    """Seconds of decoding that did not help the request; 0 for a rank that wasted none.

    That is all of a cancelled run, and of any other the share of its rows that turned out wrong. What the draft
    decoded counts only when its run was cancelled: a guess that is rejected was worth a try.
    """
    wasted: dict[Part, float] = collections.defaultdict(float)
    for run in stats.runs:
        wrong = stats.counters.wrong_rows.get(run.id, 0)
        share = 1.0 if run.cancelled else min(wrong / run.n_rows, 1.0) if run.n_rows else 0.0
        for span in run.spans:
            wasted[span.rank, False] += span.compute_s * share
    for run in stats.draft_runs:
        for span in run.spans:
            wasted[span.rank, True] += span.compute_s * run.cancelled
    return wasted
