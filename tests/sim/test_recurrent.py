"""Targets that cannot roll back: what is decoded again counts, so drafting is never much slower than decoding alone."""

from __future__ import annotations

import collections
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import n_examples
from support.oracle import Oracle, drafting
from support.virtual import ASYNC, ITERATIVE, checked, cluster, tokens, watched

from ggpipe.cluster.toml import read_cluster
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.messages import Run
from ggpipe.sim.arrivals import Arrival, Traffic
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulator import SimulatedRequest, serve, simulate
from ggpipe.sim.text import SyntheticTokens
from ggpipe.sim.virtual_cluster import VirtualCluster, build, placement_of
from ggpipe.stats.records import RequestStats

N = 250
AGREEMENTS = (0.0, 0.1, 0.3, 0.5, 0.6, 0.67, 0.75, 0.8, 0.9, 1.0)


@dataclass(frozen=True)
class Chunked:
    """A recurrent layer that computes several rows in chunks: the second row takes `second` times the first's time,
    and later ones little."""

    run_s: float
    second: float

    def seconds(self, n_rows: int, n_past: float, n_others: float = 0) -> float:
        return self.run_s * (1 + self.second + 0.08 * (n_rows - 2) if n_rows > 1 else 1)


def chunked(n_stages: int, second: float, row_share: float, draft_s: float | None = 0.002) -> VirtualCluster:
    """Stages with this cost; with `second` zero, each row takes `row_share` of the first."""
    own = cluster((0.02,) * n_stages, draft_s, row_share=row_share, rolls_back=False)
    if not second:
        return own
    stages = {rank: replace(stage, cost=Chunked(0.02, second)) for rank, stage in own.target.stages.items()}
    return replace(own, target=replace(own.target, stages=stages))


def ratio(own: VirtualCluster, text: SyntheticTokens, speculation: SpeculationConfig) -> float:
    """Speed relative to iterative decoding."""

    def speed(stats: RequestStats) -> float:
        assert stats.decode_tps is not None
        return stats.decode_tps

    return speed(simulate(own, text, speculation, N)) / speed(simulate(own, text, ITERATIVE, N))


@settings(max_examples=n_examples(10, 25), deadline=None, derandomize=True)
@given(
    st.sampled_from(AGREEMENTS),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(0.0, 0.02), (0.0, 0.3), (0.0, 0.9), (0.5, 0.0), (0.9, 0.0), (1.5, 0.0)]),
    st.sampled_from(["calibrated", "overconfident", "never-right"]),
    st.integers(0, 99),
)
def test_a_draft_model_is_never_much_slower_than_none(
    agreement: float, n_stages: int, cost: tuple[float, float], confidence: str, seed: int
) -> None:
    text = SyntheticTokens(agreement, 32, N, seed, confidence)  # type: ignore[arg-type]
    assert ratio(chunked(n_stages, *cost), text, replace(ASYNC, drafters=("draft",))) > 0.95


@settings(max_examples=n_examples(10, 25), deadline=None, derandomize=True)
@given(
    st.sampled_from([1, 2, 3, 4, 5, 8, 1000]),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([(0.0, 0.02), (0.0, 0.9), (0.5, 0.0), (0.9, 0.0), (1.5, 0.0)]),
)
def test_draft_tokens_from_the_head_are_never_much_slower_than_none(
    wrong_each: int, n_stages: int, cost: tuple[float, float]
) -> None:
    """They are there with each root, and claim to be right nine times in ten."""
    text = tokens(0.5, N)
    with drafting(Oracle({text.prompt: text.output}, wrong_each)):
        assert ratio(chunked(n_stages, *cost, draft_s=None), text, replace(ASYNC, drafters=("ngram",))) > 0.95


def test_good_drafts_pay() -> None:
    speculation = replace(ASYNC, drafters=("draft",))
    assert ratio(chunked(2, 0.9, 0.0), SyntheticTokens(0.8, 32, N), speculation) > 1.4
    assert ratio(chunked(2, 0.0, 0.02), SyntheticTokens(0.8, 32, N), speculation) > 2


