"""The studies of `scripts/experiments/run`: the pairs, the bound of chains, parts left out, links, drafts, rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.sim.sweep import ModeResult
from ggpipe.sim.text import Confidence
from ggpipe.stats.summary import Summary
from scripts.experiments.places import FAST, OLDER_FAST, PAIRS, SITES, EvenPlace, Pair, PaperPlace, Site
from scripts.experiments.simulations import ITERATIVE, Job, Simulations

N_NODES = 8
"""Where settings are chosen, and parts left out."""
ASYNC = SpeculationConfig(mode="async")
CHAINS = replace(ASYNC, policy="thresholds")
FOUR = SpeculationConfig(mode="speculative", n_draft=4)
_FINALISTS = 3
_TREES = [(np, ps) for np in (2, 3, 4) for ps in (0.03, 0.1)]
_WAITING = (
    *(SpeculationConfig(mode="speculative", n_draft=n) for n in range(1, 17)),
    *(SpeculationConfig(mode="speculative", n_draft=n, p_accept=pa) for n in (3, 4, 8) for pa in (0.2, 0.4)),
    *(SpeculationConfig(mode="speculative", n_draft=n, n_parallel=np, p_split=ps) for n in (4, 8) for np, ps in _TREES),
)
_OVERLAPPING = (
    ASYNC,
    replace(ASYNC, n_draft=4),
    *(replace(ASYNC, p_accept=pa) for pa in (0.1, 0.3)),
    *(replace(ASYNC, policy="thresholds", n_parallel=np, p_split=ps) for np, ps in _TREES),
)


@dataclass(frozen=True)
class Scale:
    """How much is simulated."""

    pairs: tuple[Pair, ...] = PAIRS
    n_nodes: tuple[int, ...] = (4, 8, 15, 32)
    n_text: int = 128
    seeds: tuple[int, ...] = (1, 2)
    """The best settings on the text of seed 0 are compared on these."""
    waiting: tuple[SpeculationConfig, ...] = _WAITING
    """Synchronous settings to choose from."""
    overlapping: tuple[SpeculationConfig, ...] = _OVERLAPPING
    """Asynchronous settings to choose from."""
    part_seeds: tuple[int, ...] = (1, 2, 3)
    few_waiting: tuple[SpeculationConfig, ...] = (*_WAITING[:4], _WAITING[5], _WAITING[7], _WAITING[-6], _WAITING[-2])
    """The same where many places are compared."""
    few_overlapping: tuple[SpeculationConfig, ...] = (ASYNC, _OVERLAPPING[-2])
    bound_acceptances: tuple[float, ...] = (0.5, 0.6, 0.7, 0.8, 0.9)
    bound_nodes: tuple[int, ...] = (1, 2, 4, 8, 16, 32)
    bound_text: int = 1000
    acceptances: tuple[float, ...] = (0.0, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9)
    latencies_s: tuple[float, ...] = (10e-6, 50e-6, 200e-6, 1e-3, 5e-3)
    draft_shares: tuple[float, ...] = (0.01, 0.03, 0.1, 0.2, 0.3)
    row_shares: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)


QUICK = Scale(
    (PAIRS[0], PAIRS[2]), (4, 8), 24, (1,), _WAITING[1:4:2], _OVERLAPPING[::5], (1,), _WAITING[1:4:2],
    _OVERLAPPING[::5], (0.5, 0.8), (1, 4), 48, (0.0, 0.7), (10e-6, 1e-3), (0.01, 0.3), (0.03, 1.0),
)  # fmt: skip
"""For tests."""


# Pairs of models


@dataclass(frozen=True)
class PairResult:
    """A pair on a number of nodes, in settings of each mode."""

    place: PaperPlace
    acceptance: float
    best_waiting: SpeculationConfig
    """The best synchronous setting."""
    best_async: SpeculationConfig
    """The best asynchronous setting."""
    figures: dict[SpeculationConfig, Summary]

    def gain(self, setting: SpeculationConfig) -> float:
        """Speed relative to `iterative`."""
        return self._speed(setting) / self._speed(ITERATIVE)

    def over_waiting(self, setting: SpeculationConfig) -> float:
        """Speed relative to the best synchronous setting."""
        return self._speed(setting) / self._speed(self.best_waiting)

    def ttft(self, setting: SpeculationConfig) -> float:
        """Time to first token relative to `iterative`."""
        own_s, base_s = (self.figures[s].ttft_s for s in (setting, ITERATIVE))
        return own_s / base_s if own_s and base_s else 0.0

    @property
    def shown(self) -> dict[str, SpeculationConfig]:
        """The settings by their names in the report."""
        return {
            "iterative": ITERATIVE,
            "speculative, 4 draft tokens": FOUR,
            "speculative, best": self.best_waiting,
            "async, defaults": ASYNC,
            "async, best": self.best_async,
        }

    def _speed(self, setting: SpeculationConfig) -> float:
        return self.figures[setting].tokens_per_s or 0.0


def compare_pairs(sims: Simulations, scale: Scale, sites: Sequence[Site] = SITES) -> list[PairResult]:
    """All pairs on all sites and numbers of nodes. Settings are chosen on 8 nodes: they hardly depend on the number."""
    return _compare(sims, scale, scale.pairs, sites, scale.n_nodes)


def compare_shares(sims: Simulations, scale: Scale) -> list[PairResult]:
    """The same on 8 nodes, with the paper's rates taken as the accepted share of chains of four draft tokens."""
    other = [replace(pair, acceptance=round(_chance(pair.acceptance, 4), 3)) for pair in scale.pairs]
    return _compare(sims, scale, other, SITES[:1], (N_NODES,))


