"""Rows that die while their run is in flight, and stages that drop them.

When a token is accepted, the draft tokens that are not below it are dead. A run in which nothing lives is cancelled
(`in_flight`). Of other runs, each stage drops the rows that it knows to be dead when it takes the run; the stages after
it get the run without them.

rule                                              because
the head tells all stages of dead rows at once,   a stage that drops a row then also drops what hangs on it, which is
with the runs that are cancelled                  dead as well: libllama wants sequences without gaps
a stage decides when it takes a run               later, the message to the next stage has its size already
what one part of a group drops, all drop          they add up the same rows
a group computes few different numbers of rows    each number is a graph, of which it keeps some
rows keep their numbers                           results and states are known by them
a run whose rows are all dropped is cancelled     it has nothing to compute

Dropped rows have no KV cells in the stages that dropped them. Nothing counts on these: accepted tokens are never
dropped, and removing a cell that a stage does not have changes nothing. So stages need not drop the same rows.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import TypeVar

DeadRow = tuple[int, int]
"""A run, and the number of a row in it."""

MOST_ROWS_IN_GROUP = 64
"""Groups drop no rows of longer runs, which hold prompts."""

T = TypeVar("T")


def kept(rows: Sequence[T], dropped: Collection[int]) -> tuple[T, ...]:
    """The rows that are not dropped."""
    return tuple(row for number, row in enumerate(rows) if number not in dropped) if dropped else tuple(rows)


def rows_in_group(n_live: int, n_rows: int) -> int:
    """How many rows of a run a group computes, which has `n_rows` rows for it, `n_live` of which live.

    All numbers up to 8, and then some: 18 graphs up to 64 rows, and a group keeps 24.
    """
    step = 1 if n_live <= 8 else 4 if n_live <= 32 else 8
    return min(-(-n_live // step) * step, n_rows)
