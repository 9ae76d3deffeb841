"""Decoding a file's contents: what comes back, and what each mistake is called."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated

import pytest
from msgspec import Meta, Struct

from ggpipe.cluster.decode import decode, dotted

Share = Annotated[float, Meta(gt=0, le=1)]


@dataclass(frozen=True)
class Point:
    rows: Annotated[int, Meta(ge=1)]
    seconds: Annotated[float, Meta(gt=0)]


class Inner(Struct, forbid_unknown_fields=True):
    size: Annotated[int, Meta(ge=0, le=9)]
    share: Share | None = None
    points: tuple[Point, ...] = ()


class Outer(Struct, forbid_unknown_fields=True):
    name: Annotated[str, Meta(min_length=1)]
    inner: Inner | None = None
    pair: tuple[int, int] = (0, 0)
    is_on: bool = False

    def __post_init__(self) -> None:
        if self.pair[0] > self.pair[1]:
            raise ValueError("pair falls")


def test_a_sound_record() -> None:
    inner = {"size": 3, "share": 1, "points": [{"rows": 1, "seconds": 0.5, "unknown": "a dataclass ignores it"}]}
    assert decode({"name": "x", "inner": inner}, Outer) == Outer("x", Inner(3, 1.0, (Point(1, 0.5),)))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (3, "it must be a table, got 3"),
        ({}, "name is missing"),
        ({"name": ""}, "name must be a non-empty string in quotes, got ''"),
        ({"name": "x", "nmae": 1}, "nmae is not known here; known are name, inner, pair, is_on"),
        ({"name": "x", "is_on": 1}, "is_on must be true or false, got 1"),
        ({"name": "x", "pair": [1]}, "pair must be a list of 2, got [1]"),
        ({"name": "x", "pair": [2, 1]}, "pair falls"),
        ({"name": "x", "inner": []}, "inner must be a table, got []"),
        ({"name": "x", "inner": {"size": 10}}, "inner.size must be a whole number from 0 to 9, got 10"),
        ({"name": "x", "inner": {"size": True}}, "inner.size must be a whole number from 0 to 9, got true"),
        ({"name": "x", "inner": {"size": 1, "b": 1}}, "inner.b is not known here; known are size, share, points"),
        ({"name": "x", "inner": {"size": 1, "share": float("nan")}},
         "inner.share must be a number above 0 and at most 1, got nan"),
        ({"name": "x", "inner": {"size": 1, "points": {}}}, "inner.points must be a list of tables, got a table"),
        ({"name": "x", "inner": {"size": 1, "points": [{"rows": 1}]}}, "inner.points[0].seconds is missing"),
        ({"name": "x", "inner": {"size": 1, "points": [{"rows": 0, "seconds": 1}]}},
         "inner.points[0].rows must be a whole number of 1 or more, got 0"),
        ({"name": "x" * 99, "pair": "y" * 99}, f"pair must be a list of 2, got '{'y' * 38}…"),
    ],
)  # fmt: skip
def test_each_mistake_has_one_line(content: object, message: str) -> None:
    with pytest.raises(ValueError, match=f"^{re.escape(message)}$"):
        decode(content, Outer)


def test_the_caller_names_values() -> None:
    with pytest.raises(ValueError, match=r"^<pair> must be a list of 2, got 1$"):
        decode({"name": "x", "pair": 1}, Outer, lambda path: f"<{dotted(path)}>")
