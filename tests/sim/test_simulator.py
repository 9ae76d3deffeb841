"""Requests on virtual clusters: times that can be worked out by hand, and what holds whatever the times are."""

from __future__ import annotations

import math
from dataclasses import astuple, replace
from pathlib import Path

import pytest
from display.test_trace import events
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from support.examples import n_examples
from support.virtual import ASYNC, CHAINS, ITERATIVE, NO_OVERHEADS, SPECULATIVE, checked, cluster, tokens

from ggpipe.cluster.links import Link, Overheads
from ggpipe.cluster.toml import read_cluster
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.display.tables.summary import request_object
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulator import simulate
from ggpipe.sim.text import SyntheticTokens
from ggpipe.sim.virtual_cluster import build, placement_of
from ggpipe.stats.records import RequestStats

STAGES_S = (0.010, 0.020, 0.030)


def gaps(stats: RequestStats) -> list[float]:
    return [round(gap, 9) for gap in stats.itl_s]


# By hand


def test_iterative_tokens_come_once_a_round() -> None:
    """A token takes all stages, one after the other, a message behind each, and the head."""
    overheads = replace(NO_OVERHEADS, run_s=0.001, event_s=0.002)
    own = cluster(STAGES_S, link=Link(0.005, 1e15), overheads=overheads)
    stats = checked(own, tokens(), ITERATIVE)
    round_s = sum(STAGES_S) + 3 * 0.001 + 3 * 0.005 + 0.002
    assert gaps(stats) == [pytest.approx(round_s, abs=1e-6)] * 59
    first_s = sum(STAGES_S) + 3 * 0.001 + 3 * 0.005 + 2 * 0.002  # the head took the request up as well
    assert stats.ttft_s == pytest.approx(first_s, abs=1e-6)
    assert not any(stats.drafted)


def test_threads_of_a_process_hand_over_and_take_turns() -> None:
    """A token goes to the stage's thread and back; the draft's Python waits for that of the stage beside it."""
    overheads = replace(NO_OVERHEADS, run_s=0.001, hand_s=0.003)
    plain = checked(cluster((0.1,), overheads=overheads), tokens(), ITERATIVE)
    assert gaps(plain) == [pytest.approx(0.1 + 0.001 + 2 * 0.003, abs=1e-9)] * 59
    busy = replace(overheads, run_s=0.02)
    apart = checked(cluster((0.1, 0.1), 0.01, cores=4, overheads=busy), tokens(0.9), ASYNC)
    inside = checked(cluster((0.1, 0.1), 0.01, cores=4, overheads=busy, draft_rank=False), tokens(0.9), ASYNC)
    assert inside.decode_s > apart.decode_s


def test_messages_take_time() -> None:
    fast = checked(cluster(STAGES_S), tokens(), ITERATIVE)
    slow = checked(cluster(STAGES_S, link=Link(1e-6, 1e6)), tokens(), ITERATIVE)
    run = slow.runs[-1]
    n_bytes = sum(span.sent_bytes for span in run.spans)
    assert n_bytes > 2 * 1000, "two borders, and the answer to the head"
    more_s = slow.itl_s[-1] - fast.itl_s[-1]
    assert n_bytes * 1e-6 <= more_s <= (n_bytes + 200) * 1e-6


def test_a_prompts_chunks_overlap() -> None:
    """The second chunk is in the first stage while the first is in the second."""
    own = cluster((0.1, 0.1), row_share=0.1)  # a chunk of 10 rows takes 0.19 s
    stats = checked(own, tokens(n_prompt=40), ITERATIVE, Sizes(n_ubatch=10))
    assert stats.ttft_s == pytest.approx(5 * 0.19, abs=1e-3)
    unbounded = checked(own, tokens(n_prompt=40), ITERATIVE)
    assert unbounded.ttft_s == pytest.approx(6 * 0.17, abs=1e-3), "five chunks of 8 rows"
    alone = checked(cluster((0.1,), row_share=0.1), tokens(n_prompt=40), ITERATIVE)
    assert alone.ttft_s == pytest.approx(0.1 + 39 * 0.01, abs=1e-3), "one chunk"


def test_speculative_rounds() -> None:
    """Draft, verify, repeat: a round gives the accepted draft tokens and one more."""
    text = tokens(0.6)
    own = cluster((0.1, 0.1), 0.01)
    stats = checked(own, text, replace(SPECULATIVE, n_draft=3))
    right = [text.candidates(i, False)[0][0] == text.output[i] for i in range(60)]
    place, n_rounds = 1, 0  # the prompt brings the first
    while place < 60:
        n_rounds += 1
        n = next((n for n in range(3) if place + n >= 59 or not right[place + n]), 3)
        place += n + 1
    assert len(stats.runs) == 1 + n_rounds
    assert stats.counters.accepted_tokens == 59 - n_rounds
    # Two stages and up to three draft tokens, whose drafting begins when the token before them is known.
    assert max(gaps(stats)) == pytest.approx(0.2 + 3 * 0.01, abs=1e-3)


