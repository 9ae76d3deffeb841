"""Statistics of ranks and requests. All times are wall-clock seconds.

Lists grow with a request's tokens and runs, by about 2.4 kB a token: an engine should not keep those of ended requests.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import NamedTuple

from ggpipe.config.model import TARGET
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.messages import RunRecord, Span
from ggpipe.core.request import Counters, Finish


@dataclass(slots=True, kw_only=True)
class RankStats:
    """One rank: its layers and threads, its loading, and its work since the start of the session or of a request."""

    rank: int
    model: int = TARGET
    """Id of the model to which these statistics belong. A process may hold drafts in addition to target layers."""
    drafter: str = ""
    """Kind of the drafter that the model belongs to, as in `core.drafters.registry`; nothing for the target."""
    host: str = ""
    layers: tuple[int, int] = (0, 0)
    """First layer, and one past the last; a rank with an empty range only coordinates."""
    threads: tuple[int, int] = (0, 0)
    loaded_bytes: int = 0
    load_bytes: int = 0
    load_s: float = 0.0
    resident_bytes: int = 0
    cpu_s: float = 0.0
    """CPU time of the whole process since its start, at the last `Session.measure`."""
    clock_offset_s: float = 0.0
    """The head's clock minus this rank's."""
    runs: int = 0
    compute_s: float = 0.0
    """Time in libllama's decode."""
    busy_s: float = 0.0
    """Time on runs: decode, KV operations, taking and packing activations, picking logits."""
    sent_bytes: int = 0
    """Bytes sent to the next rank, headers included."""

    @property
    def draft(self) -> bool:
        """Whether these are the statistics of work for a draft model."""
        return self.model != TARGET

    @property
    def loaded(self) -> float:
        """Share of the weights that is loaded, 0 to 1."""
        return min(self.loaded_bytes / self.load_bytes, 1.0) if self.load_bytes else 0.0

    def unused(self) -> RankStats:
        """The same rank before any work."""
        return RankStats(
            rank=self.rank,
            model=self.model,
            drafter=self.drafter,
            host=self.host,
            layers=self.layers,
            threads=self.threads,
        )

    def add(self, span: Span, share: float = 1.0) -> None:
        """Add a run's span, or a share of it from 0 to 1, to the totals."""
        self.runs += 1
        self.compute_s += span.compute_s * share
        self.busy_s += span.busy_s * share
        self.sent_bytes += round(span.sent_bytes * share)


@dataclass(slots=True, kw_only=True)
class RequestStats:
    """One request, from arrival to end. Times are clock readings in seconds; None: not yet."""

    n_prompt: int = 0
    arrived: float = 0.0
    started: float | None = None
    """When its first tokens entered the pipeline."""
    token_times: list[float] = field(default_factory=list)
    """When each generated token was sampled."""
    ended: float | None = None
    finish: Finish | None = None
    """Why it ended."""
    seed: int = 0
    ranks: list[RankStats] = field(default_factory=list)
    """Each rank's work since the request arrived."""
    runs: list[RunRecord] = field(default_factory=list)
    """Runs of the target, in the order in which they ended."""
    draft_runs: list[RunRecord] = field(default_factory=list)
    """Runs of draft models, in the order in which they ended."""
    drafted_by: list[tuple[str, ...]] = field(default_factory=list)
    """For each generated token: as `Token.drafters`."""
    speculation: SpeculationConfig = field(default_factory=lambda: SpeculationConfig(mode="iterative"))
    counters: Counters = field(default_factory=Counters)
    n_in_flight: int = 0
    """Runs in the pipeline now, excluding cancelled ones."""

    @property
    def n_generated(self) -> int:
        """Tokens generated so far."""
        return len(self.token_times)

    @property
    def drafted(self) -> list[bool]:
        """For each generated token: whether it was in the pipeline as a draft token before it was sampled."""
        return list(map(bool, self.drafted_by))

    @property
    def ttft_s(self) -> float | None:
        """Time to first token: request in to first token out, prompt included."""
        return self.token_times[0] - self.arrived if self.token_times else None

    @property
    def queue_s(self) -> float | None:
        """Queueing time: from arrival until its first tokens entered the pipeline."""
        return self.started - self.arrived if self.started is not None else None

    @property
    def prefill_tps(self) -> float | None:
        """Prompt tokens per second, excluding those from the prefix cache."""
        return (self.n_prompt - self.counters.cached_tokens) / self.ttft_s if self.ttft_s else None

    @property
    def itl_s(self) -> list[float]:
        """Inter-token latencies in seconds, one fewer than tokens."""
        return [b - a for a, b in zip(self.token_times, self.token_times[1:], strict=False)]

    @property
    def decode_s(self) -> float:
        """Seconds from the first token to the last."""
        return self.token_times[-1] - self.token_times[0] if self.token_times else 0.0

    @property
    def decode_tps(self) -> float | None:
        """Decode speed: tokens per second after the first."""
        return (self.n_generated - 1) / self.decode_s if self.decode_s > 0 else None

    def elapsed_s(self, now: float) -> float:
        """Seconds from arrival to end, or to `now` while it runs."""
        return (self.ended if self.ended is not None else now) - self.arrived


def percentile(values: Iterable[float], q: float) -> float | None:
    """The q-quantile (0 to 1) by the nearest-rank method; None without values."""
    ordered = sorted(values)
    return ordered[max(math.ceil(q * len(ordered)) - 1, 0)] if ordered else None


class Spread(NamedTuple):
    """Lower quartile, median, upper quartile."""

    low: float
    middle: float
    high: float


def quartiles(values: Iterable[float]) -> Spread | None:
    """The quartiles of repeated measurements; None without values."""
    known = sorted(values)
    if len(known) < 2:
        return Spread(known[0], known[0], known[0]) if known else None
    return Spread(*statistics.quantiles(known, n=4, method="inclusive"))


def rate(n: int, seconds: float) -> float:
    """`n` per second; 0 if that is not a finite number."""
    found = n / seconds if seconds > 0 else 0.0
    return found if math.isfinite(found) else 0.0
