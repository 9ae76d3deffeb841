"""Stages of several ranks on virtual time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.virtual import ASYNC, ITERATIVE, NO_OVERHEADS, SPECULATIVE, Linear, checked, cluster, tokens

from ggpipe.cluster.links import Link, Skew, SumTimes
from ggpipe.cluster.model_shape import ModelShape, even_shape
from ggpipe.cluster.spec import ClusterSpec, NodeSpec
from ggpipe.config.layer_split import LayerSplit
from ggpipe.config.pipeline import TensorWire
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.layout import Layout
from ggpipe.errors import UsageError
from ggpipe.sim.groups import GroupCost, group_cost
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SimulationSpec, SyntheticText
from ggpipe.sim.stage_costs import stage_cost
from ggpipe.sim.virtual_cluster import StageSpec, VirtualCluster, build, placement_of, with_splits
from ggpipe.stats.records import RequestStats

LATENCY_S, BYTES_PER_S = 30e-6, 1.25e9
SHAPE = even_shape(
    name="some", n_layer=8, weight_bytes=8e9, parameters=14e9, n_embd=4096, cell_bytes=64e3, n_vocab=32000
)
NODE = NodeSpec(name="node", cores=8, memory_bytes=64e9, bytes_per_s=50e9, core_bytes_per_s=50e9, core_flop_per_s=50e9)


def nodes(n: int, target_on: Sequence[int] | None = None, draft_on: tuple[int, ...] = ()) -> ClusterSpec:
    """So many nodes on 10 Gbit/s, each with a target rank or as `target_on` says, without ggpipe's own overheads."""
    return ClusterSpec(
        title="some",
        nodes=tuple(replace(NODE, name=f"node{i}") for i in range(n)),
        target_on=tuple(range(n) if target_on is None else target_on),
        draft_on=draft_on,
        target=SHAPE,
        draft=None,
        network=Link(LATENCY_S, BYTES_PER_S),
        local=Link(60e-6, 5e9),
        overheads=NO_OVERHEADS,
    )


def cost_of(n: int, layers: tuple[int, int] = (0, 4), wire: TensorWire = "f32", shape: ModelShape = SHAPE) -> GroupCost:
    """On a node for each part."""
    return group_cost(nodes(n), shape, layers, range(n), 1, wire)


def request_of(spec: ClusterSpec, tensor_split: tuple[float, ...] = ()) -> tuple[RequestStats, VirtualCluster]:
    placement = replace(placement_of(spec, SHAPE, []), tensor_split=tensor_split)
    own = build(spec, placement, SHAPE, [])
    return checked(own, tokens(n_prompt=1, n_text=20), ITERATIVE), own


# Sums


def test_a_sum_of_two_is_one_message_however_large() -> None:
    cost = cost_of(2)
    for n_rows in (1, 8, 128):
        seconds = LATENCY_S + (16 + 4 * 4096 * n_rows) / BYTES_PER_S
        assert cost.sum_seconds(n_rows) == pytest.approx(seconds)


def test_large_sums_of_many_are_shared_out() -> None:
    cost = cost_of(8)
    one = LATENCY_S + 7 * (16 + 4 * 4096) / BYTES_PER_S
    shared = 2 * (LATENCY_S + 7 * (16 + 4 * 4096 / 8) / BYTES_PER_S)
    assert cost.sum_seconds(1) == pytest.approx(shared)
    assert shared < one
    small = cost_of(8, shape=replace(SHAPE, n_embd=512)).sum_seconds(1)
    assert small == pytest.approx(LATENCY_S + 7 * (16 + 4 * 512) / BYTES_PER_S)


def test_halves_take_half_the_bytes_and_only_between_machines() -> None:
    for n_rows in (1, 128):
        whole, half = (cost_of(2, wire=wire).sum_seconds(n_rows) - LATENCY_S for wire in ("f32", "f16"))
        assert half == pytest.approx(whole / 2, rel=1e-2)
    own = nodes(1, (0, 0))
    within = [group_cost(own, SHAPE, (0, 4), (0, 0), 1, wire).sum_seconds(8) for wire in ("f32", "f16")]
    assert within[0] == within[1] < cost_of(2).sum_seconds(8)


def test_parts_of_a_machine_share_its_network_card() -> None:
    spread = group_cost(nodes(4), SHAPE, (0, 4), (0, 1, 2, 3), 1)
    paired = group_cost(nodes(2), SHAPE, (0, 4), (0, 0, 1, 1), 1)
    paired_s, spread_s = (cost.sum_seconds(1) - 2 * LATENCY_S for cost in (paired, spread))
    assert paired_s == pytest.approx(spread_s * 4 / 3)


