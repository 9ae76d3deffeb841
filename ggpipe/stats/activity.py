"""What each rank did for a request, and how much of it was wasted."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ggpipe.config.model import TARGET
from ggpipe.core.drafters import registry
from ggpipe.core.layout import layer_range
from ggpipe.core.messages import RunRecord, Span
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


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterWork:
    """What a drafter did for a request."""

    drafter: int
    """Its id."""
    label: str
    """As in `registry.labels`."""
    n_judged: int
    """Positions at which it had named a token when the target's was known."""
    n_right: int
    """How often its best token there was the target's."""
    n_paused: int
    """Tokens that were generated while it paused."""
    n_output: int
    """Tokens of the output that it had named and that were in the pipeline before they were sampled."""

    @property
    def agreement(self) -> float | None:
        """Share of the judged positions at which it was right."""
        return self.n_right / self.n_judged if self.n_judged else None


def drafters_of(stats: RequestStats, ranks: Sequence[RankStats]) -> list[DrafterWork]:
    """The drafters that worked for a request, by their ids."""
    kinds = {rank.model: rank.drafter or "draft" for rank in ranks if rank.draft}
    labels = registry.labels([kinds[model] for model in sorted(kinds)])
    judged, paused = stats.counters.by_drafter, stats.counters.paused_tokens
    n_output = collections.Counter(label for labels_of in stats.drafted_by for label in labels_of)
    return [
        DrafterWork(
            drafter=drafter,
            label=labels[drafter],
            n_judged=judged.get(drafter, (0, 0))[0],
            n_right=judged.get(drafter, (0, 0))[1],
            n_paused=paused.get(drafter, 0),
            n_output=n_output[labels[drafter]],
        )
        for drafter in sorted({*judged, *paused})
    ]


def taking_part(stats: RequestStats, ranks: Sequence[RankStats]) -> list[RankStats]:
    """The ranks that work for the request. Ranks of draft models do so only if it speculates."""
    return [rank for rank in ranks if not rank.draft or speculates(stats)]


def with_work(stats: RequestStats, ranks: Sequence[RankStats]) -> list[tuple[RankStats, RankStats]]:
    """Each rank with its work for the request."""
    work = {part(rank): rank for rank in stats.ranks}
    return [(rank, work.get(part(rank), rank)) for rank in ranks]


def wasted_s(stats: RequestStats) -> Mapping[RankWork, float]:
    """Seconds of decoding that did not help the request, by rank and model; 0 if nothing was wasted.

    These are all of a cancelled run, and the share of rejected rows in other runs, without those that were dropped. A
    draft's run counts only if it was cancelled, since drafting a token that is later rejected is not a waste.
    """
    wasted: dict[RankWork, float] = collections.defaultdict(float)
    for run in stats.runs:
        rejected = stats.counters.rejected_rows.get(run.id, 0)
        for span in run.spans:
            share = run.share if run.cancelled else rejected_share(run, span, rejected)
            wasted[span.rank, TARGET] += span.compute_s * share
    for run in stats.draft_runs:
        for span in run.spans:
            wasted[span.rank, run.model] += span.compute_s * run.share * run.cancelled
    return wasted


def rejected_share(run: RunRecord, span: Span, n_rejected: int) -> float:
    """The share of rejected rows among those that a rank computed for a run, `n_rejected` of whose rows were rejected
    for the request. Rows that were dropped count as some of these."""
    n_computed = min(max(n_rejected - (run.n_run_rows - span.n_rows), 0), span.n_rows)
    return n_computed / max(span.n_rows, 1)
