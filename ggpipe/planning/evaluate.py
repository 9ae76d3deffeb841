"""Short simulations that compare candidates for a plan."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.recording import Recording
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.core.layout import Layout
from ggpipe.planning.placements import Arrangement, FurtherDraft
from ggpipe.sim.arrivals import Traffic
from ggpipe.sim.simulation_spec import SimulationSpec, SyntheticText
from ggpipe.sim.simulator import SimulationResult, Sizes
from ggpipe.sim.virtual_cluster import VirtualPlacement
from ggpipe.stats.traffic import traffic_summary

_SHORT, _LONG, _TEXTS = 64, 128, 2
_EACH = 2  # requests of each of several users, in careful simulations


@dataclass(frozen=True, slots=True)
class Candidate:
    """An arrangement with the number of layers of each stage."""

    arrangement: Arrangement
    counts: tuple[int, ...]

    @property
    def n_ranks(self) -> int:
        """Number of the target's ranks that have layers."""
        return sum(size for size, count in zip(self.arrangement.sizes, self.counts, strict=True) if count)

    @property
    def has_groups(self) -> bool:
        """Whether a stage with layers has several ranks."""
        return any(size > 1 and count for size, count in zip(self.arrangement.sizes, self.counts, strict=True))

    @property
    def has_groups_of_machines(self) -> bool:
        """Whether a stage with layers has ranks on several machines."""
        arrangement = self.arrangement
        return any(
            count and len({arrangement.target[i].node for i in stage}) > 1
            for stage, count in zip(arrangement.stages, self.counts, strict=True)
        )

    @property
    def with_halves(self) -> Candidate:
        """The candidate with sums sent as 16-bit floats."""
        return replace(self, arrangement=replace(self.arrangement, tensor_wire="f16"))


@dataclass(frozen=True, slots=True)
class Evaluation:
    """The result of simulating a candidate."""

    tokens_per_s: float
    """Decode speed after the first token. With several users, throughput of all together, including prompts."""
    ttft_s: float
    """Mean time to first token."""
    busy_s: tuple[float, ...]
    """Decode time of the first rank of each stage with layers, in order."""


def drafts_of(
    candidate: Candidate, draft: ModelShape | None, further: Sequence[FurtherDraft]
) -> tuple[ModelShape, ...]:
    """The draft models of a candidate: none, or the first one and all further ones."""
    if draft is None or not candidate.arrangement.drafts:
        return ()
    return (draft, *(own.shape for own in further))


def placed(
    spec: ClusterSpec, candidate: Candidate, drafts: Sequence[ModelShape]
) -> tuple[ClusterSpec, VirtualPlacement]:
    """See `Arrangement.placed`. `drafts`: those of `drafts_of`."""
    layers = [draft.n_layer for draft in drafts]
    return candidate.arrangement.placed(spec, candidate.counts, layers[0] if layers else None, layers[1:])


class Evaluator:
    """Simulates candidates, each only once with the same settings."""

    def __init__(
        self,
        spec: ClusterSpec,
        target: ModelShape,
        draft: ModelShape | None,
        tokens: SyntheticText | Recording,
        sizes: Sizes,
        on_run: Callable[[int], None] = lambda n: None,
        users: int | None = None,
        further: Sequence[FurtherDraft] = (),
    ) -> None:
        """`users`: how many share the pipeline, see `Traffic`; None: one request at a time. `on_run` is called with the
        number of simulations so far after each evaluation that simulates.
        """
        self._spec = spec
        self._target = target
        self._draft = draft
        self._further = further
        self._tokens = tokens
        self._sizes = replace(sizes, n_ctx=0)
        self._on_run = on_run
        self._users = users
        self._known: dict[tuple[Candidate, SpeculationConfig, bool], Evaluation] = {}
        self.n_runs = 0
        """Simulations so far."""

    def evaluate(
        self, candidate: Candidate, mode: Mode, speculation: SpeculationConfig | None = None, *, carefully: bool = False
    ) -> Evaluation:
        """Simulate a candidate. Without a draft, the mode is iterative.

        `carefully`: with several, longer outputs. Small differences change the order of runs, so two equally good plans
        can differ by 3 % on one output.
        """
        if not candidate.arrangement.drafts:
            mode = "iterative"
        speculation = replace(speculation or SpeculationConfig(), mode=mode)
        if mode == "iterative":
            speculation = SpeculationConfig(mode="iterative")
        key = candidate, speculation, carefully
        if key not in self._known:
            self._known[key] = self._run(*key)
            self._on_run(self.n_runs)
        return self._known[key]

    def _run(self, candidate: Candidate, speculation: SpeculationConfig, carefully: bool) -> Evaluation:
        drafts = drafts_of(candidate, self._draft, self._further)
        spec, placement = placed(self._spec, candidate, drafts)
        n_text, n_texts = (_LONG, _TEXTS) if carefully and speculation.mode != "iterative" else (_SHORT, 1)
        traffic = None
        if self._users is not None:
            traffic, n_texts = Traffic(users=self._users, n_total=self._users * (_EACH if carefully else 1)), 1
        served: list[SimulationResult] = []
        for tokens in _some(self._tokens, n_texts):
            setup = SimulationSpec(
                cluster=spec,
                placement=placement,
                target=self._target,
                drafts=drafts,
                speculation=speculation,
                tokens=tokens,
                n_predict=n_text,
                sizes=self._sizes,
                traffic=traffic,
            )
            served += setup.serve(speculation.mode)
        self.n_runs += len(served)
        firsts = [stage.ranks[0] for stage in (placement.layout or Layout(())).stages]
        return _evaluation(served, traffic is not None, firsts)


def _some(tokens: SyntheticText | Recording, n: int) -> list[SyntheticText | Recording]:
    """The first `n` outputs."""
    if isinstance(tokens, Recording):
        return [replace(tokens, prompts=tokens.prompts[:n])]
    return [replace(tokens, seed=tokens.seed + i) for i in range(n)]


def _evaluation(served: Sequence[SimulationResult], is_shared: bool, firsts: Sequence[int]) -> Evaluation:
    requests = [stats for one in served for stats in one.requests]
    n_tokens = sum(stats.n_generated - 1 for stats in requests)
    decode_s = sum(stats.decode_s for stats in requests)
    tokens_per_s = n_tokens / decode_s if decode_s > 0 else 0.0
    if is_shared:
        tokens_per_s = traffic_summary(served[0].requests, served[0].ranks).total_tokens_per_s or 0.0
    busy_s = [tuple(one.ranks[rank].compute_s for rank in firsts) for one in served]
    return Evaluation(
        tokens_per_s,
        statistics.fmean(stats.ttft_s or 0.0 for stats in requests),
        tuple(map(sum, zip(*busy_s, strict=True))),
    )


def tokens_of_users(users: int, tokens: SyntheticText | Recording) -> int:
    """Tokens of context that a simulation of this many users needs."""
    n_prompt = (
        max(len(recorded.prompt) for recorded in tokens.prompts) if isinstance(tokens, Recording) else tokens.n_prompt
    )
    return users * (n_prompt + _LONG)
