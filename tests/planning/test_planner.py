"""Plans: never more than memory holds, layers in proportion to speed, and as good as any other plan."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.examples import n_examples
from support.planning import DRAFT, GB, SMALL, TARGET, check, cluster, fastest, layers_of, node, request

from ggpipe.cluster.links import Link
from ggpipe.cluster.model_shape import ModelShape, block_head_shape, head_shape
from ggpipe.cluster.recording import BUNDLED, read
from ggpipe.cluster.spec import NodeSpec
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.core.drafters.eagle import HORIZON
from ggpipe.errors import MemoryNeededError, UsageError
from ggpipe.planning.candidates import CandidateSearch
from ggpipe.planning.placements import Arrangement, Place, arrangements
from ggpipe.planning.planner import make_plan
from ggpipe.sim.simulation_spec import SyntheticText

nodes_strategy = st.lists(
    st.tuples(st.sampled_from([0.5, 1.0, 2.0]), st.sampled_from([2, 6, 12, 24, 60]), st.sampled_from([1, 2, 8])),
    min_size=1,
    max_size=5,
)


@settings(max_examples=n_examples(10, 25), deadline=None)
@given(
    nodes_strategy,
    st.booleans(),
    st.booleans(),
    st.booleans(),
    st.lists(st.sampled_from([0, 0, 0.5, 3.0]), min_size=5, max_size=5),
)
def test_memory_is_never_exceeded(
    machines: list[tuple[float, int, int]], in_order: bool, has_draft: bool, groups: bool, disks: list[float]
) -> None:
    """`disks`: speeds in GB/s; 0: unknown, so that nothing is streamed there."""
    both = enumerate(zip(machines, disks, strict=False))
    spec = cluster(*(replace(node(f"node{i}", *one), disk_bytes_per_s=disk * GB) for i, (one, disk) in both))
    try:
        plan = make_plan(
            spec,
            TARGET,
            DRAFT if has_draft else None,
            request(0.05, groups=groups, in_order=in_order, must_draft=in_order and has_draft),
        )
    except UsageError:
        # With half of the machines' memory it would fit, if it were in one place.
        assert sum(memory for _, memory, _ in machines) < 2 * 45 or in_order
    else:
        check(plan, spec, TARGET)
        assert len(plan.ranks) == len(machines) or not in_order


@pytest.mark.parametrize("mode", ["async", "speculative"])
def test_no_more_stages_than_a_heads_horizon_feeds(mode: Mode) -> None:
    """A group is one stage."""
    target, machines = replace(TARGET, max_parts=4), [node(f"node{i}") for i in range(13)]
    spec, own = cluster(*machines), replace(request(0.05), mode=mode)
    plan = make_plan(spec, target, head_shape(target), own)
    check(plan, spec, target)
    assert len(layers_of(plan)) <= HORIZON + 1
    assert mode == "speculative" or len(layers_of(plan)) > 4
    short = replace(own, effort=0.2, tunes=False, constraints=replace(own.constraints, groups=True))
    in_groups = make_plan(spec, target, head_shape(target), short)
    check(in_groups, spec, target)
    assert in_groups.placement.layout is not None
    assert len(in_groups.placement.layout.stages) <= HORIZON + 1
    more = make_plan(spec, target, DRAFT, replace(own, mode="async"))
    assert len(layers_of(more)) > HORIZON + 1, "a draft model feeds all of them"
    with pytest.raises(UsageError, match="`n_ranks` 13: an EAGLE-3 head feeds 9 stages at most"):
        make_plan(spec, target, head_shape(target), replace(request(0.05, n_ranks=13), mode=mode))
    shallow = replace(block_head_shape(target), horizon=3)
    with pytest.raises(UsageError, match="`n_ranks` 13: a DFlash head feeds 4 stages at most"):
        make_plan(spec, target, shallow, replace(request(0.05, n_ranks=13), mode=mode))


def test_faster_machines_get_more_layers() -> None:
    spec = cluster(node("a", 1), node("b", 2), node("c", 3), node("draft", 1))
    plan = make_plan(spec, TARGET, DRAFT, replace(request(0.5, n_ranks=4), mode="async"))
    check(plan, spec, TARGET)
    layers = {rank.node: rank.layers[1] - rank.layers[0] for rank in plan.ranks}
    drafts = next(rank.node for rank in plan.ranks if rank.drafts)
    assert drafts in ("a", "draft")
    slow = "a" if drafts == "draft" else "draft"
    assert layers[slow] < layers["b"] < layers["c"]
    assert layers["c"] >= 24 * 3 / 6 - 3, "at least its share; more of them shorten a token's way"


def test_layers_go_to_machines_with_memory() -> None:
    """The fast machine can hold a quarter of the model."""
    spec = cluster(node("fast", 4, 14), node("large", 1, 64))
    plan = make_plan(spec, TARGET, None, request())
    check(plan, spec, TARGET)
    assert {rank.node: rank.layers[1] - rank.layers[0] for rank in plan.ranks}["fast"] in (6, 7)


def test_one_rank_is_best_for_plain_decoding_where_it_fits() -> None:
    spec = cluster(*(node(f"node{i}") for i in range(4)))
    plan = make_plan(spec, TARGET, None, request())
    assert [rank.layers for rank in plan.ranks] == [(0, 24)]
    assert plan.best.mode == "iterative"
    assert set(plan.predictions) == {"iterative"}
    with_draft = make_plan(spec, TARGET, DRAFT, request())
    assert with_draft.best.mode == "async"
    assert with_draft.best.tokens_per_s > 1.5 * plan.best.tokens_per_s
    assert len(with_draft.ranks) > 2


@pytest.mark.parametrize("is_slow", [False, True])
def test_the_rate_of_the_draft(is_slow: bool) -> None:
    """A draft of half the target's size takes longer than one of four stages."""
    spec = cluster(*(node(f"node{i}", memory_gb=32) for i in range(5)))
    draft = replace(DRAFT, layer_bytes=tuple(20 * n for n in DRAFT.layer_bytes)) if is_slow else DRAFT
    plan = make_plan(spec, TARGET, draft, replace(request(0.05, n_ranks=5), mode="async"))
    rate = plan.draft_rate
    assert rate is not None
    assert rate.inside == plan.draft_inside
    assert rate.node == next((rank.node for rank in plan.ranks if rank.drafts), plan.ranks[0].node)
    assert (rate.token_s > rate.stage_s) == is_slow
    assert make_plan(spec, TARGET, None, request(0.05)).draft_rate is None


