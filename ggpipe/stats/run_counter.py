"""Runs that ended, added to the statistics of ranks and of requests."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace

from ggpipe.config.model import TARGET
from ggpipe.core.messages import RunRecord, Span
from ggpipe.stats.activity import part, parts_of
from ggpipe.stats.records import RankStats, RequestStats

_MOST_WAITING = 8  # runs


class RunCounter:
    """Adds up the spans of runs.

    Those of the ranks that send runs on come with the records. The other parts of a group report theirs by themselves,
    about when the run ends: so records wait for them, but not for long.
    """

    def __init__(self, ranks: Sequence[RankStats], stats_of: Callable[[int], RequestStats | None]) -> None:
        """`ranks`: all of them, whose totals are counted. `stats_of` finds the statistics of a request, as long as it
        is not over; a draft's last runs may outlive it."""
        self._ranks = ranks
        self._entry = {part(rank): i for i, rank in enumerate(ranks)}
        self._model = {rank.rank: rank.model for rank in reversed(ranks)}
        """What a rank's own process holds: drafts inside the head's come last."""
        self._stats_of = stats_of
        n_parts = collections.Counter(
            rank.model for rank, number in zip(ranks, parts_of(ranks), strict=True) if number > 0
        )
        self._pipelines = {model: _Pipeline(n_parts[model]) for model in {rank.model for rank in ranks}}

    def add(self, records: Sequence[RunRecord], model: int) -> None:
        """Runs of a model that ended. Those of one run follow each other, one for each request."""
        pipeline = self._pipelines[model]
        for _, own in itertools.groupby(records, lambda record: record.id):
            pipeline.waiting.append(tuple(own))
        while pipeline.waiting and (pipeline.is_complete or len(pipeline.waiting) > _MOST_WAITING):
            self._count(pipeline, model)

    def add_part(self, run: int, span: Span) -> None:
        """The time of a part that does not send its runs on."""
        model = self._model[span.rank]
        pipeline = self._pipelines[model]
        if run <= pipeline.counted:
            self._ranks[self._entry[span.rank, model]].add(span)
        else:
            pipeline.spans[run].append(span)
            self.add((), model)

    def end(self) -> None:
        """A request is over: count all of its runs."""
        for model, pipeline in self._pipelines.items():
            while pipeline.waiting:
                self._count(pipeline, model)

    def _count(self, pipeline: _Pipeline, model: int) -> None:
        records = pipeline.waiting.popleft()
        more = pipeline.spans_of(records[0].id)
        for i, record in enumerate(records):
            if more or model != TARGET:
                record = replace(record, spans=(*record.spans, *more), model=model)
            stats = self._stats_of(record.request)
            if stats is not None:
                (stats.runs if model == TARGET else stats.draft_runs).append(record)
            for span in record.spans:
                entry = self._entry[span.rank, model]
                if i == 0:
                    self._ranks[entry].add(span)
                if stats is not None:
                    stats.ranks[entry].add(span, record.share)


class _Pipeline:
    """Runs of one model whose records wait, and spans that came before their records."""

    def __init__(self, n_parts: int) -> None:
        """`n_parts`: ranks that report their spans by themselves."""
        self._n_parts = n_parts
        self.waiting: collections.deque[tuple[RunRecord, ...]] = collections.deque()
        self.spans: dict[int, list[Span]] = collections.defaultdict(list)
        self.counted = -1
        """The number of the last run that was counted; numbers rise."""

    @property
    def is_complete(self) -> bool:
        """All spans of the first run that waits are there."""
        return self._n_parts == 0 or len(self.spans[self.waiting[0][0].id]) == self._n_parts

    def spans_of(self, run: int) -> tuple[Span, ...]:
        """What came of a run that is counted now, by rank. Runs before it have no records."""
        own = sorted(self.spans.get(run, ()), key=lambda span: span.rank)
        for number in [number for number in self.spans if number <= run]:
            del self.spans[number]
        self.counted = run
        return tuple(own)