def test_the_slowest_pair_of_machines_counts() -> None:
    slow = SumTimes.of_link(Link(1e-3, BYTES_PER_S))
    own = replace(nodes(3), sums={(0, 2): slow})
    assert group_cost(own, SHAPE, (0, 4), (0, 1, 2), 1).sum_seconds(1) > 1e-3
    assert group_cost(own, SHAPE, (0, 4), (0, 1), 1).sum_seconds(1) < 1e-4


def test_measured_sums_are_followed_point_by_point() -> None:
    times = SumTimes(((1000.0, 10e-6), (2000.0, 20e-6), (4000.0, 30e-6)), ((500.0, 15e-6), (1000.0, 16e-6)))
    found = [times.seconds(n) for n in (0, 1000, 1500, 3000, 6000)]
    assert found == pytest.approx([10e-6, 10e-6, 15e-6, 25e-6, 40e-6])
    assert times.seconds(1000, as_halves=True) == pytest.approx(16e-6)


def test_a_run_has_one_or_two_sums_a_layer_and_one_to_agree() -> None:
    for divides, n_sums in ((True, 8), (False, 4)):
        cost = cost_of(2, shape=replace(SHAPE, divides_attention=divides))
        assert cost.seconds(1, 1) == pytest.approx(n_sums * cost.sum_seconds(1) + LATENCY_S, rel=1e-3)
    one_more = replace(cost_of(2), sum_s=1e-3).seconds(1, 1) - cost_of(2).seconds(1, 1)
    assert one_more == pytest.approx(8e-3)


def test_parts_with_more_threads_wait_longer_for_each_other() -> None:
    """As published, but for the messages: 170 µs per sum in shared memory and 320 to 400 µs over InfiniBand."""
    spread, own = nodes(2), nodes(1, (0, 0))

    def skew_us(spec: ClusterSpec, node_of: tuple[int, int], n_threads: int) -> float:
        return 1e6 * group_cost(spec, SHAPE, (0, 4), node_of, n_threads).skew_s

    assert 150 < skew_us(own, (0, 0), 24) < 170
    assert 310 < skew_us(spread, (0, 1), 24) < 400
    assert skew_us(own, (0, 0), 1) == skew_us(spread, (0, 1), 1) == 0
    assert 0 < skew_us(spread, (0, 1), 8) < skew_us(spread, (0, 1), 16)
    given = replace(spread, network_skew=Skew(20e-6))
    assert skew_us(given, (0, 1), 1) == skew_us(given, (0, 1), 24) == pytest.approx(20)
    waits_s = group_cost(given, SHAPE, (0, 4), (0, 1), 8).seconds(1, 1) - cost_of(2).seconds(1, 1)
    assert waits_s == pytest.approx(8 * 20e-6)


def test_the_last_stage_puts_logits_together() -> None:
    last, first = cost_of(4, (4, 8)), cost_of(4, (0, 4))
    assert last.seconds(8, 0) == first.seconds(8, 8)
    assert last.seconds(8, 2) - last.seconds(8, 0) == pytest.approx(LATENCY_S + 2 * 328 / BYTES_PER_S)


# Shares


def test_a_part_computes_its_share() -> None:
    whole = stage_cost(NODE, SHAPE, (0, 4), 8)
    parts = [stage_cost(NODE, SHAPE.part(share), (0, 4), 8).seconds(1, 0) for share in (0.25, 0.75)]
    fixed_s = 4 * 15e-6
    assert sum(parts) - fixed_s == pytest.approx(whole.seconds(1, 0))


# Requests


def test_a_group_decodes_as_fast_as_its_slowest_part_and_its_sums() -> None:
    spec = with_splits(nodes(2), (LayerSplit((1.0,), (2,)),))
    stats, own = request_of(spec)
    part_s = own.target.stages[0].cost.seconds(1, 10)
    per_token_s = part_s + own.target.groups[0].seconds(1, 1)
    assert stats.decode_tps == pytest.approx(1 / per_token_s, rel=2e-2)
    slower, _ = request_of(spec, (3.0, 1.0))
    assert slower.decode_tps == pytest.approx((stats.decode_tps or 0) * 2 / 3, rel=0.05)
    alone, _ = request_of(nodes(1))
    assert 1.5 < (stats.decode_tps or 0) / (alone.decode_tps or 1) < 2


