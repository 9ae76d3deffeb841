"""Simulations of `scripts/experiments/run`: many independent jobs on all cores, always with the same result."""

from __future__ import annotations

import concurrent.futures
import ctypes
import functools
import multiprocessing
import signal
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.display.progress import SimulationProgress
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulator import simulate
from ggpipe.sim.text import Confidence, SyntheticTokens
from ggpipe.stats.records import RequestStats
from ggpipe.stats.summary import Summary, summary_of
from scripts.experiments.places import Place

ITERATIVE = SpeculationConfig(mode="iterative")
_N_PROMPT, _N_CTX = 80, 8192  # PipeInfer's ChatML prompt is about as long
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """A simulation: the same request for each seed, all figures together."""

    place: Place
    acceptance: float
    speculation: SpeculationConfig
    n_text: int
    seeds: tuple[int, ...]
    confidence: Confidence = "calibrated"
    n_in_flight: int = 0
    """See ggpipe.sim.simulator.Sizes."""

    @property
    def plain(self) -> Job:
        """The same in `iterative` mode."""
        return replace(self, speculation=ITERATIVE, n_in_flight=0)

    def requests(self) -> list[RequestStats]:
        """Simulate them."""
        cluster = self.place.cluster(self.speculation.mode != "iterative")
        sizes = Sizes(_N_CTX, n_in_flight=self.n_in_flight)
        texts = (_text(self.acceptance, self.n_text, seed, self.confidence) for seed in self.seeds)
        return [simulate(cluster, text, self.speculation, self.n_text, sizes) for text in texts]


class Simulations:
    """Runs jobs, each of them once."""

    def __init__(self, n_workers: int) -> None:
        self._known: dict[Job, Summary] = {}
        self._n_workers = n_workers

    @property
    def n_done(self) -> int:
        """Requests simulated so far."""
        return sum(len(job.seeds) for job in self._known)

    def run(self, jobs: Iterable[Job]) -> None:
        """Simulate these jobs, and each of them in `iterative` mode."""
        wanted = dict.fromkeys(job for each in jobs for job in (each.plain, each))
        new = [job for job in wanted if job not in self._known]
        with SimulationProgress() as progress:
            for i, (job, summary) in enumerate(zip(new, self._map(new), strict=True), 1):
                self._known[job] = summary
                progress(i, len(new))

    def _map(self, jobs: Sequence[Job]) -> Iterator[Summary]:
        if self._n_workers == 1 or len(jobs) < 2:
            yield from map(_run, jobs)
            return
        context = multiprocessing.get_context("fork")
        with concurrent.futures.ProcessPoolExecutor(self._n_workers, context, _begin_worker) as pool:
            try:
                yield from pool.map(_run, jobs, chunksize=4)
            finally:
                pool.shutdown(wait=False, cancel_futures=True)

    def __getitem__(self, job: Job) -> Summary:
        return self._known[job]

    def speed(self, job: Job) -> float:
        """Tokens per second."""
        return self._known[job].tokens_per_s or 0.0

    def gain(self, job: Job) -> float:
        """Speed relative to `iterative`."""
        return self.speed(job) / self.speed(job.plain)


@functools.lru_cache(64)
def _text(acceptance: float, n_text: int, seed: int, confidence: Confidence) -> SyntheticTokens:
    return SyntheticTokens(acceptance, _N_PROMPT, n_text, seed, confidence)


def _run(job: Job) -> Summary:
    return summary_of(job.requests())


def _begin_worker() -> None:
    """Leave Ctrl-C to the parent process, and end with it."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
