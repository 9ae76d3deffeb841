"""Several requests on virtual clusters: what each of them gets, and what they get together."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import n_examples
from support.virtual import ASYNC, ITERATIVE, SPECULATIVE, cluster, tokens, watched

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.request import Finish
from ggpipe.sim.arrivals import Arrival, Traffic
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulator import SimulatedRequest, SimulationResult, serve, simulate
from ggpipe.sim.virtual_cluster import VirtualCluster
from ggpipe.stats.records import percentile

WIDE = Sizes(n_ctx=100_000)


def checked(
    own: VirtualCluster,
    requests: Sequence[SimulatedRequest],
    speculation: SpeculationConfig,
    sizes: Sizes = WIDE,
    each: bool = False,
) -> SimulationResult:
    """Serve these requests. Whatever the times: each gets its whole text, in order of arrival, and totals add up.
    `each`: see `watched`."""
    with watched(each) as seen:
        served = serve(own, requests, speculation, sizes)
    assert seen.schedulers[0].n_in_flight == 0
    for asked, stats in zip(requests, served.requests, strict=True):
        n_predict = asked.arrival.n_predict
        assert stats.n_generated == (len(asked.tokens.output) if n_predict is None else n_predict)
        assert stats.finish is Finish.LENGTH
        assert stats.started is not None
        assert stats.ended is not None
        assert 0 <= stats.arrived <= stats.started < stats.token_times[0] <= stats.token_times[-1] <= stats.ended
        assert stats.token_times == sorted(stats.token_times)
        assert stats.counters.accepted_tokens == sum(stats.drafted)
        if asked.arrival.after is not None:
            assert stats.arrived == (served.requests[asked.arrival.after].ended or 0) + asked.arrival.at_s
        begun = [other for other in served.requests if (other.started or 0) <= stats.started]
        later = [other for other in begun if other.arrived > stats.arrived and other.started != stats.started]
        assert all(other.n_prompt < stats.n_prompt for other in later), "a later request was served first"
    for i, rank in enumerate(served.ranks):
        parts = [stats.ranks[i] for stats in served.requests]
        assert rank.compute_s == pytest.approx(sum(part.compute_s for part in parts))
        assert rank.busy_s == pytest.approx(sum(part.busy_s for part in parts))
        assert rank.runs <= sum(part.runs for part in parts)
    return served


def of_users(n: int, n_each: int, n_text: int, n_prompt: int = 16, agreement: float = 0.7) -> list[SimulatedRequest]:
    arrivals = Traffic(users=n, n_total=n * n_each).arrivals()
    return [SimulatedRequest(tokens(agreement, n_text, n_prompt, i), arrival) for i, arrival in enumerate(arrivals)]


def total_tps(served: SimulationResult) -> float:
    return sum(stats.n_generated for stats in served.requests) / max(stats.ended or 0.0 for stats in served.requests)


def test_one_request_is_what_simulate_gives() -> None:
    own = cluster((0.1, 0.13, 0.07), 0.01)
    (stats,) = checked(own, [SimulatedRequest(tokens(), Arrival(at_s=0.0))], ASYNC, Sizes()).requests
    assert stats.token_times == simulate(own, tokens(), ASYNC, 60).token_times


def test_a_request_that_waits() -> None:
    """One request at a time: the second waits for the first one's end."""
    own = cluster((0.1,))
    asked = [SimulatedRequest(tokens(n_text=10, n_prompt=10, seed=i), Arrival(at_s=0.05 * i)) for i in range(2)]
    first, second = checked(own, asked, ITERATIVE, replace(WIDE, n_requests=1)).requests
    assert first.queue_s == 0
    assert second.queue_s == pytest.approx(10 * 0.1 - 0.05, abs=1e-3)
    assert second.ttft_s == pytest.approx(11 * 0.1 - 0.05, abs=1e-3)
    together = checked(own, asked, ITERATIVE, replace(WIDE, n_requests=2)).requests[1]
    assert together.ttft_s == pytest.approx(0.1 + 0.05, abs=1e-3), "as soon as the first one's run has ended"