def test_each_part_has_its_line() -> None:
    stats, _ = request_of(with_splits(nodes(4), (LayerSplit((0.5, 0.5), (2, 2)),)))
    assert [rank.layers for rank in stats.ranks] == [(0, 4), (0, 4), (4, 8), (4, 8)]
    assert len({(rank.compute_s, rank.busy_s) for rank in stats.ranks[:2]}) == 1
    assert [rank.sent_bytes > 0 for rank in stats.ranks] == [True, False, True, False]


def grouped(size: int, sum_s: float, speculation: SpeculationConfig, draft_s: float | None = 1e-3) -> RequestStats:
    """Two stages of 10 ms on groups; the draft on a rank of its own."""
    n_target = 2 * size
    own = cluster((10e-3,) * n_target, draft_s)
    layout = Layout.of_ranks([(0, 1), (1, 2)], 0, (size, size))
    sums = SumTimes.of_link(Link(sum_s, 1e15))
    cost = group_cost(nodes(size), SHAPE, (0, 1), range(size), 1)
    cost = replace(cost, exchanges=tuple(replace(way, times=sums) for way in cost.exchanges), n_sums=1)
    stages = {rank: StageSpec(threads=1, cost=Linear(10e-3)) for rank in range(n_target)}
    groups = {0: cost, size: cost} if size > 1 else {}
    target = replace(own.target, layout=layout, stages=stages, groups=groups)
    return checked(replace(own, target=target), tokens(0.7), speculation)


@pytest.mark.parametrize("speculation", [ITERATIVE, SPECULATIVE, ASYNC], ids=lambda own: own.mode)
def test_groups_write_the_same_text_in_all_modes(speculation: SpeculationConfig) -> None:
    alone, free, dear = (grouped(size, sum_s, speculation) for size, sum_s in ((1, 0.0), (2, 0.0), (3, 1e-3)))
    assert alone.decode_tps == pytest.approx(free.decode_tps, rel=1e-2)
    assert (dear.decode_tps or 0) < (free.decode_tps or 0)
    assert (dear.counters.cancelled_runs > 0) == (speculation is ASYNC)


# Sweeps


def setup_of(spec: ClusterSpec) -> SimulationSpec:
    return SimulationSpec(
        cluster=spec,
        placement=placement_of(spec, SHAPE, []),
        target=SHAPE,
        drafts=(),
        speculation=SpeculationConfig(),
        tokens=SyntheticText(n_prompt=4),
        n_predict=8,
        sizes=Sizes(n_ctx=0),
    )


def test_a_sweep_over_groups() -> None:
    own = setup_of(nodes(4))
    layouts = [own.changed({"group": size}).placement.layout for size in (1, 2, 4)]
    assert layouts[0] == own.placement.layout
    assert layouts[1] == Layout.of_ranks([(0, 4), (4, 8)], 0, (2, 2))
    assert layouts[2] == Layout.of_ranks([(0, 8)], 0, (4,))
    for size in (0, 3, 8):
        with pytest.raises(UsageError, match="group must divide the target's 4 ranks"):
            own.changed({"group": size})
    speeds = [own.changed({"group": size}).run("iterative")[0].decode_tps or 0 for size in (1, 2, 4)]
    assert speeds[0] < speeds[1] < speeds[2]


def test_a_model_that_groups_cannot_compute() -> None:
    own = setup_of(with_splits(nodes(2), (LayerSplit((1.0,), (2,)),)))
    with pytest.raises(UsageError, match="some is not known to work in groups"):
        replace(own, target=replace(SHAPE, max_parts=1)).run("iterative")


def test_a_sweep_over_networks_changes_sums() -> None:
    own = setup_of(with_splits(nodes(2), (LayerSplit((1.0,), (2,)),)))
    own = replace(own, cluster=replace(own.cluster, sums={(0, 1): SumTimes.of_link(Link(1e-6, 1e12))}))
    measured, slow = (setup.run("iterative")[0].decode_tps or 0 for setup in (own, own.changed({"latency-us": 500})))
    assert measured > slow
    native = replace(own.cluster, network_sums=SumTimes.of_link(Link(2e-5, 1e9)))
    other = replace(own, cluster=native).changed({"gbit": 8}).cluster.sums_between(0, 1)
    assert other.seconds(0) == pytest.approx(2e-5)
