"""The table of a bench has a column for each drafter, where there are several."""

from __future__ import annotations

import pytest
from support.screen import speculated_request, speculating_ranks

from ggpipe.display.tables.bench import bench_tables
from ggpipe.display.tables.columns import plain_text
from ggpipe.stats.summary import BenchRun, summary_of


@pytest.mark.parametrize("n_drafters", [1, 2])
def test_a_column_for_each_drafter(n_drafters: int) -> None:
    stats, ranks = speculated_request(), speculating_ranks()
    stats.ranks = ranks
    stats.counters.by_drafter = dict([(0, [10, 6]), (1, [4, 1])][:n_drafters])
    assert summary_of([stats, stats]).right == dict([("draft", 0.6), ("ngram", 0.25)][:n_drafters])
    run = BenchRun(mode="async", round=1, prompt="tale", tokens=(1,), stats=stats, ranks=ranks)
    header, row, *_ = plain_text(lambda width: bench_tables([run], ["async"], width), 120).splitlines()
    assert ("draft right" in header) == ("ngram right" in header) == (n_drafters == 2)
    assert ("60 %" in row) == ("25 %" in row) == (n_drafters == 2)
