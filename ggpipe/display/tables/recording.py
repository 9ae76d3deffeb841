"""Show a recording in a few lines: agreement by prompt and by confidence."""

from __future__ import annotations

from collections.abc import Sequence

from ggpipe.cluster.recording import Recording
from ggpipe.display.format import percent

_BINS = 5


def recording_text(recording: Recording) -> str:
    """A line for each prompt, then agreement by confidence."""
    width = max(len(name) for name in ("confidence", *(take.name for take in recording.takes)))
    lines = [
        f"{take.name:{width}}  {len(take.text)} tokens  agreement {_mean(take.agrees)}  "
        f"confidence {_mean(take.confidence)}"
        for take in recording.takes
    ]
    bins: list[list[bool]] = [[] for _ in range(_BINS)]
    for take in recording.takes:
        for agrees, confidence in zip(take.agrees, take.confidence, strict=True):
            bins[min(int(confidence * _BINS), _BINS - 1)].append(agrees)
    step = 100 // _BINS
    for title, cells in (
        ("confidence", [f"{i * step}-{(i + 1) * step} %" for i in range(_BINS)]),
        ("agreement", [_mean(agrees) for agrees in bins]),
        ("tokens", [f"{len(agrees)}" for agrees in bins]),
    ):
        lines.append(" ".join([f"{title:{width}}", *(f"{cell:>8}" for cell in cells)]))
    return "".join(f"{line}\n" for line in lines)


def _mean(values: Sequence[float]) -> str:
    return percent(sum(values) / len(values)) if values else "-"