def test_everything_arrives_and_states_are_copied() -> None:
    stats = checked(cluster((0.02,) * 3, 0.002, row_share=0.05, rolls_back=False), tokens(0.7), ASYNC)
    assert stats.counters.accepted_tokens > 0
    again = [run for run in stats.runs if run.n_rows > run.n_draft_tokens + 1 and run.n_draft_tokens]
    assert again or any(run.n_rows > 1 and not run.n_draft_tokens for run in stats.runs)


def test_recurrent_targets_are_known_by_their_shape() -> None:
    spec = read_cluster(Path("nodes4-gigabit"))
    assert spec.target is not None
    assert spec.draft is not None
    recurrent = replace(spec.target, layer_state_bytes=(0, 1000) * (spec.target.n_layer // 2))
    for target in (spec.target, recurrent):
        virtual = build(spec, placement_of(spec, target, (spec.draft,)), target, (spec.draft,))
        assert virtual.target.rolls_back == (target is spec.target)
        assert virtual.drafts[0].rolls_back


def of_users(n: int, n_each: int = 2) -> list[SimulatedRequest]:
    arrivals = Traffic(users=n, n_total=n * n_each).arrivals()
    return [SimulatedRequest(tokens(0.7, 100, seed=i), arrival) for i, arrival in enumerate(arrivals)]


def rows_by_request(run: Run) -> collections.Counter[int]:
    return collections.Counter(row.request for row in run.rows)


@pytest.mark.parametrize("n_users", [2, 3, 6])
@pytest.mark.parametrize("row_share", [0.02, 0.6])
def test_requests_have_equally_many_rows_in_a_run(n_users: int, row_share: float) -> None:
    own = cluster((0.02,) * 4, 0.002, row_share=row_share, rolls_back=False)
    with watched() as seen:
        serve(own, of_users(n_users), ASYNC, Sizes(n_ctx=10_000, n_requests=n_users))
    written = [run for run in seen.runs if run.rows and all(row.pos >= 3 for row in run.rows)]
    assert all(len(set(rows_by_request(run).values())) == 1 for run in written)
    if row_share < 0.1:
        assert any(len(rows_by_request(run)) > 1 and len(run.rows) > len(rows_by_request(run)) for run in written)


def test_prompts_have_runs_of_their_own() -> None:
    own, n_prompt = cluster((0.02,) * 3, 0.002, row_share=0.2, rolls_back=False), 400
    long = SimulatedRequest(tokens(0.7, 20, n_prompt), Arrival(at_s=1.0))
    with watched() as seen:
        served = serve(own, [*of_users(2, 1), long], ASYNC, Sizes(n_ctx=10_000, n_requests=3)).requests
    reading = [run for run in seen.runs if any(row.request == 3 and row.pos < n_prompt - 1 for row in run.rows)]
    assert len(reading) > 10
    assert all(set(rows_by_request(run)) == {3} for run in reading)
    first_s = served[2].token_times[0]
    assert all(sum(1.0 < at_s < first_s for at_s in other.token_times) > 5 for other in served[:2])


def test_a_prompt_gets_in_however_many_requests_decode() -> None:
    """Each accepted token in a run of its own, as rows are dear, and more of them than stages."""
    own = cluster((0.02,) * 2, row_share=1.0, rolls_back=False)
    late = SimulatedRequest(tokens(0.7, 20, 60), Arrival(at_s=2.0))
    served = serve(own, [*of_users(8, 1), late], ITERATIVE, Sizes(n_ctx=10_000, n_requests=9)).requests
    assert served[8].token_times[0] < 6 < min(stats.token_times[-1] for stats in served[:8])


@pytest.mark.parametrize("n_users", [2, 6])
def test_several_users_gain_nearly_as_much_as_where_states_go_back(n_users: int) -> None:
    sizes = Sizes(n_ctx=10_000, n_requests=n_users)

    def gain(rolls_back: bool) -> float:
        own = cluster((0.02,) * 8, 0.002, row_share=0.05, rolls_back=rolls_back)
        drafting_s, alone_s = (
            max(stats.ended or 0.0 for stats in serve(own, of_users(n_users, 1), speculation, sizes).requests)
            for speculation in (ASYNC, ITERATIVE)
        )
        return alone_s / drafting_s

    assert gain(rolls_back=False) > 0.85 * gain(rolls_back=True) > 1
