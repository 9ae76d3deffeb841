"""Shows a recording: agreement by prompt and by confidence, and how often the second choice is right."""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence

from ggpipe.cluster.recording import Recording, SecondChoice
from ggpipe.display.format import percent

_BINS = 5
_SECOND_BINS = (0, 5, 10, 20, 30)
"""Lower ends of ranges of a second choice's probability, in percent; it is at most 50 %."""
_DEPTHS = (1, 2, 3, 4, 6, 8)
_Row = tuple[str, Sequence[str]]
"""A title and its cells."""


def recording_text(recording: Recording) -> str:
    """A line per prompt, then agreement by confidence, then the second choices."""
    width = max(len(name) for name in ("second choice", *(recorded.name for recorded in recording.prompts)))
    lines = [
        f"{recorded.name:{width}}  {len(recorded.text)} tokens  agreement {_mean(recorded.agrees)}  "
        f"confidence {_mean(recorded.confidence)}"
        for recorded in recording.prompts
    ]
    bins: list[list[bool]] = [[] for _ in range(_BINS)]
    for recorded in recording.prompts:
        for agrees, confidence in zip(recorded.agrees, recorded.confidence, strict=True):
            bins[min(int(confidence * _BINS), _BINS - 1)].append(agrees)
    step = 100 // _BINS
    lines += _columns(
        width,
        (
            ("confidence", [f"{i * step}-{(i + 1) * step} %" for i in range(_BINS)]),
            ("agreement", [_mean(agrees) for agrees in bins]),
            ("tokens", [f"{len(agrees)}" for agrees in bins]),
        ),
    )
    if choices := recording.second_choices:
        lines += ["", *_columns(width, _by_probability(choices)), "", *_columns(width, _by_depth(choices))]
    return "".join(f"{line}\n" for line in lines)


def _columns(width: int, rows: Iterable[_Row]) -> list[str]:
    return [" ".join([f"{title:{width}}", *(f"{cell:>8}" for cell in cells)]) for title, cells in rows]


def _by_probability(choices: Sequence[SecondChoice]) -> list[_Row]:
    """How often second choices of each probability are right, where the best one is not."""
    bins: list[list[bool]] = [[] for _ in _SECOND_BINS]
    for choice in choices:
        bins[bisect.bisect_right(_SECOND_BINS, 100 * choice.probability) - 1].append(choice.is_right)
    ends = (*_SECOND_BINS[1:], 50)
    return [
        ("second choice", [f"{a}-{b} %" for a, b in zip(_SECOND_BINS, ends, strict=True)]),
        ("second right", [_mean(right) for right in bins]),
        ("tokens", [f"{len(right)}" for right in bins]),
    ]


def _by_depth(choices: Sequence[SecondChoice]) -> list[_Row]:
    """How often the second choice is right at the first mistake of a chain of best candidates, by that mistake's depth.
    Every token of the output is the root of a chain."""
    right = [[choice.is_right for choice in choices if choice.most_depth >= depth] for depth in _DEPTHS]
    return [
        ("depth", [str(depth) for depth in _DEPTHS]),
        ("second right", [_mean(at_depth) for at_depth in right]),
        ("mistakes", [str(len(at_depth)) for at_depth in right]),
    ]


def _mean(values: Sequence[float]) -> str:
    return percent(sum(values) / len(values) if values else None)
