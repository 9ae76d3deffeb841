"""Short simulations, to tell plans apart."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ggpipe.config import Mode, SpeculationConfig
from ggpipe.runtime.stats import RequestStats
from ggpipe.sim.arrangements import Arrangement
from ggpipe.sim.recording import Recording
from ggpipe.sim.setup import MadeUp, Setup
from ggpipe.sim.shapes import ModelShape
from ggpipe.sim.simulator import Sizes
from ggpipe.sim.spec import ClusterSpec

_TAKES = 2  # of a recording


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arrangement with layers at each of its places."""

    arrangement: Arrangement
    counts: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a simulation says."""

    tokens_per_s: float
    """After the first token."""
    ttft_s: float
    busy_s: tuple[float, ...]
    """In decodes, of each of the target's ranks that have layers, in order."""


class Judge:
    """Simulates each question once."""

    def __init__(
        self,
        spec: ClusterSpec,
        target: ModelShape,
        draft: ModelShape | None,
        tokens: MadeUp | Recording,
        sizes: Sizes,
        n_text: int,
        on_run: Callable[[int], None] = lambda n: None,
    ) -> None:
        """`n_text`: tokens that a simulation generates. `on_run` is called after each, with their number so far."""
        self._spec = spec
        self._target = target
        self._draft = draft
        if isinstance(tokens, Recording):
            tokens = replace(tokens, takes=tokens.takes[:_TAKES])
        self._tokens = tokens
        self._sizes = replace(sizes, n_ctx=0)
        self._n_text = n_text
        self._on_run = on_run
        self._known: dict[tuple[Candidate, SpeculationConfig, int], Verdict] = {}
        self.n_runs = 0
        """Simulations so far."""

    def ask(
        self, candidate: Candidate, mode: Mode, speculation: SpeculationConfig | None = None, n_text: int | None = None
    ) -> Verdict:
        """How fast it is. Without a draft the mode is iterative."""
        if not candidate.arrangement.drafts:
            mode = "iterative"
        speculation = replace(speculation or SpeculationConfig(), mode=mode)
        if mode == "iterative":
            speculation = SpeculationConfig("iterative")
        key = candidate, speculation, n_text or self._n_text
        if key not in self._known:
            self._known[key] = self._run(*key)
            self.n_runs += 1
            self._on_run(self.n_runs)
        return self._known[key]

    def _run(self, candidate: Candidate, speculation: SpeculationConfig, n_text: int) -> Verdict:
        draft = self._draft if candidate.arrangement.drafts else None
        spec, placement = candidate.arrangement.placed(self._spec, candidate.counts, draft.n_layer if draft else None)
        setup = Setup(spec, placement, self._target, draft, speculation, self._tokens, n_text, self._sizes)
        return _verdict(setup.run(speculation.mode))


def _verdict(requests: Sequence[RequestStats]) -> Verdict:
    n_tokens = sum(stats.n_generated - 1 for stats in requests)
    decode_s = sum(stats.decode_s for stats in requests)
    busy_s = [
        tuple(rank.compute_s for rank in stats.ranks if not rank.draft and rank.layers[0] < rank.layers[1])
        for stats in requests
    ]
    return Verdict(
        n_tokens / decode_s if decode_s > 0 else 0.0,
        statistics.fmean(stats.ttft_s or 0.0 for stats in requests),
        tuple(map(sum, zip(*busy_s, strict=True))),
    )
