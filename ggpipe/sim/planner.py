"""The best way to spread a model over machines, and the best flags: searched with the simulator as the judge.

1. Which machines in which order, the draft where (`arrangements`); for each of them the splits that memory allows and
   that nothing beats in both a run's time in all stages and in the slowest one (`splits`).
2. A formula tells the most promising ones (`candidates`), short simulations the best of these.
3. Layers move between its ranks as long as that helps. Where there are few splits, each is simulated.
4. Flags are tried one after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ggpipe.config import Mode, SpeculationConfig
from ggpipe.sim.arrangements import Arrangement, Place
from ggpipe.sim.build import Placement
from ggpipe.sim.candidates import Candidates, Estimate, Needs, ranked
from ggpipe.sim.judge import Candidate, Judge
from ggpipe.sim.memory import Memory
from ggpipe.sim.recording import Recording
from ggpipe.sim.setup import MadeUp
from ggpipe.sim.shapes import ModelShape
from ggpipe.sim.simulator import Sizes
from ggpipe.sim.spec import ClusterSpec

_WORTH = 1.03  # a flag beside its default, or another layout, has to be so much faster
_NOISE = 1.04  # of careful simulations: an even split that is so much slower may be as good
_FEW_SPLITS = 24
_FINALISTS = 4  # that are judged carefully
_MOST_SHIFTS = 3  # layers that move at once
_MODES: tuple[Mode, ...] = ("iterative", "speculative", "async")
_FLAGS: dict[Mode, tuple[tuple[str, tuple[float, ...]], ...]] = {
    "iterative": (),
    "speculative": (("n_draft", (1, 2, 3, 4, 6)), ("p_accept", (0.2, 0.4)), ("n_parallel", (2,))),
    "async": (("n_draft", (2, 4)), ("p_accept", (0.2, 0.4)), ("n_parallel", (2,))),
}


@dataclass(frozen=True)
class Wish:
    """What is to be fast."""

    needs: Needs
    tokens: MadeUp | Recording
    sizes: Sizes = field(default_factory=Sizes)
    mode: Mode | None = None
    """None: whichever is fastest."""
    speculation: SpeculationConfig = field(default_factory=SpeculationConfig)
    """Flags to begin with."""
    tunes: bool = True
    """Look for better ones."""
    effort: float = 1.0
    """Simulations, as a share of the usual number."""


@dataclass(frozen=True)
class RankPlan:
    """A rank."""

    node: str
    drafts: bool
    """It holds the draft and nothing else."""
    layers: tuple[int, int]
    threads: int
    memory: Memory
    """With a draft inside."""
    has_bytes: float
    """Memory of its machine."""


@dataclass(frozen=True)
class Prediction:
    """A mode with its flags."""

    mode: Mode
    speculation: SpeculationConfig
    tokens_per_s: float
    ttft_s: float


@dataclass(frozen=True)
class Plan:
    """Ranks, and how fast they are."""

    placement: Placement
    places: tuple[Place, ...]
    """Of each rank."""
    ranks: tuple[RankPlan, ...]
    best: Prediction
    predictions: Mapping[Mode, Prediction]
    """In each mode, with these ranks."""
    elsewhere: Mapping[Mode, tuple[Placement, Prediction]]
    """Modes that would be clearly faster with other ranks, or need other ones, and these."""
    n_simulations: int

    @property
    def draft_inside(self) -> bool:
        """The head's process holds the draft as well."""
        return self.placement.draft_threads is not None


def make_plan(
    spec: ClusterSpec,
    target: ModelShape,
    draft: ModelShape | None,
    wish: Wish,
    on_run: Callable[[int, int], None] = lambda done, of: None,
) -> Plan:
    """Search. `on_run` is called after each simulation: so many of about so many.

    Raises UsageError when nothing fits.
    """
    return _Search(spec, target, draft, wish, on_run).plan()