def test_full_agreement_is_limited_by_the_slowest_stage() -> None:
    own = cluster((0.1,) * 4, 0.001)
    stats = checked(own, tokens(1.0, 200), ASYNC)
    assert stats.counters.acceptance == 1.0
    assert stats.counters.cancelled_runs == 0
    assert stats.decode_tps is not None
    assert stats.decode_tps > 0.9 / 0.1, "a token in each of the slowest stage's times, or more where runs hold some"


def test_a_draft_that_expects_to_be_wrong_drafts_nothing() -> None:
    stats = checked(cluster((0.1,) * 4, 0.001), tokens(0.0), ASYNC)
    assert stats.counters.drafted_tokens == 0


def test_no_agreement_costs_nothing() -> None:
    """Rejected draft tokens are cancelled at once: each token takes a round, as without a draft."""
    own = cluster((0.1,) * 4, 0.001)
    stats, plain = (checked(own, tokens(0.0), mode) for mode in (CHAINS, ITERATIVE))
    assert stats.counters.accepted_tokens == 0
    assert not any(stats.drafted)
    assert stats.decode_tps is not None
    assert plain.decode_tps is not None
    assert 0.9 < stats.decode_tps / plain.decode_tps <= 1 + 1e-9
    assert stats.counters.cancelled_runs > 50


def test_a_single_stage_has_draft_tokens_only_where_rows_are_cheap() -> None:
    """A draft token behind the root's run saves no time there, and drafting may take cores from the stage."""
    dear, cheap = (cluster((0.020,), 0.002, row_share=share) for share in (1.2, 0.1))
    text = tokens(0.6, 200)
    plain, rare = checked(dear, text, ITERATIVE), checked(dear, text, ASYNC)
    assert rare.decode_s < 1.03 * plain.decode_s
    often = checked(cheap, text, ASYNC)
    assert often.decode_s < 0.8 * plain.decode_s
    assert len(rare.draft_runs) < len(often.draft_runs) / 2


def test_stages_on_the_same_cores_slow_each_other_down() -> None:
    apart, together = (cluster((0.1, 0.1), 0.05, cores=n) for n in (3, 1))
    text = tokens(0.9)
    fast, slow = (checked(own, text, ASYNC) for own in (apart, together))
    assert fast.decode_s < slow.decode_s
    assert checked(apart, text, ITERATIVE).decode_s == checked(together, text, ITERATIVE).decode_s
    crowded = checked(cluster((0.1, 0.1), 0.05, cores=3, crowd=0.5), text, ASYNC)
    assert fast.decode_s < crowded.decode_s


def test_a_draft_inside_the_head() -> None:
    own = cluster((0.1, 0.1), 0.01, draft_rank=False)
    stats = checked(own, tokens(0.8), ASYNC)
    assert [(rank.rank, rank.draft) for rank in stats.ranks] == [(0, False), (1, False), (0, True)]
    assert all(rank.busy_s > 0 for rank in stats.ranks)
    plain = checked(own, tokens(0.8), ITERATIVE)
    assert stats.decode_s < plain.decode_s
    # Head and draft share a core, so what both did cannot be more than the time there was.
    assert sum(rank.compute_s for rank in stats.ranks if rank.rank == 0) > 0


def test_without_a_draft_the_mode_is_iterative() -> None:
    own = cluster(STAGES_S)
    assert checked(own, tokens(), ASYNC).token_times == checked(own, tokens(), ITERATIVE).token_times
    assert checked(own, tokens(), ASYNC).speculation.mode == "iterative"


def test_a_head_that_only_coordinates() -> None:
    from ggpipe.core.layout import Layout
    from ggpipe.sim.virtual_cluster import PipelineSpec

    own = cluster(STAGES_S, 0.002)
    stages = {1: own.target.stages[0], 2: own.target.stages[1]}
    target = PipelineSpec(layout=Layout.of_ranks([(0, 0), (0, 2), (2, 3)]), stages=stages, row_bytes=1000)
    own = replace(own, target=target, node_of=(0, 1, 2, 3))
    stats = checked(own, tokens(), ASYNC)
    assert [rank.runs > 0 for rank in stats.ranks] == [False, True, True, True]


def test_a_draft_over_two_ranks() -> None:
    from ggpipe.core.layout import Layout
    from ggpipe.sim.virtual_cluster import PipelineSpec, StageSpec, VirtualNode

    own = cluster((0.1, 0.1), 0.01)
    stage = StageSpec(threads=1, cost=own.drafts[0].stages[2].cost)
    draft = PipelineSpec(layout=Layout.of_ranks([(0, 1), (1, 2)], 2), stages={2: stage, 3: stage}, row_bytes=100)
    own = replace(own, drafts=(draft,), nodes=(*own.nodes, VirtualNode(name="more", cores=1)), node_of=(0, 1, 2, 3))
    stats = checked(own, tokens(0.8), ASYNC)
    assert all(rank.runs > 0 for rank in stats.ranks)
    assert all(len(run.spans) == 2 for run in stats.draft_runs)


