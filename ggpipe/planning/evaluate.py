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
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SimulationSpec, SyntheticText
from ggpipe.sim.simulator import SimulationResult
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
    first_tokens_per_s: float
    """`tokens_per_s` of the first output alone."""
    is_whole: bool
    """False: the simulation was given up after the first output."""


_Key = tuple[Candidate, SpeculationConfig, bool]


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
        streamed_bytes: Callable[[Candidate], tuple[float, ...]] = lambda _: (),
    ) -> None:
        """`users`: how many share the pipeline, see `Traffic`; None: one request at a time. `on_run` is called with the
        number of simulations so far after each evaluation that simulates. `streamed_bytes`: of a candidate's ranks, see
        `VirtualPlacement`.
        """
        self._spec = spec
        self._target = target
        self._draft = draft
        self._further = further
        self._tokens = tokens
        self._sizes = replace(sizes, n_ctx=0)
        self._on_run = on_run
        self._users = users
        self._streamed_bytes = streamed_bytes
        self._known: dict[_Key, Evaluation] = {}
        self._given_up: dict[_Key, Evaluation] = {}
        """Of the first output alone."""
        self.n_runs = 0
        """Simulations so far."""

    def evaluate(
        self,
        candidate: Candidate,
        mode: Mode,
        speculation: SpeculationConfig | None = None,
        *,
        carefully: bool = False,
        least_tokens_per_s: float = 0.0,
    ) -> Evaluation:
        """Simulate a candidate. Without a draft, the mode is iterative.

        `carefully`: with several, longer outputs. Small differences change the order of runs, so two equally good plans
        can differ by 3 % on one output. A candidate that is slower on the first output than `least_tokens_per_s` is
        given up, and the result is not whole.
        """
        if not candidate.arrangement.drafts:
            mode = "iterative"
        speculation = replace(speculation or SpeculationConfig(), mode=mode)
        if mode == "iterative":
            speculation = SpeculationConfig(mode="iterative")
        key = candidate, speculation, carefully
        known = self._known.get(key) or self._given_up.get(key)
        if known is None or (key not in self._known and known.first_tokens_per_s >= least_tokens_per_s):
            known = self._run(*key, least_tokens_per_s)
            (self._known if known.is_whole else self._given_up)[key] = known
            self._on_run(self.n_runs)
        return known

    def _run(
        self, candidate: Candidate, speculation: SpeculationConfig, carefully: bool, least_tokens_per_s: float
    ) -> Evaluation:
        drafts = drafts_of(candidate, self._draft, self._further)
        spec, placement = placed(self._spec, candidate, drafts)
        placement = replace(placement, streamed_bytes=self._streamed_bytes(candidate))
        n_text, n_texts = (_LONG, _TEXTS) if carefully and speculation.mode != "iterative" else (_SHORT, 1)
        traffic = None
        if self._users is not None:
            traffic, n_texts = Traffic(users=self._users, n_total=self._users * (_EACH if carefully else 1)), 1
        firsts = [stage.ranks[0] for stage in (placement.layout or Layout(())).stages]
        outputs = _some(self._tokens, n_texts)
        served: list[SimulationResult] = []
        for tokens in outputs:
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
            self.n_runs += 1
            if _tokens_per_s(served[:1], traffic is not None) < least_tokens_per_s:
                break
        return _evaluation(served, traffic is not None, firsts, len(served) == len(outputs))


def _some(tokens: SyntheticText | Recording, n: int) -> list[SyntheticText | Recording]:
    """The first `n` outputs."""
    if isinstance(tokens, Recording):
        return [replace(tokens, prompts=(prompt,)) for prompt in tokens.prompts[:n]]
    return [replace(tokens, seed=tokens.seed + i) for i in range(n)]


def _evaluation(
    served: Sequence[SimulationResult], is_shared: bool, firsts: Sequence[int], is_whole: bool
) -> Evaluation:
    busy_s = [tuple(one.ranks[rank].compute_s for rank in firsts) for one in served]
    return Evaluation(
        _tokens_per_s(served, is_shared),
        statistics.fmean(stats.ttft_s or 0.0 for one in served for stats in one.requests),
        tuple(map(sum, zip(*busy_s, strict=True))),
        _tokens_per_s(served[:1], is_shared),
        is_whole,
    )


def _tokens_per_s(served: Sequence[SimulationResult], is_shared: bool) -> float:
    if is_shared:
        return traffic_summary(served[0].requests, served[0].ranks).total_tokens_per_s or 0.0
    requests = [stats for one in served for stats in one.requests]
    decode_s = sum(stats.decode_s for stats in requests)
    return sum(stats.n_generated - 1 for stats in requests) / decode_s if decode_s > 0 else 0.0


def tokens_of_users(users: int, tokens: SyntheticText | Recording) -> int:
    """Tokens of context that a simulation of this many users needs."""
    n_prompt = (
        max(len(recorded.prompt) for recorded in tokens.prompts) if isinstance(tokens, Recording) else tokens.n_prompt
    )
    return users * (n_prompt + _LONG)
