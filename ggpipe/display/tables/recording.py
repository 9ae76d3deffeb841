"""Shows a recording: agreement by prompt and by confidence."""

from __future__ import annotations

from collections.abc import Sequence

from ggpipe.cluster.recording import Recording
from ggpipe.display.format import percent

_BINS = 5


def recording_text(recording: Recording) -> str:
    """A line per prompt, then agreement by confidence."""
    width = max(len(name) for name in ("confidence", *(recorded.name for recorded in recording.prompts)))
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
    for title, cells in (
        ("confidence", [f"{i * step}-{(i + 1) * step} %" for i in range(_BINS)]),
        ("agreement", [_mean(agrees) for agrees in bins]),
        ("tokens", [f"{len(agrees)}" for agrees in bins]),
    ):
        lines.append(" ".join([f"{title:{width}}", *(f"{cell:>8}" for cell in cells)]))
    return "".join(f"{line}\n" for line in lines)


def _mean(values: Sequence[float]) -> str:
    return percent(sum(values) / len(values) if values else None)