def _compare(
    sims: Simulations, scale: Scale, pairs: Sequence[Pair], sites: Sequence[Site], sizes: Sequence[int]
) -> list[PairResult]:
    tries = [
        Job(PaperPlace(pair, site, N_NODES), pair.acceptance, ITERATIVE, scale.n_text, (0,))
        for site in sites
        for pair in pairs
    ]
    sims.run(replace(job, speculation=s) for job in tries for s in (*scale.waiting, *scale.overlapping))
    finals = {
        replace(job, seeds=scale.seeds): (
            sorted({FOUR, *_fastest(sims, job, scale.waiting)}, key=str),
            sorted({ASYNC, *_fastest(sims, job, scale.overlapping)}, key=str),
        )
        for job in tries
    }
    sims.run(replace(job, speculation=s) for job, settings in finals.items() for s in (*settings[0], *settings[1]))
    cells = []
    for job, settings in finals.items():
        waiting, overlapping = (_fastest(sims, job, some, 1)[0] for some in settings)
        used = (ITERATIVE, FOUR, waiting, ASYNC, overlapping)
        assert isinstance(job.place, PaperPlace)
        cells += [(replace(job.place, n_nodes=n), job, used) for n in sizes]
    sims.run(replace(job, place=place, speculation=s) for place, job, used in cells for s in used)
    return [
        PairResult(
            place, job.acceptance, used[2], used[4], {s: sims[replace(job, place=place, speculation=s)] for s in used}
        )
        for place, job, used in cells
    ]


def _fastest(
    sims: Simulations, job: Job, settings: Sequence[SpeculationConfig], n: int = _FINALISTS
) -> list[SpeculationConfig]:
    return sorted(settings, key=lambda s: -sims.speed(replace(job, speculation=s)))[:n]


