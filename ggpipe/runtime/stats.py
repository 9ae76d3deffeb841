"""What is measured while ranks work. All times are wall-clock seconds."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from ggpipe.config import SpeculationConfig
from ggpipe.core.events import Counters
from ggpipe.core.messages import RunRecord, Span


@dataclass(slots=True)
class RankStats:
    """One rank: who it is, how far its loading is, what it did since the session's start (or the request's)."""

    rank: int
    draft: bool = False
    """What it does for the draft model, which may be in the same process as its part of the target."""
    host: str = ""
    layers: tuple[int, int] = (0, 0)
    """First and one past the last; an empty range only coordinates."""
    threads: tuple[int, int] = (0, 0)
    loaded_bytes: int = 0
    load_bytes: int = 0
    load_s: float = 0.0
    resident_bytes: int = 0
    cpu_s: float = 0.0
    """CPU time of the whole process since its start, when `Session.measure` asked last."""
    clock_offset_s: float = 0.0
    """What to add to this rank's clock to get the head's."""
    runs: int = 0
    compute_s: float = 0.0
    """In libllama's decode."""
    busy_s: float = 0.0
    """On runs: decode, KV operations, taking and packing activations, picking logits."""
    sent_bytes: int = 0
    """Sent on to the next rank, headers included."""

    @property
    def loaded(self) -> float:
        """Share of the loading that is done, 0 to 1."""
        return min(self.loaded_bytes / self.load_bytes, 1.0) if self.load_bytes else 0.0

    def add(self, span: Span) -> None:
        """Count a run in."""
        self.runs += 1
        self.compute_s += span.compute_s
        self.busy_s += span.busy_s
        self.sent_bytes += span.sent_bytes


@dataclass(slots=True)
class RequestStats:
    """One request, from arrival to end. Clock readings in seconds; None until it happened."""

    n_prompt: int = 0
    arrived: float = 0.0
    token_times: list[float] = field(default_factory=list)
    """When each generated token was drawn."""
    ended: float | None = None
    finish: str = ""
    seed: int = 0
    ranks: list[RankStats] = field(default_factory=list)
    """Work since the request arrived."""
    runs: list[RunRecord] = field(default_factory=list)
    """In the order in which they ended."""
    draft_runs: list[RunRecord] = field(default_factory=list)
    """Those of the draft model."""
    guessed: list[bool] = field(default_factory=list)
    """For each generated token: it was in the pipeline as a guess before it was drawn."""
    speculation: SpeculationConfig = field(default_factory=lambda: SpeculationConfig(mode="iterative"))
    counters: Counters = field(default_factory=Counters)
    n_in_flight: int = 0
    """Runs in the pipeline now, cancelled ones not counted."""

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_times)

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: request in to first token out, prompt included."""
        return self.token_times[0] - self.arrived if self.token_times else None

    @property
    def prefill_tps(self) -> float | None:
        """Prompt tokens a second."""
        return self.n_prompt / self.ttft_s if self.ttft_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies, one fewer than tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def decode_s(self) -> float:
        """First token to last."""
        return self.token_times[-1] - self.token_times[0] if self.token_times else 0.0

    @property
    def decode_tps(self) -> float | None:
        """Tokens a second after the first."""
        return (self.n_generated - 1) / self.decode_s if self.decode_s > 0 else None

    def elapsed_s(self, now: float) -> float:
        """Arrival to end, or to now while it runs."""
        return (self.ended if self.ended is not None else now) - self.arrived


def percentile(values: Iterable[float], q: float) -> float | None:
    """The q-quantile (0 to 1) by the nearest rank; None of nothing."""
    ordered = sorted(values)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)] if ordered else None


class Spread(NamedTuple):
    """Lower quartile, median, upper quartile."""

    low: float
    middle: float
    high: float


def quartiles(values: Iterable[float]) -> Spread | None:
    """The spread of what was measured several times; None of nothing."""
    known = sorted(values)
    if len(known) < 2:
        return Spread(known[0], known[0], known[0]) if known else None
    return Spread(*statistics.quantiles(known, n=4, method="inclusive"))


@dataclass(frozen=True, slots=True)
class Measured:
    """A request of a bench."""

    mode: str
    """`iterative`, `speculative`, `async`, or `single`: the whole model in one process."""
    round: int
    prompt: str
    """Its name."""
    tokens: tuple[int, ...]
    stats: RequestStats
    ranks: Sequence[RankStats]
    """Who worked on it."""
