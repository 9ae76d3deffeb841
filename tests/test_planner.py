"""Plans: never more than memory holds, layers in proportion to speed, and as good as any other plan."""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ggpipe.config import SpeculationConfig
from ggpipe.core.layout import lay_out, parse_shares, shares_text
from ggpipe.errors import UsageError
from ggpipe.sim.arrangements import Arrangement, Place, arrangements
from ggpipe.sim.candidates import Candidates, Needs
from ggpipe.sim.cluster import Link
from ggpipe.sim.judge import Candidate, Judge
from ggpipe.sim.planner import Plan, Wish, make_plan
from ggpipe.sim.recording import BUNDLED, read
from ggpipe.sim.setup import MadeUp
from ggpipe.sim.shapes import ModelShape, even_shape
from ggpipe.sim.simulator import Sizes
from ggpipe.sim.spec import ClusterSpec, NodeSpec

GB = 1e9
TARGET = even_shape("target", 24, 40 * GB, 70e9, 8192, 320e3, 32000)
DRAFT = even_shape("draft", 8, 1 * GB, 1.8e9, 2048, 32e3, 32000)
SMALL = even_shape("target", 4, 8 * GB, 14e9, 4096, 120e3, 32000)
NETWORK, LOCAL = Link(80e-6, 1e8), Link(40e-6, 5e9)


def node(name: str, speed: float = 1.0, memory_gb: float = 64, cores: int = 8) -> NodeSpec:
    """A machine that is `speed` times as fast as any."""
    return NodeSpec(name, cores, memory_gb * GB, speed * 40 * GB, speed * 8 * GB, speed * 50e9)


def cluster(*nodes: NodeSpec, ranks: Sequence[int] | None = None) -> ClusterSpec:
    on = tuple(range(len(nodes)) if ranks is None else ranks)
    return ClusterSpec("test", nodes, on, (), None, None, NETWORK, LOCAL)


def wish(effort: float = 0.2, tokens: MadeUp | None = None, **needs: object) -> Wish:
    return Wish(Needs(4096, 512, **needs), tokens or MadeUp(0.7, 32), tunes=False, effort=effort)  # type: ignore[arg-type]


def layers_of(plan: Plan) -> list[int]:
    """Of the target's ranks."""
    return [rank.layers[1] - rank.layers[0] for rank in plan.ranks if not rank.drafts]


def check(plan: Plan, spec: ClusterSpec, target: ModelShape) -> None:
    """What holds of any plan."""
    used: Counter[str] = Counter()
    for rank in plan.ranks:
        used[rank.node] += rank.memory.total  # type: ignore[assignment]
        assert rank.threads >= 1
    for machine in spec.nodes:
        assert used[machine.name] <= machine.memory_bytes
    layout = plan.placement.layout
    assert layout is not None
    assert sum(layers_of(plan)) == target.n_layer
    shares, draft_shares = parse_shares(shares_text(layout, plan.placement.draft_layout))
    assert lay_out(target.n_layer, len(layout.layers), shares) == layout
    assert len(draft_shares) == sum(rank.drafts for rank in plan.ranks) == len(plan.placement.draft_on)
    assert len(plan.placement.threads) == len(plan.ranks) == len(plan.places)


nodes_strategy = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([2, 6, 12, 24, 60]), st.sampled_from([1, 2, 8])),
    min_size=1,
    max_size=5,
)


@settings(max_examples=25, deadline=None)
@given(nodes_strategy, st.booleans(), st.booleans())
def test_memory_is_never_exceeded(machines: list[tuple[float, int, int]], in_order: bool, has_draft: bool) -> None:
    spec = cluster(*(node(f"node{i}", *machine) for i, machine in enumerate(machines)))
    needs = {"in_order": in_order, "must_draft": in_order and has_draft}
    try:
        plan = make_plan(spec, TARGET, DRAFT if has_draft else None, wish(0.05, **needs))
    except UsageError:
        # With half of the machines' memory it would fit, if it were in one place.
        assert sum(memory for _, memory, _ in machines) < 2 * 45 or in_order
    else:
        check(plan, spec, TARGET)
        assert len(plan.ranks) == len(machines) or not in_order


