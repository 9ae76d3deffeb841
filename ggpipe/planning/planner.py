"""Searches for the fastest way to run a model on a cluster, and for the best settings, with the simulator.

1. `placements` lists the machines that can hold ranks, in which order, and where the draft can run. `groups` lists
   which of them can compute a stage together. `splits` finds the splits that fit into memory and that no other beats
   both in the time of all stages and in that of the slowest.
2. A formula in `candidates` selects the most promising ones, and short simulations in `evaluate` the best of these.
3. Layers are moved between its ranks as long as that helps. If there are only a few splits, each is simulated.
4. Speculation settings are tried one at a time, and 16-bit sums if a group has several machines.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.recording import Recording
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.planning.candidates import CandidateSearch, Constraints, Estimate, ranked
from ggpipe.planning.evaluate import Candidate, Evaluation, Evaluator, drafts_of, placed
from ggpipe.planning.placements import Arrangement, FurtherDraft
from ggpipe.planning.plan import DraftRate, Plan, Prediction, RankPlan
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SyntheticText
from ggpipe.sim.virtual_cluster import VirtualPlacement

_WORTH = 1.03  # another setting than the default, or another placement, has to be this much faster
_NOISE = 1.04  # noise of careful simulations: an even split that is this much slower may be as good
_HOPELESS = 0.97  # what misses the wanted speed by this much on the first output is not tried on the others
_WIRE_WORTH = 1.05  # 16-bit sums, which are rounded, have to be this much faster
_FEW_WIRES = 2  # other groups that are tried with 16-bit sums
_FEW_SPLITS = 24
_FINALISTS = 4  # candidates that are evaluated carefully
_MOST_SHIFTS = 3  # layers that move at once
_MODES: tuple[Mode, ...] = ("iterative", "speculative", "async")
_FLAGS: dict[Mode, tuple[tuple[str, tuple[float, ...]], ...]] = {
    "iterative": (),
    "speculative": (("n_draft", (1, 2, 3, 4, 6)), ("p_accept", (0.2, 0.4)), ("n_parallel", (2,))),
    "async": (("n_draft", (2, 4, 8)), ("p_accept", (0.2, 0.4))),
}


@dataclass(frozen=True, kw_only=True)
class PlanRequest:
    """What is planned."""

    constraints: Constraints
    tokens: SyntheticText | Recording
    sizes: Sizes = field(default_factory=Sizes)
    mode: Mode | None = None
    """The mode; None: the fastest."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    """The initial speculation settings."""
    users: int | None = None
    """Number of users who share the pipeline; speeds are those of all users together. None: one request at a time."""
    tunes: bool = True
    """Search for better speculation settings."""
    effort: float = 1.0
    """Number of simulations relative to the default."""
    further: tuple[FurtherDraft, ...] = ()
    """Draft models in addition to the first one, wherever that one is used."""


def make_plan(
    spec: ClusterSpec,
    target: ModelShape,
    draft: ModelShape | None,
    request: PlanRequest,
    on_run: Callable[[int, int], None] = lambda done, total: None,
) -> Plan:
    """Find the best plan. `on_run` is called after each simulation with the number done and the estimated total.

    Raises UsageError if the models do not fit into memory.
    """
    return _Search(spec, target, draft, request, on_run).plan()


class _Search:
    def __init__(
        self,
        spec: ClusterSpec,
        target: ModelShape,
        draft: ModelShape | None,
        request: PlanRequest,
        on_run: Callable[[int, int], None],
    ) -> None:
        self._spec = spec
        self._draft = draft if request.mode != "iterative" or request.constraints.must_draft else None
        self._target = target
        self._request = request
        must_draft = request.constraints.must_draft or request.mode in ("speculative", "async")
        self._candidates = CandidateSearch(
            spec, target, self._draft, replace(request.constraints, must_draft=must_draft), request.further
        )
        self._evaluator = Evaluator(
            spec,
            target,
            self._draft,
            request.tokens,
            request.sizes,
            self._count,
            request.users,
            request.further,
            self._candidates.streamed_bytes,
        )
        self._on_run = on_run
        self._expected = 0
        self._simulated: dict[Mode, dict[Candidate, float]] = {}
        """Speeds of candidates in short simulations, in tokens a second."""
        self._agreement = request.tokens.agreement
        self._users = request.users or 1

    def plan(self) -> Plan:
        estimates = self._candidates.all()
        modes: tuple[Mode, ...] = (self._request.mode,) if self._request.mode else _MODES
        self._expected = 2 * self._most_runs(estimates) if "async" in modes else 0
        found: dict[Mode, tuple[Candidate, Prediction]] = {}
        for mode in modes:
            candidate = self._best_candidate(estimates, mode)
            if candidate is not None:
                candidate, speculation = self._with_best_wire(candidate, mode, self._tuned(candidate, mode))
                found[mode] = candidate, self._predict(candidate, mode, speculation)
        best = max(found, key=lambda mode: self._worth(*found[mode]))
        candidate, prediction = found[best]
        predictions = {best: prediction}
        elsewhere: dict[Mode, tuple[VirtualPlacement, Prediction]] = {}
        for mode, (other, own) in found.items():
            if mode == best:
                continue
            if candidate.arrangement.drafts or mode == "iterative":
                predictions[mode] = self._predict(candidate, mode, own.speculation)
            if mode not in predictions or own.tokens_per_s > _WORTH * predictions[mode].tokens_per_s:
                elsewhere[mode] = self._placement(other), own
        drafts = candidate.arrangement.drafts  # a plan with a rank for the draft uses it
        own_modes = [mode for mode in predictions if drafts == (mode != "iterative")] or [best]
        prediction = max((predictions[mode] for mode in own_modes), key=lambda one: one.tokens_per_s)
        places = candidate.arrangement.places(candidate.counts)
        ranks = self._ranks(candidate)
        cluster, placement = self._placed(candidate)
        return Plan(
            cluster=cluster,
            placement=placement,
            places=places,
            ranks=ranks,
            best=prediction,
            predictions=predictions,
            elsewhere=elsewhere,
            alternative=self._alternative(estimates, modes, candidate),
            with_floats=self._with_floats(candidate, prediction),
            n_simulations=self._evaluator.n_runs,
            users=self._request.users,
            draft_rate=self._draft_rate([candidate, *(other for other, _ in found.values())]),
        )

    def _draft_rate(self, candidates: Sequence[Candidate]) -> DraftRate | None:
        """The draft's rate in the first candidate that has a draft."""
        for candidate in candidates:
            estimate = self._candidates.estimate(candidate)
            if candidate.arrangement.drafts and estimate is not None:
                arrangement = candidate.arrangement
                return DraftRate(
                    node=self._spec.nodes[(arrangement.draft or arrangement.target)[0].node].name,
                    inside=not arrangement.draft,
                    token_s=estimate.draft_s,
                    stage_s=estimate.slowest_s[0],
                )
        return None

    def _count(self, n_runs: int) -> None:
        self._on_run(n_runs, max(self._expected, n_runs))

    def _worth(self, candidate: Candidate, prediction: Prediction) -> float:
        """The candidate's speed, reduced slightly per rank so that fewer ranks win if speeds are about equal."""
        n_ranks = len(self._placement(candidate).node_of)
        return prediction.tokens_per_s * (1 - 0.001 * n_ranks)

    def _best_candidate(self, estimates: Sequence[Estimate], mode: Mode) -> Candidate | None:
        drafts = mode != "iterative"
        own = [e for e in estimates if e.candidate.arrangement.drafts == drafts]
        if not drafts and not own:  # every candidate has a draft
            own = list(estimates)
        if not own:
            return None
        if mode == "speculative" or (mode == "iterative" and self._request.users is None):
            return self._steady(own, mode)
        most = self._most_runs(own)
        n_first = max(round(most * 0.5), 2)
        kinds = [kind for has in (False, True) if (kind := [e for e in own if e.candidate.has_groups == has])]
        n_each = -(-n_first // len(kinds))
        first = [e for kind in kinds for e in ranked(kind, mode, self._agreement, n_each, users=self._users)]
        speeds = {e.candidate: self._speed(e.candidate, mode) for e in first}
        self._simulated[mode] = dict(speeds)
        good = list(dict.fromkeys(c.arrangement for c in sorted(speeds, key=lambda c: -speeds[c])))[:2]
        known: set[Arrangement] = set()
        for arrangement in good:
            every = self._all_splits(next(c for c in speeds if c.arrangement == arrangement), mode)
            speeds |= every
            known |= {arrangement} if every else set()
        last = sorted(speeds, key=lambda c: -speeds[c])[: max(round(_FINALISTS * self._request.effort), 2)]
        best = self._fastest(last, mode)
        if best.arrangement in known:
            return best
        even = self._most_even([e.candidate for e in own if e.candidate.arrangement == best.arrangement])
        is_as_good = self._speed(even, mode, carefully=True) * _NOISE >= self._speed(best, mode, carefully=True)
        return self._climbed(even if is_as_good else best, mode, max(round(most * 0.15), 2))

    def _fastest(self, candidates: Sequence[Candidate], mode: Mode) -> Candidate:
        """The fastest of these candidates in careful simulations."""
        best, fastest = candidates[0], self._evaluate(candidates[0], mode)
        for other in candidates[1:]:
            if own := self._better(other, mode, fastest):
                best, fastest = other, own
        return best

    def _most_even(self, candidates: Sequence[Candidate]) -> Candidate:
        """The candidate with the fastest slowest stage."""
        estimates = [e for candidate in candidates if (e := self._candidates.estimate(candidate)) is not None]
        return min(estimates, key=lambda e: e.slowest_s[0]).candidate

    def _steady(self, estimates: Sequence[Estimate], mode: Mode) -> Candidate:
        """The best candidate for modes in which ranks wait for one another, so that stage times simply add up.

        No simulation is needed. Since many candidates are equally fast, fewer ranks are preferred, and an even split,
        which is better for prompts and memory.
        """
        times_s = {e: e.token_s(mode, self._agreement, self._users) for e in estimates}
        good = [e for e in estimates if times_s[e] <= _WORTH * min(times_s.values())]
        in_order = self._request.constraints.in_order
        n_used = {e: 0 if in_order else e.candidate.n_ranks for e in good}
        return min(good, key=lambda e: (n_used[e], e.slowest_s[0])).candidate

    def _most_runs(self, estimates: Sequence[Estimate]) -> int:
        """Maximum number of simulations in the search for one mode. With more ranks, each takes longer."""
        n_ranks = max(e.candidate.n_ranks for e in estimates)
        return max(round(self._request.effort * min(max(400 / n_ranks, 24), 48)), 2)

    def _alternative(
        self, estimates: Sequence[Estimate], modes: Sequence[Mode], best: Candidate
    ) -> tuple[VirtualPlacement, Prediction] | None:
        """The best candidate with groups if `best` has none, or without if it has some, in its fastest mode: among
        those that were simulated, otherwise by its estimate."""
        found = []
        for mode in modes:
            drafts = mode != "iterative"
            others = [e for e in estimates if e.candidate.has_groups != best.has_groups]
            own = [e for e in others if e.candidate.arrangement.drafts == drafts] or (others if not drafts else [])
            if own:
                speeds = self._simulated.get(mode, {})
                simulated = [c for c in speeds if c.has_groups != best.has_groups]
                candidate = max(simulated, key=speeds.__getitem__, default=None) or self._steady(own, mode)
                found.append((candidate, self._predict(candidate, mode, self._request.speculation)))
        if not found:
            return None
        candidate, prediction = max(found, key=lambda one: one[1].tokens_per_s)
        return self._placement(candidate), prediction

    def _speed(self, candidate: Candidate, mode: Mode, *, carefully: bool = False) -> float:
        return self._evaluator.evaluate(candidate, mode, self._request.speculation, carefully=carefully).tokens_per_s

    def _all_splits(self, candidate: Candidate, mode: Mode) -> dict[Candidate, float]:
        """The speed of every split over the same ranks; empty if there are too many splits."""
        used = [i for i, count in enumerate(candidate.counts) if count]
        n_layer = sum(candidate.counts)
        if math.comb(n_layer - 1, len(used) - 1) > _FEW_SPLITS * self._request.effort:
            return {}
        speeds = {}
        for cuts in itertools.combinations(range(1, n_layer), len(used) - 1):
            counts = [0] * len(candidate.counts)
            for i, (a, b) in zip(used, itertools.pairwise((0, *cuts, n_layer)), strict=True):
                counts[i] = b - a
            other = replace(candidate, counts=tuple(counts))
            if self._candidates.fits(other):
                speeds[other] = self._speed(other, mode)
        return speeds

    def _climbed(self, candidate: Candidate, mode: Mode, most: int) -> Candidate:
        """Move layers between ranks as long as that helps, with at most `most` attempts."""
        best, left = self._evaluate(candidate, mode), most
        tried = self._neighbours(candidate, mode)
        while left > 0 and (other := next(tried, None)) is not None:
            if not self._candidates.fits(other):
                continue
            left -= 1
            if own := self._better(other, mode, best, _NOISE):
                candidate, best, tried = other, own, self._neighbours(other, mode)
        return candidate

    def _evaluate(
        self,
        candidate: Candidate,
        mode: Mode,
        speculation: SpeculationConfig | None = None,
        least_tokens_per_s: float = 0.0,
    ) -> Evaluation:
        """Simulate a candidate carefully; see `Evaluator.evaluate`."""
        own = speculation or self._request.speculation
        return self._evaluator.evaluate(candidate, mode, own, carefully=True, least_tokens_per_s=least_tokens_per_s)

    def _better(
        self,
        candidate: Candidate,
        mode: Mode,
        best: Evaluation,
        factor: float = 1.0,
        speculation: SpeculationConfig | None = None,
    ) -> Evaluation | None:
        """The candidate's evaluation if it is more than `factor` times as fast as the `best` one so far, else None."""
        least = _HOPELESS * factor * best.first_tokens_per_s
        own = self._evaluate(candidate, mode, speculation, least)
        return own if own.is_whole and own.tokens_per_s > factor * best.tokens_per_s else None

    def _neighbours(self, candidate: Candidate, mode: Mode) -> Iterator[Candidate]:
        """Candidates with several layers, then one layer, moved from the busiest ranks to the least busy ones."""
        used = [i for i, count in enumerate(candidate.counts) if count]
        evaluation = self._evaluate(candidate, mode)
        busy_s = dict(zip(used, evaluation.busy_s, strict=True))
        by_work = sorted(used, key=lambda i: -busy_s[i])
        n_layer = sum(candidate.counts)
        large = min(max(n_layer // (8 * len(used)), 1), _MOST_SHIFTS)
        for n in dict.fromkeys((large, 1)):
            for giver, taker in itertools.product(by_work[:2], reversed(by_work)):
                left = candidate.counts[giver] - n
                if giver != taker and (left > 0 or (left == 0 and candidate.arrangement.skips[giver])):
                    counts = list(candidate.counts)
                    counts[giver] -= n
                    counts[taker] += n
                    yield replace(candidate, counts=tuple(counts))

    def _tuned(self, candidate: Candidate, mode: Mode) -> SpeculationConfig:
        best = replace(self._request.speculation, mode=mode)
        if not self._request.tunes:
            return best
        fastest = self._evaluate(candidate, mode, best)
        for name, values in _FLAGS[mode]:
            for value in values:
                other = replace(best, **{name: value})  # type: ignore[arg-type]
                if own := self._better(candidate, mode, fastest, _WORTH, other):
                    best, fastest = other, own
        return best

    def _with_best_wire(
        self, candidate: Candidate, mode: Mode, speculation: SpeculationConfig
    ) -> tuple[Candidate, SpeculationConfig]:
        """The candidate with 16-bit sums if they pay, or another simulated candidate whose groups gain more by them."""
        if not self._request.constraints.halves:
            return candidate, speculation
        simulated = self._simulated.get(mode, {})
        best_of = {c.arrangement: c for c in sorted(simulated, key=simulated.__getitem__) if c.has_groups_of_machines}
        groups = {candidate: speculation} if candidate.has_groups_of_machines else {}
        usual = replace(self._request.speculation, mode=mode)
        groups |= {c: usual for c in list(best_of.values())[-_FEW_WIRES:] if c.arrangement != candidate.arrangement}
        speeds = {c: self._predict(c.with_halves, mode, own).tokens_per_s for c, own in groups.items()}
        best = max(speeds, key=speeds.__getitem__, default=candidate)
        speed = self._predict(candidate, mode, speculation).tokens_per_s
        if speeds.get(best, 0.0) > _WIRE_WORTH * speed:
            return best.with_halves, groups[best]
        return candidate, speculation

    def _with_floats(self, candidate: Candidate, prediction: Prediction) -> Prediction | None:
        if candidate.arrangement.tensor_wire == "f32":
            return None
        floats = replace(candidate, arrangement=replace(candidate.arrangement, tensor_wire="f32"))
        return self._predict(floats, prediction.mode, prediction.speculation)

    def _predict(self, candidate: Candidate, mode: Mode, speculation: SpeculationConfig) -> Prediction:
        evaluation = self._evaluator.evaluate(candidate, mode, speculation, carefully=True)
        return Prediction(mode, speculation, evaluation.tokens_per_s, evaluation.ttft_s)

    def _placed(self, candidate: Candidate) -> tuple[ClusterSpec, VirtualPlacement]:
        return placed(self._spec, candidate, drafts_of(candidate, self._draft, self._request.further))

    def _placement(self, candidate: Candidate) -> VirtualPlacement:
        return self._placed(candidate)[1]

    def _ranks(self, candidate: Candidate) -> tuple[RankPlan, ...]:
        placement = self._placement(candidate)
        n_target = len(placement.target_on)
        ranks = []
        for rank, (node, memory) in enumerate(self._candidates.memory(candidate)):
            own_layouts = [own for own in placement.draft_layouts if own is not None and rank in own.ranks]
            layout = own_layouts[0] if own_layouts else placement.layout
            assert layout is not None
            own = self._spec.nodes[node]
            layers, threads = layout.layers_of(rank), placement.threads[rank]
            ranks.append(
                RankPlan(
                    node=own.name,
                    drafts=rank >= n_target,
                    layers=layers,
                    threads=threads,
                    memory=memory,
                    has_bytes=own.memory_bytes,
                )
            )
        return tuple(ranks)