# Whatever the times


def test_the_same_simulation_gives_the_same_result() -> None:
    own = cluster((0.1, 0.13, 0.07), 0.01)
    first, second = (simulate(own, tokens(seed=5), ASYNC, 60) for _ in range(2))
    assert astuple(first) == astuple(second)
    assert first.token_times != simulate(own, tokens(seed=6), ASYNC, 60).token_times


def test_a_simulation_leaves_the_statistics_of_a_real_request() -> None:
    own = cluster((0.1, 0.1), 0.01)
    stats = checked(own, tokens(0.8), ASYNC)
    found = events(stats, stats.ranks)
    assert {event["ph"] for event in found} == {"M", "X", "b", "e", "s", "f", "i", "C"}
    assert any(event["cat"] == "run,cancelled" for event in found if event["ph"] == "X")
    assert sum(event["ph"] == "i" for event in found) == 60
    shown = request_object(stats, stats.ranks)
    assert (shown["mode"], shown["n_generated_tokens"], shown["finish"]) == ("async", 60, "length")
    assert [rank["runs"] for rank in shown["ranks"]][:2] == [len(stats.runs)] * 2
    for rank in shown["ranks"]:
        assert 0 < rank["busy_s"] <= shown["elapsed_s"]


def test_a_text_that_does_not_fit_the_context() -> None:
    own = cluster((0.1, 0.1), 0.01)
    stats = checked(own, tokens(0.8), ASYNC, Sizes(n_ctx=64))
    assert stats.decode_s > 0
    with pytest.raises(ValueError, match="do not fit a context of 63"):
        simulate(own, tokens(), ASYNC, 60, Sizes(n_ctx=63))
    with pytest.raises(ValueError, match="60 tokens, fewer than 61"):
        simulate(own, tokens(), ASYNC, 61)


def test_a_single_token() -> None:
    for mode in (ITERATIVE, SPECULATIVE, ASYNC):
        stats = checked(cluster((0.1, 0.1), 0.01), tokens(n_text=1), mode)
        assert len(stats.token_times) == 1


def test_32_nodes_and_many_tokens(full: bool) -> None:
    n_text = 1000 if full else 200
    spec = read_cluster(Path("nodes32-gigabit"))
    assert spec.target is not None
    own = build(spec, placement_of(spec, spec.target, spec.drafts), spec.target, spec.drafts)
    text = SyntheticTokens(0.8, 128, n_text, 1)
    stats = simulate(own, text, ASYNC, n_text)
    assert stats.n_generated == n_text
    assert len([rank for rank in stats.ranks if not rank.draft and rank.runs]) == 32


SECONDS = st.floats(1e-4, 1.0).map(lambda s: float(f"{s:.2g}"))
CLUSTERS = st.builds(
    cluster,
    st.lists(SECONDS, min_size=1, max_size=5),
    st.none() | SECONDS,
    row_share=st.sampled_from((0.0, 0.1, 1.0)),
    draft_rank=st.booleans(),
    cores=st.none() | st.integers(1, 4),
    crowd=st.sampled_from((1.0, 0.7)),
    link=st.builds(Link, st.floats(0, 0.3), st.sampled_from((1e4, 1e6, 1e9))),
    overheads=st.sampled_from(
        (NO_OVERHEADS, Overheads(), replace(Overheads(), poll_delay_s=0.05, abort_s=0.1, event_s=0.02))
    ),
)
SPECULATIONS = st.builds(
    SpeculationConfig,
    mode=st.sampled_from(("iterative", "speculative", "async")),
    n_draft=st.integers(1, 9),
    p_accept=st.sampled_from((0.0, 0.3, 0.6)),
    p_split=st.sampled_from((0.05, 0.3)),
    p_recovery=st.sampled_from((0.0, 0.1)),
    p_decay=st.sampled_from((0.0, 0.05)),
    n_parallel=st.integers(1, 4),
    cancel=st.booleans(),
    continuous=st.booleans(),
)


@settings(deadline=None, max_examples=n_examples(50, 150), suppress_health_check=[HealthCheck.too_slow])
@given(
    CLUSTERS,
    SPECULATIONS,
    st.floats(0, 1),
    st.integers(1, 30),
    st.integers(1, 40),
    st.integers(0, 3),
    st.integers(0, 40),
)
def test_any_cluster_writes_the_text(
    own: object, speculation: SpeculationConfig, acceptance: float, n: int, n_prompt: int, seed: int, spare: int
) -> None:
    text = tokens(acceptance, n, n_prompt, seed)
    sizes = Sizes(n_prompt + n + spare, 16, 8)
    stats = checked(own, text, speculation, sizes, each=True)  # type: ignore[arg-type]
    events(stats, stats.ranks)
    if stats.decode_tps is not None:
        assert math.isfinite(stats.decode_tps)