def test_rows_of_several_requests_read_all_of_their_cells() -> None:
    """In a run of two requests, the KV cache of both is read. (One of them may have the end for itself.)"""
    from ggpipe.sim.costs import Roofline

    cost = Roofline(weight_bytes=0, cell_bytes=1.0, token_flop=0, bytes_per_s=1000.0, flop_per_s=1.0)
    own = cluster((0.1,))
    stages = {0: replace(own.target.stages[0], cost=cost)}
    own = replace(own, target=replace(own.target, stages=stages))
    asked = [SimulatedRequest(tokens(n_text=50, n_prompt=200, seed=i), Arrival(at_s=0.0)) for i in range(2)]
    alone = checked(own, asked[:1], ITERATIVE, replace(WIDE, n_requests=2)).requests[0]
    both = checked(own, asked, ITERATIVE, replace(WIDE, n_requests=2)).requests[0]
    assert alone.itl_s[-1] == pytest.approx((200 + 49) / 1000, rel=0.02)
    usual_s = statistics.median(both.itl_s[-21:])  # now and then, one row alone is tried
    assert usual_s == pytest.approx(2 * (200 + 40) / 1000, rel=0.05)


@pytest.mark.parametrize("row_share", [0.0, 0.9])
def test_four_users_fill_eight_stages(row_share: float) -> None:
    own = cluster((0.1,) * 8, row_share=row_share)
    one, four = (
        total_tps(checked(own, of_users(n, 2, 100, 4), ITERATIVE, replace(WIDE, n_requests=n))) for n in (1, 4)
    )
    assert four > 3.6 * one


@dataclass(frozen=True)
class Curve:
    """Times of runs by rows: a line through points, as multiples of `run_s`."""

    run_s: float
    points: tuple[tuple[int, float], ...]

    def seconds(self, n_rows: int, n_past: float, n_others: float = 0) -> float:
        (a, low), (b, high) = next(
            (pair for pair in zip(self.points, self.points[1:], strict=False) if n_rows <= pair[1][0]), self.points[-2:]
        )
        return self.run_s * (low + (high - low) * (n_rows - a) / (b - a))


CURVES = {
    "rows free": ((1, 1.0), (2, 1.0)),
    "3 rows free, then dear": ((1, 1.0), (3, 1.0), (4, 4 / 3)),
    "rows dear": ((1, 1.0), (2, 1.9), (4, 2.8)),
    "one row cheap": ((1, 1.0), (2, 2.75), (4, 3.6), (8, 5.15)),  # as measured for a small model on one core
}


def with_curve(n_stages: int, curve: str) -> VirtualCluster:
    own = cluster((0.8 / n_stages,) * n_stages, 0.03)
    cost = Curve(0.8 / n_stages, CURVES[curve])
    stages = {rank: replace(stage, cost=cost) for rank, stage in own.target.stages.items()}
    return replace(own, target=replace(own.target, stages=stages))