class _Search:
    def __init__(
        self,
        spec: ClusterSpec,
        target: ModelShape,
        draft: ModelShape | None,
        wish: Wish,
        on_run: Callable[[int, int], None],
    ) -> None:
        self._spec = spec
        self._draft = draft if wish.mode != "iterative" or wish.needs.must_draft else None
        self._target = target
        self._wish = wish
        must_draft = wish.needs.must_draft or wish.mode in ("speculative", "async")
        self._candidates = Candidates(spec, target, self._draft, replace(wish.needs, must_draft=must_draft))
        self._judge = Judge(spec, target, self._draft, wish.tokens, wish.sizes, self._count)
        self._on_run = on_run
        self._expected = 0
        tokens = wish.tokens
        self._acceptance = tokens.agreement if isinstance(tokens, Recording) else tokens.acceptance

    def plan(self) -> Plan:
        estimates = self._candidates.all()
        modes: tuple[Mode, ...] = (self._wish.mode,) if self._wish.mode else _MODES
        self._expected = 2 * self._most_runs(estimates) if "async" in modes else 0
        found: dict[Mode, tuple[Candidate, Prediction]] = {}
        for mode in modes:
            candidate = self._best_candidate(estimates, mode)
            if candidate is not None:
                found[mode] = candidate, self._predict(candidate, mode, self._tuned(candidate, mode))
        best = max(found, key=lambda mode: self._worth(*found[mode]))
        candidate, prediction = found[best]
        predictions = {best: prediction}
        elsewhere: dict[Mode, tuple[Placement, Prediction]] = {}
        for mode, (other, own) in found.items():
            if mode == best:
                continue
            if candidate.arrangement.drafts or mode == "iterative":
                predictions[mode] = self._predict(candidate, mode, own.speculation)
            if mode not in predictions or own.tokens_per_s > _WORTH * predictions[mode].tokens_per_s:
                elsewhere[mode] = self._placement(other), own
        places = candidate.arrangement.places(candidate.counts)
        ranks = self._ranks(candidate)
        return Plan(self._placement(candidate), places, ranks, prediction, predictions, elsewhere, self._judge.n_runs)

    def _count(self, n_runs: int) -> None:
        self._on_run(n_runs, max(self._expected, n_runs))

    def _worth(self, candidate: Candidate, prediction: Prediction) -> float:
        """Its speed; of two that are about as fast the one with fewer ranks is better."""
        n_ranks = len(self._placement(candidate).node_of)
        return prediction.tokens_per_s * (1 - 0.001 * n_ranks)

    def _best_candidate(self, estimates: Sequence[Estimate], mode: Mode) -> Candidate | None:
        drafts = mode != "iterative"
        own = [e for e in estimates if e.candidate.arrangement.drafts == drafts]
        if not drafts and not own:  # with ranks that draft in any case
            own = list(estimates)
        if not own:
            return None
        if mode != "async":
            return self._steady(own, mode)
        most = self._most_runs(own)
        first = ranked(own, mode, self._acceptance, max(round(most * 0.5), 2))
        speeds = {e.candidate: self._speed(e.candidate, mode) for e in first}
        good = list(dict.fromkeys(c.arrangement for c in sorted(speeds, key=lambda c: -speeds[c])))[:2]
        known: set[Arrangement] = set()
        for arrangement in good:
            every = self._all_splits(next(c for c in speeds if c.arrangement == arrangement), mode)
            speeds |= every
            known |= {arrangement} if every else set()
        last = sorted(speeds, key=lambda c: -speeds[c])[: max(round(_FINALISTS * self._wish.effort), 2)]
        best = max(last, key=lambda c: self._speed(c, mode, carefully=True))
        if best.arrangement in known:
            return best
        even = self._most_even([e.candidate for e in own if e.candidate.arrangement == best.arrangement])
        is_as_good = self._speed(even, mode, carefully=True) * _NOISE >= self._speed(best, mode, carefully=True)
        return self._climbed(even if is_as_good else best, mode, max(round(most * 0.15), 2))

    def _most_even(self, candidates: Sequence[Candidate]) -> Candidate:
        """The one with the fastest slowest stage."""
        estimates = [e for candidate in candidates if (e := self._candidates.estimate(candidate)) is not None]
        return min(estimates, key=lambda e: e.slowest_s[0]).candidate

    def _steady(self, estimates: Sequence[Estimate], mode: Mode) -> Candidate:
        """For modes in which all wait for one another: what stages take adds up, and nothing need be simulated.

        Many ways are as fast then. Fewer ranks are better, and among these, for prompts and memory, even ones.
        """
        times_s = {e: e.token_s(mode, self._acceptance) for e in estimates}
        good = [e for e in estimates if times_s[e] <= _WORTH * min(times_s.values())]
        in_order = self._wish.needs.in_order
        n_used = {e: 0 if in_order else sum(count > 0 for count in e.candidate.counts) for e in good}
        return min(good, key=lambda e: (n_used[e], e.slowest_s[0])).candidate

    def _most_runs(self, estimates: Sequence[Estimate]) -> int:
        """Simulations that the search for one mode may take: the more ranks, the longer is each."""
        n_stages = max(sum(count > 0 for count in e.candidate.counts) for e in estimates)
        return max(round(self._wish.effort * min(max(400 / n_stages, 24), 48)), 2)

    def _speed(self, candidate: Candidate, mode: Mode, *, carefully: bool = False) -> float:
        return self._judge.ask(candidate, mode, self._wish.speculation, carefully=carefully).tokens_per_s

    def _all_splits(self, candidate: Candidate, mode: Mode) -> dict[Candidate, float]:
        """All ways to divide the layers over the same ranks, where these are few."""
        used = [i for i, count in enumerate(candidate.counts) if count]
        n_layer = sum(candidate.counts)
        if math.comb(n_layer - 1, len(used) - 1) > _FEW_SPLITS * self._wish.effort:
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
        """Layers move between ranks as long as that helps; at most so many moves are tried."""
        speed, left = self._speed(candidate, mode, carefully=True), most
        tried = self._neighbours(candidate, mode)
        while left > 0 and (other := next(tried, None)) is not None:
            if not self._candidates.fits(other):
                continue
            left -= 1
            own_speed = self._speed(other, mode, carefully=True)
            if own_speed > speed * _NOISE:
                candidate, speed, tried = other, own_speed, self._neighbours(other, mode)
        return candidate

    def _neighbours(self, candidate: Candidate, mode: Mode) -> Iterator[Candidate]:
        """From the ranks that were busiest to those that were least busy, some layers, then one."""
        used = [i for i, count in enumerate(candidate.counts) if count]
        verdict = self._judge.ask(candidate, mode, self._wish.speculation, carefully=True)
        busy_s = dict(zip(used, verdict.busy_s, strict=True))
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
        best = replace(self._wish.speculation, mode=mode)
        if not self._wish.tunes:
            return best
        most = self._judge.ask(candidate, mode, best, carefully=True).tokens_per_s
        for name, values in _FLAGS[mode]:
            for value in values:
                other = replace(best, **{name: value})  # type: ignore[arg-type]
                speed = self._judge.ask(candidate, mode, other, carefully=True).tokens_per_s
                if speed > most * _WORTH:
                    best, most = other, speed
        return best

    def _predict(self, candidate: Candidate, mode: Mode, speculation: SpeculationConfig) -> Prediction:
        verdict = self._judge.ask(candidate, mode, speculation, carefully=True)
        return Prediction(mode, speculation, verdict.tokens_per_s, verdict.ttft_s)

    def _placement(self, candidate: Candidate) -> Placement:
        n_draft = self._draft.n_layer if self._draft and candidate.arrangement.drafts else None
        return candidate.arrangement.placed(self._spec, candidate.counts, n_draft)[1]

    def _ranks(self, candidate: Candidate) -> tuple[RankPlan, ...]:
        placement = self._placement(candidate)
        n_target = len(placement.target_on)
        ranks = []
        for rank, (node, memory) in enumerate(self._candidates.memory(candidate)):
            layout = placement.draft_layout if rank >= n_target else placement.layout
            assert layout is not None
            own = self._spec.nodes[node]
            layers, threads = layout.layers_of(rank), placement.threads[rank]
            ranks.append(RankPlan(own.name, rank >= n_target, layers, threads, memory, own.memory_bytes))
        return tuple(ranks)
