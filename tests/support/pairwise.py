"""Products of parameters, thinned: any two values of two parameters meet, or each value is there, but not all
combinations are left.

Most mistakes that need several settings need two (Kuhn, Wallace and Gallo, "Software fault interactions and
implications for software testing", 2004). `scripts/test --full` runs all combinations.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import TypeVar

Row = TypeVar("Row", bound=tuple[object, ...])
Cell = tuple[int, int]
"""A column, and the number of a value in it."""


def combinations(rows: Iterable[Row], full: bool, meet: bool = True) -> list[Row]:
    """All rows, or with `full` False enough of them, in their order: values that meet in any row still meet in one.
    Without `meet`, each value is still in one, but any two need not meet.

    Values are compared with `==`. The same rows lead to the same choice.
    """
    rows = list(rows)
    if full:
        return rows
    cells = [tuple(enumerate(numbers)) for numbers in zip(*map(_numbers, zip(*rows, strict=True)), strict=True)]
    pairs = [_pairs(row) if meet else {(cell, cell) for cell in row} for row in cells]
    missing = set[tuple[Cell, Cell]]().union(*pairs)
    uses: Counter[Cell] = Counter()
    chosen = set()
    while missing:
        best = max(range(len(rows)), key=lambda i: (len(pairs[i] & missing), -sum(uses[cell] for cell in cells[i]), -i))
        chosen.add(best)
        missing -= pairs[best]
        uses.update(cells[best])
    return [rows[i] for i in sorted(chosen)]


def _numbers(values: Iterable[object]) -> list[int]:
    """A number for each value; equal values, which need not be hashable, have the same."""
    known: list[object] = []
    numbers = []
    for value in values:
        if value not in known:
            known.append(value)
        numbers.append(known.index(value))
    return numbers


def _pairs(row: Sequence[Cell]) -> set[tuple[Cell, Cell]]:
    """All pairs of a row's values. A single value counts as a pair."""
    return set(itertools.combinations(row, 2)) if len(row) > 1 else {(cell, cell) for cell in row}
