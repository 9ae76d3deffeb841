"""Targets that cannot roll back: what is decoded again counts, so drafting is never much slower than decoding alone."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import n_examples
from support.oracle import Oracle, drafting
from support.virtual import ASYNC, ITERATIVE, checked, cluster, tokens

from ggpipe.cluster.toml import read_cluster
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.sim.simulator import simulate
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