def test_layers_go_by_speed() -> None:
    spec = cluster(node("a", 1), node("b", 2), node("c", 3), node("draft", 1))
    plan = make_plan(spec, TARGET, DRAFT, replace(wish(0.5, n_ranks=4), mode="async"))
    check(plan, spec, TARGET)
    layers = {rank.node: rank.layers[1] - rank.layers[0] for rank in plan.ranks}
    drafts = next(rank.node for rank in plan.ranks if rank.drafts)
    assert drafts in ("a", "draft")
    slow = "a" if drafts == "draft" else "draft"
    assert layers[slow] < layers["b"] < layers["c"]
    for name, share in ((slow, 1 / 6), ("b", 2 / 6), ("c", 3 / 6)):
        assert abs(layers[name] - 24 * share) <= 3


def test_layers_go_where_memory_is() -> None:
    """The fast machine can hold a quarter of the model."""
    spec = cluster(node("fast", 4, 14), node("large", 1, 64))
    plan = make_plan(spec, TARGET, None, wish())
    check(plan, spec, TARGET)
    assert {rank.node: rank.layers[1] - rank.layers[0] for rank in plan.ranks}["fast"] in (6, 7)


def test_one_rank_is_best_for_plain_decoding_where_it_fits() -> None:
    spec = cluster(*(node(f"node{i}") for i in range(4)))
    plan = make_plan(spec, TARGET, None, wish())
    assert [rank.layers for rank in plan.ranks] == [(0, 24)]
    assert plan.best.mode == "iterative"
    assert set(plan.predictions) == {"iterative"}
    with_draft = make_plan(spec, TARGET, DRAFT, wish())
    assert with_draft.best.mode == "async"
    assert with_draft.best.tokens_per_s > 1.5 * plan.best.tokens_per_s
    assert len(with_draft.ranks) > 2


def test_a_useless_draft_is_left_out() -> None:
    spec = cluster(node("a"), node("b"))
    plan = make_plan(spec, TARGET, DRAFT, wish(tokens=MadeUp(0.02, 32)))
    assert plan.best.mode == "iterative"
    assert not any(rank.drafts for rank in plan.ranks)
    assert not plan.draft_inside
    assert set(plan.elsewhere) == {"speculative", "async"}


def test_ranks_in_order_keep_their_places() -> None:
    spec = replace(cluster(node("a", 1), node("b", 2), node("c", 1), node("d", 0.5)), threads=(8, 4, 8, 2))
    plan = make_plan(spec, TARGET, DRAFT, wish(0.3, in_order=True, must_draft=True))
    check(plan, spec, TARGET)
    assert [rank.node for rank in plan.ranks] == ["a", "b", "c", "d"]
    assert [rank.threads for rank in plan.ranks] == [8, 4, 8, 2]
    assert plan.ranks[3].drafts or plan.draft_inside
    assert all(n > 0 for n in layers_of(plan)[1:])


def test_equal_ranks_without_a_draft_get_equal_parts() -> None:
    spec = cluster(*(node(f"node{i}") for i in range(3)))
    assert layers_of(make_plan(spec, TARGET, None, wish(in_order=True))) == [8, 8, 8]


def test_as_many_ranks_as_wanted() -> None:
    spec = cluster(node("slow", 0.5), node("a"), node("b"), node("c"))
    for n_ranks in (1, 2, 4):
        plan = make_plan(spec, TARGET, DRAFT, wish(0.1, n_ranks=n_ranks))
        assert len(plan.ranks) == n_ranks
        if n_ranks < 4:
            assert "slow" not in [rank.node for rank in plan.ranks]
    with pytest.raises(UsageError, match="-r 5: there is room for 4 ranks"):
        make_plan(spec, TARGET, DRAFT, wish(n_ranks=5))


def test_measured_links_go_with_their_ranks() -> None:
    links = {(a, b): Link((10 * a + b) * 1e-6, 1e9) for a, b in itertools.permutations(range(3), 2)}
    spec = replace(cluster(node("a"), node("b"), node("c")), links=links)
    arrangement = Arrangement((Place(2, 2), Place(0, 0)), (8, 8), Place(1, 1), skips=(True, True))
    placed, placement = arrangement.placed(spec, (20, 4), 8)
    assert placement.node_of == (2, 0, 1)
    assert {pair: round(link.latency_s * 1e6) for pair, link in placed.links.items()} == {
        (0, 1): 20, (1, 0): 2, (0, 2): 21, (2, 0): 12, (1, 2): 1, (2, 1): 10,
    }  # fmt: skip