def _chance(share: float, n: int) -> float:
    """The agreement at which this share of chains of n draft tokens is accepted: a + a² + ... + aⁿ = n * share."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(middle**i for i in range(1, n + 1)) < n * share else (low, middle)
    return low


# The bound of chains

BOUND_DRAFT = 0.005


def bound(sims: Simulations, scale: Scale) -> dict[tuple[float, int], float]:
    """By acceptance and number of stages: the speed of chains relative to `iterative`; fast draft, free rows."""
    jobs = {
        (a, n): Job(EvenPlace(n, 1.0, BOUND_DRAFT, 0.0, FAST.latency_s), a, CHAINS, scale.bound_text, scale.seeds[:1])
        for a in scale.bound_acceptances
        for n in scale.bound_nodes
    }
    sims.run(jobs.values())
    return {key: sims.gain(job) for key, job in jobs.items()}


# Parts left out

VARIANTS = {
    "async, defaults": (ASYNC, 0),
    "no continuous speculation": (replace(ASYNC, continuous=False), 0),
    "no cancellation": (replace(ASYNC, cancel=False), 0),
    "neither": (replace(ASYNC, continuous=False, cancel=False), 0),
    "no multibuffering": (ASYNC, 2),
    "-pa 0.1": (replace(ASYNC, p_accept=0.1), 0),
    "-pa 0.3": (replace(ASYNC, p_accept=0.3), 0),
    "-pa 0.5": (replace(ASYNC, p_accept=0.5), 0),
    "-pa 0.7": (replace(ASYNC, p_accept=0.7), 0),
    "trees, -np 4 -ps 0.03": (replace(ASYNC, policy="thresholds", n_parallel=4, p_split=0.03), 0),
}
"""Settings, and the limit of runs in flight."""
CONFIDENCES: tuple[Confidence, ...] = ("calibrated", "overconfident")


@dataclass(frozen=True)
class Column:
    """Where parts are left out."""

    pair: Pair
    site: Site
    confidence: Confidence


def leave_out(sims: Simulations, scale: Scale) -> dict[Column, dict[str, ModeResult]]:
    """For the pair with the lowest acceptance and the one with the highest, on 8 nodes. None of these is iterative."""
    ends = [f(scale.pairs, key=lambda pair: pair.acceptance) for f in (min, max)]
    columns = [Column(pair, site, kind) for pair in ends for site in (SITES[0], OLDER_FAST) for kind in CONFIDENCES]
    jobs = {
        (column, name): Job(
            PaperPlace(column.pair, column.site, N_NODES), column.pair.acceptance, setting, scale.n_text,
            scale.part_seeds, column.confidence, n_in_flight,
        )
        for column in columns
        for name, (setting, n_in_flight) in VARIANTS.items()
    }  # fmt: skip
    sims.run(jobs.values())
    found: dict[Column, dict[str, ModeResult]] = {column: {} for column in columns}
    for (column, name), job in jobs.items():
        found[column][name] = ModeResult(sims[job], sims.gain(job))
    return found


# Acceptance, links, drafts, rows

LATENCY_TOKENS_S = (0.5, 0.05)
LATENCY_ACCEPTANCE, HEAT_ACCEPTANCES = 0.7, (0.5, 0.8)


@dataclass(frozen=True)
class Compared:
    """The best setting of each kind at a place, relative to `iterative`."""

    place: EvenPlace
    acceptance: float
    waiting: float
    default: float
    """The asynchronous mode with its defaults."""
    overlapping: float


def vary_acceptance(sims: Simulations, scale: Scale) -> dict[float, Compared]:
    """By acceptance."""
    places = [(EvenPlace(), a) for a in scale.acceptances]
    return dict(zip(scale.acceptances, _compare_even(sims, scale, places), strict=True))


def vary_latency(sims: Simulations, scale: Scale) -> dict[tuple[float, float], Compared]:
    """By a token's time in the target and the links' latency, in s."""
    keys = [(token_s, latency_s) for token_s in LATENCY_TOKENS_S for latency_s in scale.latencies_s]
    places = [(EvenPlace(token_s=t, latency_s=x), LATENCY_ACCEPTANCE) for t, x in keys]
    return dict(zip(keys, _compare_even(sims, scale, places), strict=True))


def vary_costs(sims: Simulations, scale: Scale) -> dict[tuple[float, float, float], Compared]:
    """By acceptance, the draft's share of a token's time, and a further row's share of the first."""
    keys = [(a, d, r) for a in HEAT_ACCEPTANCES for d in scale.draft_shares for r in scale.row_shares]
    places = [(EvenPlace(draft_share=d, row_share=r), a) for a, d, r in keys]
    return dict(zip(keys, _compare_even(sims, scale, places), strict=True))


def _compare_even(sims: Simulations, scale: Scale, places: Sequence[tuple[EvenPlace, float]]) -> list[Compared]:
    jobs = [Job(place, a, ASYNC, scale.n_text, scale.seeds[:1]) for place, a in places]
    sims.run(replace(job, speculation=s) for job in jobs for s in (*scale.few_waiting, *scale.few_overlapping))
    found = []
    for (place, a), job in zip(places, jobs, strict=True):
        gains = [
            max(sims.gain(replace(job, speculation=s)) for s in settings)
            for settings in (scale.few_waiting, (ASYNC,), scale.few_overlapping)
        ]
        found.append(Compared(place, a, *gains))
    return found


# All of it


@dataclass(frozen=True)
class Findings:
    """All that was simulated."""

    scale: Scale
    pairs: list[PairResult]
    shares: list[PairResult]
    """On 8 nodes, with the paper's rates taken as the accepted share of chains of four draft tokens."""
    bound: dict[tuple[float, int], float]
    parts: dict[Column, dict[str, ModeResult]]
    acceptance: dict[float, Compared]
    latency: dict[tuple[float, float], Compared]
    costs: dict[tuple[float, float, float], Compared]

    @property
    def main(self) -> list[PairResult]:
        """The pairs on 8 nodes of the first site."""
        return self.at(SITES[0], N_NODES)

    def at(self, site: Site, n_nodes: int) -> list[PairResult]:
        """The pairs there."""
        return [r for r in self.pairs if (r.place.site, r.place.n_nodes) == (site, n_nodes)]


def find_all(sims: Simulations, scale: Scale) -> Findings:
    """Simulate everything."""
    return Findings(
        scale,
        compare_pairs(sims, scale),
        compare_shares(sims, scale),
        bound(sims, scale),
        leave_out(sims, scale),
        vary_acceptance(sims, scale),
        vary_latency(sims, scale),
        vary_costs(sims, scale),
    )