def test_a_useless_draft_is_left_out() -> None:
    spec = cluster(node("a"), node("b"))
    plan = make_plan(spec, TARGET, DRAFT, request(tokens=SyntheticText(agreement=0.02, n_prompt=32)))
    assert plan.best.mode == "iterative"
    assert not any(rank.drafts for rank in plan.ranks)
    assert not plan.draft_inside
    assert set(plan.elsewhere) == {"speculative", "async"}


def test_a_plan_with_a_rank_for_the_draft_uses_it() -> None:
    """Two ranks are wanted, and two stages over this link are slower than a useless draft."""
    spec = replace(cluster(node("a"), node("b")), network=Link(0.2, 1e9))
    plan = make_plan(spec, TARGET, DRAFT, request(n_ranks=2, tokens=SyntheticText(agreement=0.0, n_prompt=32)))
    assert [rank.drafts for rank in plan.ranks] == [False, True]
    assert plan.predictions["iterative"].tokens_per_s > plan.best.tokens_per_s
    assert plan.best.mode != "iterative"


def test_ranks_in_order_keep_their_numbers() -> None:
    spec = replace(cluster(node("a", 1), node("b", 2), node("c", 1), node("d", 0.5)), threads=(8, 4, 8, 2))
    plan = make_plan(spec, TARGET, DRAFT, request(0.3, in_order=True, must_draft=True))
    check(plan, spec, TARGET)
    assert [rank.node for rank in plan.ranks] == ["a", "b", "c", "d"]
    assert [rank.threads for rank in plan.ranks] == [8, 4, 8, 2]
    assert plan.ranks[3].drafts or plan.draft_inside
    assert all(n > 0 for n in layers_of(plan)[1:])


def test_equal_ranks_without_a_draft_get_equal_parts() -> None:
    spec = cluster(*(node(f"node{i}") for i in range(3)))
    assert layers_of(make_plan(spec, TARGET, None, request(in_order=True))) == [8, 8, 8]


def test_the_number_of_ranks_is_as_asked() -> None:
    spec = cluster(node("slow", 0.5), node("a"), node("b"), node("c"))
    for n_ranks in (1, 2, 4):
        plan = make_plan(spec, TARGET, DRAFT, request(0.1, n_ranks=n_ranks))
        assert len(plan.ranks) == n_ranks
        if n_ranks < 4:
            assert "slow" not in [rank.node for rank in plan.ranks]
    with pytest.raises(UsageError, match="`n_ranks` 5: there is room for 4 ranks"):
        make_plan(spec, TARGET, DRAFT, request(n_ranks=5))