@pytest.mark.pairwise
@pytest.mark.parametrize("agreement", [0.3, 0.7])
@pytest.mark.parametrize("n_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("curve", CURVES)
def test_a_draft_does_not_slow_four_users_down(curve: str, n_stages: int, agreement: float, full: bool) -> None:
    own, asked = with_curve(n_stages, curve), of_users(4, 2, 96 if full else 48, 16, agreement)
    with_draft, without = (
        total_tps(checked(own, asked, mode, replace(WIDE, n_requests=4))) for mode in (ASYNC, ITERATIVE)
    )
    assert with_draft > 0.97 * without


@pytest.mark.parametrize(
    ("n_stages", "n_users", "curve", "least"),
    [
        (1, 2, "rows free", 2.2),
        (1, 4, "rows free", 2.0),
        (2, 4, "rows free", 2.6),
        (8, 2, "rows free", 3.4),
        (8, 8, "rows free", 3.0),
        (2, 4, "3 rows free, then dear", 1.25),
        (8, 4, "3 rows free, then dear", 2.3),
        (8, 8, "3 rows free, then dear", 1.8),
        (8, 4, "rows dear", 1.35),
    ],
)
def test_several_users_draft_ahead(n_stages: int, n_users: int, curve: str, least: float) -> None:
    """Draft tokens of all of them fill what their accepted tokens leave, if a row's time allows it."""
    own, asked = with_curve(n_stages, curve), of_users(n_users, 2, 160)
    with_draft, without = (
        total_tps(checked(own, asked, mode, replace(WIDE, n_requests=n_users))) for mode in (ASYNC, ITERATIVE)
    )
    assert with_draft > least * without


@pytest.mark.parametrize("speculation", [SPECULATIVE, replace(ASYNC, continuous=False)])
def test_several_users_draft_on_a_single_stage_in_every_mode(speculation: SpeculationConfig) -> None:
    served = checked(with_curve(1, "rows free"), of_users(4, 2, 96), speculation, replace(WIDE, n_requests=4))
    assert sum(stats.counters.accepted_tokens for stats in served.requests) > 0.1 * 4 * 2 * 96


@pytest.mark.parametrize("curve", ["rows dear", "one row cheap"])
def test_drafting_before_each_run_gives_way_to_other_users(curve: str) -> None:
    own, asked = with_curve(2, curve), of_users(4, 2, 96, 16)
    with_draft, without = (
        total_tps(checked(own, asked, mode, replace(WIDE, n_requests=4))) for mode in (SPECULATIVE, ITERATIVE)
    )
    assert with_draft > 0.95 * without


@pytest.mark.pairwise
@pytest.mark.parametrize("n_users", [4, 8])
@pytest.mark.parametrize("n_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("curve", CURVES)
def test_users_ride_in_as_many_runs_as_is_best(curve: str, n_stages: int, n_users: int) -> None:
    """Runs of k users each, the best k, but for what it takes to find it out."""
    own = with_curve(n_stages, curve)
    run_s = {n: 0.8 / n_stages * Curve(1, CURVES[curve]).seconds(n_users // n, 0) for n in (1, 2, 4, 8)}
    best = n_users / min(max(n, n_stages) * seconds for n, seconds in run_s.items() if n <= n_users)
    found = total_tps(checked(own, of_users(n_users, 2, 120, 1), ITERATIVE, replace(WIDE, n_requests=n_users)))
    assert found > 0.94 * best


class Tiled:
    """One row takes `first_s`; more rows take as long as whole tiles of four."""

    def __init__(self, first_s: float) -> None:
        self._first_s = first_s

    def seconds(self, n_rows: int, n_past: float, n_others: float = 0) -> float:
        """See Cost."""
        return self._first_s * (1 + 1.6 * math.ceil(n_rows / 4) if n_rows > 1 else 1)


@pytest.mark.parametrize("n_stages", [1, 2, 4, 8])
@pytest.mark.parametrize("row_share", [0.01, 0.05, 0.2, 0.45, None])
def test_a_long_prompt_beside_a_text(n_stages: int, row_share: float | None) -> None:
    """`row_share`: None where rows are computed in tiles."""
    own = cluster((0.08 / n_stages,) * n_stages, row_share=row_share or 0.0)
    if row_share is None:
        stages = {rank: replace(stage, cost=Tiled(0.08 / n_stages)) for rank, stage in own.target.stages.items()}
        own = replace(own, target=replace(own.target, stages=stages))
    sizes = replace(WIDE, n_requests=2)
    prompt = SimulatedRequest(tokens(n_text=8, n_prompt=2000), Arrival(at_s=2.0))
    alone_s = checked(own, [prompt], ITERATIVE, sizes).requests[0].ttft_s or 0.0
    text = SimulatedRequest(tokens(n_text=60 + int(2.5 * alone_s / 0.08), seed=1), Arrival(at_s=0.0))
    usual = percentile(checked(own, [text], ITERATIVE, sizes).requests[0].itl_s, 0.99) or 0.0
    stats, other = checked(own, [text, prompt], ITERATIVE, sizes).requests
    waits_s = [
        after - before
        for before, after in zip(stats.token_times, stats.token_times[1:], strict=False)
        if after > other.arrived and before < other.token_times[0]
    ]
    assert len(waits_s) > 2
    assert max(waits_s) <= 8 * usual
    assert (other.ttft_s or 0.0) <= 1.5 * alone_s


@pytest.mark.parametrize(
    ("n_stages", "row_share", "least", "most_later"),
    [(1, 0.05, 2.4, 1.2), (2, 0.1, 1.8, 1.15), (8, 0.1, 3.0, 1.1), (8, 0.3, 2.4, 1.1), (8, 0.9, 1.5, 1.1)],
)
def test_a_text_is_drafted_beside_a_long_prompt(
    n_stages: int, row_share: float, least: float, most_later: float
) -> None:
    """While runs are long, a text gets several tokens of each, where that costs the prompt little."""
    own = cluster((0.8 / n_stages,) * n_stages, 0.01, row_share=row_share)
    asked = [
        SimulatedRequest(tokens(n_text=3000, seed=1), Arrival(at_s=0.0)),
        SimulatedRequest(tokens(n_text=8, n_prompt=2000), Arrival(at_s=20.0)),
    ]
    rates, ttft_s = [], []
    for mode in (ASYNC, ITERATIVE):
        text, prompt = checked(own, asked, mode, replace(WIDE, n_requests=2)).requests
        assert prompt.ttft_s is not None
        rates.append(sum(prompt.arrived < t < prompt.token_times[0] for t in text.token_times) / prompt.ttft_s)
        ttft_s.append(prompt.ttft_s)
    assert rates[0] > least * rates[1]
    assert ttft_s[0] < most_later * ttft_s[1]


ARRIVALS = st.lists(
    st.builds(
        Arrival,
        at_s=st.sampled_from((0.0, 0.0, 0.01, 0.3, 2.0)),
        n_prompt=st.integers(1, 40),
        n_predict=st.integers(1, 20),
    ),
    min_size=1,
    max_size=6,
)
SPECULATIONS = st.builds(
    SpeculationConfig,
    mode=st.sampled_from(("iterative", "speculative", "async")),
    n_draft=st.integers(1, 6),
    n_parallel=st.integers(1, 3),
    cancel=st.booleans(),
    continuous=st.booleans(),
)


@settings(deadline=None, max_examples=n_examples(30, 80), suppress_health_check=[HealthCheck.too_slow])
@given(
    ARRIVALS,
    st.lists(st.booleans(), min_size=6, max_size=6),
    SPECULATIONS,
    st.integers(1, 4),
    st.integers(1, 4),
    st.sampled_from((0.0, 0.1, 0.9)),
    st.none() | st.sampled_from((0.001, 0.1)),
    st.booleans(),
    st.integers(0, 60),
)
def test_any_arrivals_are_served(
    arrivals: list[Arrival],
    follows: list[bool],
    speculation: SpeculationConfig,
    n_stages: int,
    n_requests: int,
    row_share: float,
    draft_s: float | None,
    draft_rank: bool,
    spare: int,
) -> None:
    own = cluster((0.1,) * n_stages, draft_s, row_share=row_share, draft_rank=draft_rank)
    asked = []
    for i, arrival in enumerate(arrivals):
        arrival = replace(arrival, after=i - 1 if i and follows[i] else None)
        asked.append(SimulatedRequest(tokens(0.6, arrival.n_predict or 1, arrival.n_prompt or 1, i), arrival))
    longest = max(len(one.tokens.prompt) + len(one.tokens.output) for one in asked)
    checked(own, asked, speculation, Sizes(longest + spare, 16, 8, n_requests=n_requests), each=True)
