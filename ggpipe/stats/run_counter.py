"""Adds runs that have ended to the statistics of ranks and requests."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable, Sequence

from msgspec import structs

from ggpipe.config.model import TARGET
from ggpipe.core.messages import RunRecord, Span
from ggpipe.stats.activity import part, parts_of
from ggpipe.stats.records import RankStats, RequestStats

_MOST_WAITING = 8  # runs


class RunCounter:
    """Adds up the spans of runs.

    Spans of ranks that send runs on are part of the records. The other parts of a group report their spans separately,
    at about the time when the run ends, so records wait for them for a short time.
    """

    def __init__(self, ranks: Sequence[RankStats], stats_of: Callable[[int], RequestStats | None]) -> None:
        """`ranks`: all ranks, whose totals are updated. `stats_of`: returns the statistics of an active request, after
        whose end a draft's last runs may arrive."""
        self._ranks = ranks
        self._entry = {part(rank): i for i, rank in enumerate(ranks)}
        self._model = {rank.rank: rank.model for rank in reversed(ranks)}
        """The model that each rank holds. Drafts that the head runs come last in `ranks`."""
        self._stats_of = stats_of
        n_parts = collections.Counter(
            rank.model for rank, number in zip(ranks, parts_of(ranks), strict=True) if number > 0
        )
        self._pipelines = {model: _Pipeline(n_parts[model]) for model in {rank.model for rank in ranks}}

    def add(self, records: Sequence[RunRecord], model: int) -> None:
        """Add runs of a model that have ended. A run has one record per request, and these are consecutive."""
        pipeline = self._pipelines[model]
        for _, own in itertools.groupby(records, lambda record: record.id):
            pipeline.waiting.append(tuple(own))
        while pipeline.waiting and (pipeline.is_complete or len(pipeline.waiting) > _MOST_WAITING):
            self._count(pipeline, model)

    def add_part(self, run: int, span: Span) -> None:
        """Add the span of a group's part that does not send runs on."""
        model = self._model[span.rank]
        pipeline = self._pipelines[model]
        if run <= pipeline.counted:
            self._ranks[self._entry[span.rank, model]].add(span)
        else:
            pipeline.spans[run].append(span)
            self.add((), model)

    def end(self) -> None:
        """Count all waiting runs, since a request has ended."""
        for model, pipeline in self._pipelines.items():
            while pipeline.waiting:
                self._count(pipeline, model)

    def _count(self, pipeline: _Pipeline, model: int) -> None:
        records = pipeline.waiting.popleft()
        more = pipeline.spans_of(records[0].id)
        for i, record in enumerate(records):
            if more or model != TARGET:
                record = structs.replace(record, spans=(*record.spans, *more), model=model)
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
    """Waiting records of one model's runs, and spans that arrived before their records."""

    def __init__(self, n_parts: int) -> None:
        """`n_parts`: number of ranks that report their spans separately."""
        self._n_parts = n_parts
        self.waiting: collections.deque[tuple[RunRecord, ...]] = collections.deque()
        self.spans: dict[int, list[Span]] = collections.defaultdict(list)
        self.counted = -1
        """Id of the last run that was counted. Ids are ascending."""

    @property
    def is_complete(self) -> bool:
        """Whether all spans of the first waiting run have arrived."""
        return self._n_parts == 0 or len(self.spans[self.waiting[0][0].id]) == self._n_parts

    def spans_of(self, run: int) -> tuple[Span, ...]:
        """Take the separate spans of a run, by rank, and drop spans of earlier runs, which have no records."""
        own = sorted(self.spans.get(run, ()), key=lambda span: span.rank)
        for number in [number for number in self.spans if number <= run]:
            del self.spans[number]
        self.counted = run
        return tuple(own)
