"""Never slower than without drafters: simulated drafts that are never right, slow, or short of cores."""

from __future__ import annotations

import pytest
from support.virtual import ASYNC, ITERATIVE, checked, cluster, tokens

from ggpipe.cluster.links import Overheads
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.request import Counters
from ggpipe.sim.simulator import simulate
from ggpipe.sim.text import SyntheticTokens
from ggpipe.sim.virtual_cluster import VirtualCluster
from ggpipe.stats.summary import summary_of

N = 400


def against_iterative(own: VirtualCluster, agreement: float, kind: str = "calibrated") -> tuple[float, Counters]:
    """Speed relative to iterative decoding, and what was counted."""
    text = SyntheticTokens(agreement, 32, N, 3, kind)  # type: ignore[arg-type]
    base, own_stats = (simulate(own, text, speculation, N) for speculation in (ITERATIVE, ASYNC))
    assert base.decode_tps is not None
    assert own_stats.decode_tps is not None
    return own_stats.decode_tps / base.decode_tps, own_stats.counters


def test_a_draft_that_is_never_right() -> None:
    own = cluster((0.02, 0.02), 0.002, row_share=0.8)
    ratio, counters = against_iterative(own, 0.7, "never-right")
    assert ratio > 0.98
    assert counters.accepted_tokens == 0
    assert counters.paused_tokens[0] > 0.75 * N


def test_a_draft_that_is_never_right_on_the_targets_cores() -> None:
    own = cluster((0.02, 0.02), 0.004, row_share=0.8, cores=2, crowd=0.85, overheads=Overheads())
    ratio, counters = against_iterative(own, 0.7, "never-right")
    assert ratio > 0.95
    assert counters.paused_tokens[0] > 0.6 * N


@pytest.mark.parametrize("draft_s", [0.1, 0.4])
def test_a_draft_that_is_slower_than_the_target(draft_s: float) -> None:
    ratio, counters = against_iterative(cluster((0.02, 0.02), draft_s, row_share=0.8), 0.7)
    assert ratio > 0.98
    assert counters.paused_tokens[0] > 0.5 * N


def test_a_draft_that_is_short_of_cores() -> None:
    """Three processes on one core: whatever the draft computes, the target waits for."""
    own = cluster((0.02, 0.02), 0.02, row_share=0.8, cores=1, overheads=Overheads())
    ratio, counters = against_iterative(own, 0.7)
    assert ratio > 0.95
    assert counters.paused_tokens[0] > 0.5 * N


def test_a_draft_that_pays_does_not_pause() -> None:
    ratio, counters = against_iterative(cluster((0.02, 0.02), 0.002, row_share=0.8), 0.7)
    assert ratio > 1.35
    assert not counters.paused_tokens


def test_it_says_so() -> None:
    own = cluster((0.02, 0.02), 0.002, row_share=0.8)
    wrong = SyntheticTokens(0.7, 32, N, 3, "never-right")
    stats = simulate(own, wrong, ASYNC, N)
    assert summary_of([stats]).draft_paused == stats.counters.paused_tokens[0] / N
    assert summary_of([checked(own, tokens(0.9), ASYNC)]).draft_paused is None


def test_drafters_take_turns_with_a_target_whose_cores_they_share() -> None:
    """Where rows are nearly free: nearly as fast as the best of several synchronous settings, without any setting."""
    own = cluster((0.0115, 0.0115), 0.0004, row_share=0.01, cores=2, crowd=0.85, overheads=Overheads())
    text = SyntheticTokens(0.65, 32, N, 3, "calibrated")
    synchronous = [SpeculationConfig(mode="speculative", n_draft=n) for n in (3, 5)]
    best, own_tps = (
        max(simulate(own, text, one, N).decode_tps or 0.0 for one in tried) for tried in (synchronous, (ASYNC,))
    )
    assert own_tps > 0.9 * best, own_tps / best