def test_measured_links_stay_with_their_ranks() -> None:
    links = {(a, b): Link((10 * a + b) * 1e-6, 1e9) for a, b in itertools.permutations(range(3), 2)}
    spec = replace(cluster(node("a"), node("b"), node("c")), links=links)
    arrangement = Arrangement(
        target=(Place(2, 2), Place(0, 0)), threads=(8, 8), draft=(Place(1, 1),), skips=(True, True)
    )
    placed, placement = arrangement.placed(spec, (20, 4), 8)
    assert placement.node_of == (2, 0, 1)
    assert {pair: round(link.latency_s * 1e6) for pair, link in placed.links.items()} == {
        (0, 1): 20, (1, 0): 2, (0, 2): 21, (2, 0): 12, (1, 2): 1, (2, 1): 10,
    }  # fmt: skip


@pytest.mark.parametrize(("speeds", "acceptance"), [((1, 3), 0.5), ((2, 1, 1), 0.8)])
def test_no_plan_is_better(speeds: tuple[float, ...], acceptance: float, full: bool) -> None:
    """Compared with every split of every arrangement."""
    spec = cluster(*(node(f"node{i}", speed) for i, speed in enumerate(speeds)))
    own = request(1.0, SyntheticText(agreement=acceptance, n_prompt=32))
    plan = make_plan(spec, SMALL, DRAFT, own)
    check(plan, spec, SMALL)
    assert plan.best.tokens_per_s >= 0.98 * fastest(spec, own, arrangements(spec, True, lambda i: speeds[i]), full)


def test_better_settings_are_found() -> None:
    """A confident draft with low agreement should stop early: that is what -pa is for."""
    spec = cluster(node("a"), node("b"), node("c"))
    tokens = SyntheticText(agreement=0.5, n_prompt=32)
    tuned = make_plan(spec, SMALL, DRAFT, replace(request(0.3, tokens), tunes=True, mode="speculative"))
    plain = make_plan(spec, SMALL, DRAFT, replace(request(0.3, tokens), mode="speculative"))
    assert tuned.best.speculation != SpeculationConfig(mode="speculative")
    assert tuned.best.tokens_per_s > 1.02 * plain.best.tokens_per_s


def test_plans_are_evaluated_with_a_recording() -> None:
    spec = cluster(node("a"), node("b"))
    own = replace(request(0.1), tokens=read(BUNDLED), mode="async")
    assert make_plan(spec, SMALL, DRAFT, own).best.tokens_per_s > 0


@pytest.mark.parametrize(
    ("nodes", "needs", "message"),
    [
        ((node("a", 1, 16), node("b", 1, 8)), {}, r"weights of 40 GB, .* a 15.2 GB, b 7.6 GB; [\d.]+ GB are missing"),
        ((node("a", 1, 64),), {"n_ctx": 500_000}, r"KV cache of 160 GB.* 1\d\d GB are missing: .*lower `n_ctx`"),
        (
            [node(f"node{i}") for i in range(30)],
            {"in_order": True},
            r"target's 24 layers cannot be divided among 30 ranks so that they fit",
        ),
    ],
)
def test_what_does_not_fit_gets_one_line(nodes: Sequence[NodeSpec], needs: dict[str, int], message: str) -> None:
    own = request()
    own = replace(own, constraints=replace(own.constraints, **needs))  # type: ignore[arg-type]
    with pytest.raises(UsageError, match=message) as caught:
        make_plan(cluster(*nodes), TARGET, None, own)
    assert "\n" not in str(caught.value)


def test_a_draft_that_does_not_fit_is_left_out_unless_it_is_required() -> None:
    spec = cluster(node("a", 1, 26), node("b", 1, 26))
    large = replace(DRAFT, output_bytes=round(20 * GB))
    assert make_plan(spec, TARGET, large, request()).best.mode == "iterative"
    with pytest.raises(UsageError, match=r"target does not fit: .*a draft of 2\d.\d GB.* are missing"):
        make_plan(spec, TARGET, large, replace(request(), mode="async"))


def test_the_same_cluster_gets_the_same_plan() -> None:
    spec = cluster(node("a"), node("b", 2), node("c"))
    assert make_plan(spec, SMALL, DRAFT, request()) == make_plan(spec, SMALL, DRAFT, request())


