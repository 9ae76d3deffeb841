"""From a cluster's description to stages with costs, and from profiles to descriptions."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.virtual import measured

from ggpipe.cluster.from_profile import crowd_of, spec_from_profile
from ggpipe.cluster.links import Link
from ggpipe.cluster.model_shape import ModelShape, even_shape
from ggpipe.cluster.profile import Point, Profile
from ggpipe.cluster.spec import TURNS, ClusterSpec, NodeSpec
from ggpipe.config.layer_split import LayerSplit
from ggpipe.core.layout import Layout, lay_out
from ggpipe.errors import GgpipeError, UsageError
from ggpipe.sim.costs import MeasuredCost, Roofline
from ggpipe.sim.stage_costs import stage_cost
from ggpipe.sim.virtual_cluster import VirtualPlacement, build, placement_of, threads_of, with_splits

TARGET = even_shape(
    name="target", n_layer=8, weight_bytes=40e9, parameters=70e9, n_embd=8192, cell_bytes=320e3, n_vocab=32000
)
DRAFT = even_shape(
    name="draft", n_layer=4, weight_bytes=1e9, parameters=2e9, n_embd=2048, cell_bytes=32e3, n_vocab=32000
)
NODE = NodeSpec(name="a", cores=16, memory_bytes=64e9, bytes_per_s=80e9, core_bytes_per_s=10e9, core_flop_per_s=50e9)
EXPERTS = replace(DRAFT, layer_expert_bytes=(int(0.8 * DRAFT.layer_bytes[0]),) * 4, n_expert=8, n_expert_used=2)


def spec(n_nodes: int = 3, target_on: tuple[int, ...] = (0, 1), draft_on: tuple[int, ...] = (2,)) -> ClusterSpec:
    nodes = tuple(replace(NODE, name="abcdefgh"[i]) for i in range(n_nodes))
    return ClusterSpec(
        title="some",
        nodes=nodes,
        target_on=target_on,
        draft_on=draft_on,
        target=TARGET,
        draft=DRAFT,
        network=Link(1e-4, 1e8),
        local=Link(1e-5, 1e9),
    )


def test_ranks_get_layers_and_threads() -> None:
    own = spec()
    placement = placement_of(own, TARGET, [DRAFT])
    assert placement.node_of == (0, 1, 2)
    cluster = build(own, placement, TARGET, [DRAFT])
    assert cluster.target.layout.layers == ((0, 4), (4, 8))
    assert cluster.drafts
    assert (cluster.drafts[0].layout.layers, cluster.drafts[0].layout.head) == (((0, 4),), 2)
    assert [stage.threads for stage in cluster.target.stages.values()] == [16, 16]
    assert not any(stage.nice for stage in (*cluster.target.stages.values(), *cluster.drafts[0].stages.values()))
    assert (cluster.link(0, 1), cluster.target.row_bytes) == (Link(1e-4, 1e8), 4 * 8192)


def test_the_draft_inside_the_head_is_nice() -> None:
    own = spec(draft_on=())
    placement = replace(placement_of(own, TARGET, [DRAFT]), draft_threads=3)
    cluster = build(own, placement, TARGET, [DRAFT])
    assert cluster.drafts
    assert (cluster.drafts[0].layout.head, cluster.drafts[0].stages[0].threads, cluster.drafts[0].stages[0].nice) == (
        0,
        3,
        True,
    )
    assert cluster.target.stages[0].threads == 16
    assert build(own, placement_of(own, TARGET, [DRAFT]), TARGET, [DRAFT]).drafts[0].stages[0].threads == 16


def test_ranks_of_a_node_divide_its_cores_and_its_memory() -> None:
    own = spec(1, (0, 0), (0,))
    placement = placement_of(own, TARGET, [DRAFT])
    assert [threads_of(own, placement, rank) for rank in range(3)] == [5, 5, 5]
    cluster = build(own, placement, TARGET, [DRAFT])
    assert cluster.drafts
    assert cluster.drafts[0].stages[2].nice
    # Five cores alone read 50 GB/s; while all read, they get five parts of sixteen of 80 GB/s.
    assert cluster.nodes[0].crowd == pytest.approx(80 * 5 / 16 / 50)
    given = build(replace(own, nodes=(replace(NODE, crowd=0.9),)), placement, TARGET, [DRAFT])
    assert given.nodes[0].crowd == 0.9
    assert build(spec(), placement_of(spec(), TARGET, [DRAFT]), TARGET, [DRAFT]).nodes[0].crowd == 1.0


def test_more_threads_than_cores_gain_nothing() -> None:
    cluster = build(spec(), VirtualPlacement(target_on=(0, 1), threads=(64, 16)), TARGET, [])
    assert [stage.threads for stage in cluster.target.stages.values()] == [16, 16]
    assert cluster.target.stages[0].cost.seconds(1, 0) == pytest.approx(
        stage_cost(NODE, TARGET, (0, 4), 16).seconds(1, 0)
    )
    assert stage_cost(NODE, TARGET, (0, 4), 99).seconds(99, 0) == stage_cost(NODE, TARGET, (0, 4), 16).seconds(99, 0)


def test_without_a_draft() -> None:
    placement = placement_of(spec(), TARGET, [])
    assert placement.draft_on == ()
    assert build(spec(), placement, TARGET, []).drafts == ()


def test_costs_from_speeds() -> None:
    all_layers, some, last = (stage_cost(NODE, TARGET, layers, 16) for layers in ((0, 8), (0, 4), (4, 8)))
    assert isinstance(all_layers, Roofline)
    assert all_layers.seconds(1, 0) == pytest.approx((40e9 - TARGET.input_bytes) / 80e9, rel=1e-2)
    assert some.seconds(1, 0) < last.seconds(1, 0), "the output layer is the last stage's"
    assert some.seconds(1, 0) + last.seconds(1, 0) == pytest.approx(all_layers.seconds(1, 0), rel=1e-3)
    # Four threads read 40 GB/s, and compute a fourth as fast.
    assert stage_cost(NODE, TARGET, (0, 8), 4).seconds(1, 0) == pytest.approx(2 * all_layers.seconds(1, 0), rel=1e-2)
    assert stage_cost(NODE, TARGET, (0, 8), 4).seconds(256, 0) == pytest.approx(
        4 * all_layers.seconds(256, 0), rel=1e-2
    )


def test_experts_are_read_in_part() -> None:
    dense, sparse = (stage_cost(NODE, shape, (0, 4), 16) for shape in (DRAFT, EXPERTS))
    assert sparse.seconds(1, 0) < 0.6 * dense.seconds(1, 0)
    assert sparse.seconds(30, 0) > 0.9 * dense.seconds(1, 0)


def test_a_cluster_with_another_split() -> None:
    own = replace(spec(), threads=(16, 16, 8))
    other = with_splits(own, (LayerSplit((0.25, 0.75)), LayerSplit((1.0,))))
    placement = placement_of(other, TARGET, [DRAFT])
    assert placement.layout is not None
    assert placement.layout.layers == ((0, 2), (2, 8))
    assert placement.threads == (16, 16, 8)
    inside = with_splits(own, (LayerSplit((0.5, 0.5)),))
    assert (inside.draft_on, inside.threads) == ((), (16, 16))
    turned = with_splits(own, (LayerSplit((0.4, 0.3, 0.3)),))
    assert (turned.target_on, turned.draft_on) == ((0, 1, 2), ())
    turned = with_splits(own, (LayerSplit((1.0,)), LayerSplit((0.5, 0.5))))
    assert (turned.target_on, turned.draft_on) == ((0,), (1, 2))
    group = with_splits(own, (LayerSplit((1.0,), (2,)), LayerSplit((1.0,))))
    assert placement_of(group, TARGET, [DRAFT]).layout == Layout.of_ranks([(0, 8)], 0, (2,))
    for split in (
        (LayerSplit((1.0,)),),
        (LayerSplit((0.5, 0.5)), LayerSplit((0.5, 0.5))),
        (LayerSplit((0.2,) * 4),),
        (LayerSplit((0.5, 0.5), (2, 2)),),
    ):
        with pytest.raises(UsageError, match="and the cluster has 3: give a share for each"):
            with_splits(own, split)


def test_more_ranks_than_layers() -> None:
    with pytest.raises(GgpipeError, match="would get no layer"):
        placement_of(spec(1, (0,) * 9, ()), TARGET, [])


# Profiles


def shape_like(profile: Profile, layers: int = 4) -> ModelShape:
    return replace(
        even_shape(
            name="same",
            n_layer=layers,
            weight_bytes=10 * layers + 10,
            parameters=50,
            n_embd=64,
            cell_bytes=8,
            n_vocab=128,
        ),
        layer_bytes=(10,) * layers,
        output_bytes=5,
    )


def test_the_measured_stage_takes_its_measured_time() -> None:
    own = spec_from_profile(measured(), "measured")
    cost = stage_cost(own.nodes[0], shape_like(measured()), (1, 3), 8)
    assert isinstance(cost, MeasuredCost)
    assert cost.seconds(1, 32) == pytest.approx(0.010)
    assert cost.seconds(8, 32) == pytest.approx(0.030)
    assert cost.seconds(1, 512) == pytest.approx(0.012)


def test_other_stages_are_scaled_by_the_bytes_they_read() -> None:
    node = spec_from_profile(measured(), "measured").nodes[0]
    fixed_s = 2e-3
    one = stage_cost(node, shape_like(measured()), (0, 1), 8)
    assert one.seconds(1, 32) == pytest.approx(fixed_s + (0.010 - fixed_s) / 2)
    last = stage_cost(node, shape_like(measured()), (2, 4), 8)
    assert last.seconds(8, 32) == pytest.approx(fixed_s + (0.030 - fixed_s) * 25 / 20)
    slower = stage_cost(node, shape_like(measured()), (1, 3), 4)
    assert slower.seconds(1, 32) == pytest.approx(fixed_s + (0.010 - fixed_s) * 2)
    assert stage_cost(node, shape_like(measured()), (1, 3), 80).seconds(1, 32) == pytest.approx(0.010)


def test_a_profile_of_experts_counts_all_of_them() -> None:
    profile = measured()
    profile = replace(profile, model=replace(profile.model, n_expert=8, n_expert_used=2))
    node = spec_from_profile(profile, "measured").nodes[0]
    shape = replace(shape_like(profile), layer_expert_bytes=(8,) * 4, n_expert=8, n_expert_used=2)
    assert stage_cost(node, shape, (1, 3), 8).seconds(1, 32) == pytest.approx(0.010)


def test_ranks_that_measured_the_same_are_averaged() -> None:
    profile = measured(("x", "x", "y"))
    slower = tuple(Point(p.rows, p.n_past, 2 * p.seconds) for p in profile.ranks[1].alone[:2])
    ranks = (profile.ranks[0], replace(profile.ranks[1], alone=slower, turns=1.2), profile.ranks[2])
    one, other = spec_from_profile(replace(profile, ranks=ranks), "measured").nodes
    assert one.profile is not None
    assert [point.seconds for point in one.profile.alone] == pytest.approx([0.015, 0.045, 0.012])
    assert other.profile == profile.ranks[2]
    assert (one.turns, other.turns) == (1.2, TURNS)


def test_other_numbers_of_rows_cost_by_the_layer() -> None:
    own = spec_from_profile(measured(("x",)), "measured")
    placement = VirtualPlacement(target_on=(0, 0), layout=lay_out(4, 2, LayerSplit((0.75, 0.25))), threads=(8, 8))
    stages = build(own, placement, shape_like(measured()), []).target.stages
    assert [stages[rank].change_s for rank in (0, 1)] == pytest.approx([3e-4, 1e-4])


def test_hosts_become_nodes() -> None:
    own = spec_from_profile(measured(("x", "y", "x")), "measured")
    assert [node.name for node in own.nodes] == ["x", "y"]
    assert (own.target_on, own.draft_on, own.threads) == ((0, 1, 0), (), (8, 8, 8))
    assert own.links[0, 2] == Link(5e-5, 1e9)
    assert own.overheads.run_s == pytest.approx(7e-5)
    assert own.overheads.hand_s == pytest.approx(9e-5)
    placement = placement_of(own, shape_like(measured()), [])
    assert placement.threads == (8, 8, 8)
    cluster = build(own, placement, shape_like(measured()), [])
    assert cluster.link(2, 1).latency_s == pytest.approx(7e-5)


def test_a_crowd_is_what_sharing_does_not_explain() -> None:
    # Two ranks of four threads on eight cores: each has its cores, whatever is slower is the crowd's.
    ranks = measured(("x", "x"), 1.25, threads=4).ranks
    assert crowd_of(ranks) == pytest.approx(0.8)
    # Of eight threads each: half of that is sharing, which is no crowd.
    assert crowd_of(measured(("x", "x"), 2.0).ranks) == pytest.approx(1.0)
    assert crowd_of(measured(("x", "x"), 2.5).ranks) == pytest.approx(0.8)
    assert crowd_of(measured(("x", "x"), 0.9, threads=4).ranks) == 1.0
    assert crowd_of(measured(("x",), 3.0).ranks) == 1.0, "alone there is no crowd"
    assert 0 < crowd_of(measured(("x", "x"), 500.0).ranks) < 0.1


def test_the_crowd_slows_ranks_down_as_it_was_measured() -> None:
    from ggpipe.sim.clock import VirtualClock
    from ggpipe.sim.cores import Cores, CpuTask

    for n_ranks, threads, slower in ((2, 4, 1.3), (2, 8, 2.6), (3, 4, 2.0)):
        profile = measured(("x",) * n_ranks, slower, threads)
        crowd = crowd_of(profile.ranks)
        clock = VirtualClock()
        cores = Cores(clock, 8, crowd)
        ends: list[float] = []
        for _ in range(n_ranks):
            cores.start(CpuTask(1.0, threads, 1.0, lambda clock=clock, ends=ends: ends.append(clock.now)))  # type: ignore[misc]
        while clock.step():
            pass
        assert ends == [pytest.approx(slower)] * n_ranks
