"""What each rank did for a request, and how much of it was wasted."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence

from ggpipe.config.model import TARGET
from ggpipe.core.layout import layer_range
from ggpipe.stats.records import RankStats, RequestStats

RankWork = tuple[int, int]
"""(rank, id of the model) of some work: a process can work for several models."""


def part(rank: RankStats) -> RankWork:
    """The rank and the model to which these statistics belong."""
    return rank.rank, rank.model


def parts_of(ranks: Sequence[RankStats]) -> list[int]:
    """The number of each rank's part in the group of its stage; 0 if a stage has one rank. `ranks`: all, in order."""
    numbers: list[int] = []
    for i, rank in enumerate(ranks):
        follows = i > 0 and _is_same_stage(ranks[i - 1], rank)
        numbers.append(numbers[-1] + 1 if follows else 0)
    return numbers


def layer_texts(ranks: Sequence[RankStats]) -> list[str]:
    """The layers of each rank as text: `0-7`, or `0-7 part 1` in a group. `ranks`: all ranks of a model, in order."""
    numbers = parts_of(ranks)
    are_grouped = [number > 0 or following > 0 for number, following in itertools.pairwise([*numbers, 0])]
    return [
        layer_range(rank.layers) + (f" part {number}" if is_grouped else "")
        for rank, number, is_grouped in zip(ranks, numbers, are_grouped, strict=True)
    ]


def _is_same_stage(rank: RankStats, other: RankStats) -> bool:
    return rank.model == other.model and rank.layers == other.layers and rank.layers[0] < rank.layers[1]


def speculates(stats: RequestStats) -> bool:
    """Whether the request uses draft tokens."""
    return stats.speculation.mode != "iterative"


def taking_part(stats: RequestStats, ranks: Sequence[RankStats]) -> list[RankStats]:
    """The ranks that work for the request. Ranks of draft models do so only if it speculates."""
    return [rank for rank in ranks if not rank.draft or speculates(stats)]


def with_work(stats: RequestStats, ranks: Sequence[RankStats]) -> list[tuple[RankStats, RankStats]]:
    """Each rank with its work for the request."""
    work = {part(rank): rank for rank in stats.ranks}
    return [(rank, work.get(part(rank), rank)) for rank in ranks]


def wasted_s(stats: RequestStats) -> Mapping[RankWork, float]:
    """Seconds of decoding that did not help the request, by rank and model; 0 if nothing was wasted.

    These are all of a cancelled run, and the share of rejected rows in other runs. A draft's run counts only if it was
    cancelled, since drafting a token that is later rejected is not a waste.
    """
    wasted: dict[RankWork, float] = collections.defaultdict(float)
    for run in stats.runs:
        rejected = stats.counters.rejected_rows.get(run.id, 0)
        share = run.share if run.cancelled else min(rejected / run.n_run_rows, 1.0)
        for span in run.spans:
            wasted[span.rank, TARGET] += span.compute_s * share
    for run in stats.draft_runs:
        for span in run.spans:
            wasted[span.rank, run.model] += span.compute_s * run.share * run.cancelled
    return wasted