# Several users


def test_a_plan_for_several_users() -> None:
    """Where one user gains nothing from more machines, several do: their runs fill the stages."""
    spec = cluster(*(node(f"n{i}", memory_gb=64) for i in range(4)))
    one, four = (
        make_plan(spec, TARGET, None, replace(request(0.1), mode="iterative", users=users)) for users in (None, 4)
    )
    check(four, spec, TARGET)
    assert (one.users, four.users) == (None, 4)
    assert len(layers_of(four)) == 4
    assert four.best.tokens_per_s > 1.5 * one.best.tokens_per_s


def test_estimates_of_several_users() -> None:
    """Users share stages: the slowest one limits them, and all stages one user."""
    search = CandidateSearch(cluster(*(node(f"n{i}") for i in range(2))), TARGET, None, request().constraints)
    found = search.all()
    for estimate in found:
        alone = estimate.token_s("iterative", 0.7)
        times = [estimate.token_s("iterative", 0.7, users) for users in (1, 2, 4, 8)]
        assert times[0] == alone
        assert times == sorted(times, reverse=True)
        assert times[1] >= alone / 2 - 1e-12


@pytest.mark.parametrize("mode", ["iterative", "async"])
def test_users_are_evaluated_by_their_tokens_in_total(mode: Mode) -> None:
    spec = cluster(*(node(f"n{i}") for i in range(2)))
    found = {}
    for users in (None, 1, 3):
        plan = make_plan(spec, TARGET, DRAFT, replace(request(0.05), mode=mode, users=users))
        found[users] = plan.best.tokens_per_s
    assert found[1] < (found[None] or 0.0), "prompts take time as well"
    assert found[3] > found[1]


@pytest.mark.parametrize("draft", [None, DRAFT], ids=["no draft", "draft"])
def test_weights_that_do_not_fit_are_streamed(draft: ModelShape | None) -> None:
    """Machines with 24 GB of memory for 40 GB of weights: slower than with enough, faster than one alone."""
    machines = [replace(node(f"n{i}", memory_gb=12), disk_bytes_per_s=3 * GB) for i in range(2)]
    speeds = {}
    for name, nodes in {
        "one": machines[:1],
        "two": machines,
        "enough": [replace(own, memory_bytes=64 * GB) for own in machines],
        "unequal": [machines[0], replace(machines[1], disk_bytes_per_s=0.5 * GB)],
    }.items():
        spec = cluster(*nodes)
        plan = make_plan(spec, TARGET, draft, request())
        check(plan, spec, TARGET)
        streamed = sum(rank.memory.streamed for rank in plan.ranks)
        kept = sum(rank.memory.weights for rank in plan.ranks)
        assert (streamed == 0) == (name == "enough")
        assert streamed + kept == pytest.approx(TARGET.weight_bytes + (draft.weight_bytes if draft else 0), rel=1e-3)
        speeds[name] = plan.best.tokens_per_s
        if name == "unequal" and draft is None:
            fast, slow = plan.ranks[0], plan.ranks[-1]
            assert fast.memory.streamed > slow.memory.streamed, "the faster disk reads more"
    assert speeds["one"] < speeds["unequal"] < 1.03 * speeds["two"], "within which even splits are preferred"
    assert speeds["two"] < speeds["enough"]
    spec = cluster(*(replace(own, disk_bytes_per_s=0.0) for own in machines))
    with pytest.raises(MemoryNeededError, match="to plan that, give disk_gb_per_s in the cluster file"):
        make_plan(spec, TARGET, draft, request())
    with pytest.raises(MemoryNeededError):
        make_plan(cluster(*machines), TARGET, draft, request(streams=False))


def test_streaming_is_planned_only_where_it_is_faster() -> None:
    """A slow machine with memory for all layers, beside a fast one with a slow disk."""
    roomy, fast = node("roomy", 0.5), replace(node("fast", memory_gb=12), disk_bytes_per_s=0.1 * GB)
    plan = make_plan(cluster(roomy, fast), TARGET, None, request())
    assert not any(rank.memory.streamed for rank in plan.ranks)
    quick = replace(fast, disk_bytes_per_s=40 * GB)
    plan = make_plan(
        cluster(replace(roomy, bytes_per_s=4 * GB, core_bytes_per_s=4 * GB), quick), TARGET, None, request()
    )
    assert any(rank.memory.streamed for rank in plan.ranks)