@pytest.mark.parametrize(("speeds", "acceptance"), [((1, 3), 0.5), ((2, 1, 1), 0.8)])
def test_no_plan_is_better(speeds: tuple[float, ...], acceptance: float) -> None:
    """Beside each split of each arrangement, judged alike."""
    spec = cluster(*(node(f"node{i}", speed) for i, speed in enumerate(speeds)))
    own = wish(1.0, MadeUp(acceptance, 32))
    plan = make_plan(spec, SMALL, DRAFT, own)
    check(plan, spec, SMALL)
    judge = Judge(spec, SMALL, DRAFT, own.tokens, Sizes())
    possible = Candidates(spec, SMALL, DRAFT, own.needs)
    best = 0.0
    for arrangement in arrangements(spec, True, lambda i: speeds[i]):
        choices = [range(0 if skip else 1, SMALL.n_layer + 1) for skip in arrangement.skips]
        for counts in itertools.product(*choices):
            candidate = Candidate(arrangement, counts)
            if sum(counts) == SMALL.n_layer and possible.fits(candidate):
                best = max(best, judge.ask(candidate, "async", carefully=True).tokens_per_s)
    assert plan.best.tokens_per_s >= 0.98 * best


def test_flags_are_found() -> None:
    """A draft that is sure of itself and often wrong is to stop early: that is what -pa is for."""
    spec = cluster(node("a"), node("b"), node("c"))
    tokens = MadeUp(0.5, 32)
    tuned = make_plan(spec, SMALL, DRAFT, replace(wish(0.3, tokens), tunes=True, mode="speculative"))
    plain = make_plan(spec, SMALL, DRAFT, replace(wish(0.3, tokens), mode="speculative"))
    assert tuned.best.speculation != SpeculationConfig("speculative")
    assert tuned.best.tokens_per_s > 1.02 * plain.best.tokens_per_s


def test_a_recording_can_judge() -> None:
    spec = cluster(node("a"), node("b"))
    own = Wish(Needs(4096, 512), read(BUNDLED), mode="async", tunes=False, effort=0.1)
    assert make_plan(spec, SMALL, DRAFT, own).best.tokens_per_s > 0


@pytest.mark.parametrize(
    ("nodes", "needs", "message"),
    [
        ((node("a", 1, 16), node("b", 1, 8)), {}, r"weights of 40 GB, .* a 15.2 GB, b 7.6 GB; [\d.]+ GB are missing"),
        ((node("a", 1, 64),), {"n_ctx": 500_000}, r"KV cache of 160 GB.* 1\d\d GB are missing: .*lower -c"),
        (
            [node(f"node{i}") for i in range(30)],
            {"in_order": True},
            r"no way to divide target's 24 layers over 30 ranks fits",
        ),
    ],
)
def test_what_does_not_fit_gets_one_line(nodes: Sequence[NodeSpec], needs: dict[str, int], message: str) -> None:
    own = wish()
    own = replace(own, needs=replace(own.needs, **needs))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message) as caught:
        make_plan(cluster(*nodes), TARGET, None, own)
    assert "\n" not in str(caught.value)


def test_a_draft_that_does_not_fit_is_left_out_unless_it_is_wanted() -> None:
    spec = cluster(node("a", 1, 26), node("b", 1, 26))
    large = replace(DRAFT, head_bytes=round(20 * GB))
    assert make_plan(spec, TARGET, large, wish()).best.mode == "iterative"
    with pytest.raises(UsageError, match=r"target does not fit: .*a draft of 2\d.\d GB.* are missing"):
        make_plan(spec, TARGET, large, replace(wish(), mode="async"))


def test_the_same_cluster_gets_the_same_plan() -> None:
    spec = cluster(node("a"), node("b", 2), node("c"))
    assert make_plan(spec, SMALL, DRAFT, wish()) == make_plan(spec, SMALL, DRAFT, wish())
