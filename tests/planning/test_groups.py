"""Plans with groups: where links are quick, in proportion to speed, and never where a model cannot be divided."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planning import DRAFT, SMALL, TARGET, check, cluster, fastest, node, request

from ggpipe.cluster.links import Link
from ggpipe.cluster.model_shape import ModelShape, even_shape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.speculation import Mode
from ggpipe.planning.groups import group_sizes, grouped
from ggpipe.planning.placements import arrangements
from ggpipe.planning.plan import Plan
from ggpipe.planning.planner import make_plan

QUICK, SLOW = Link(10e-6, 12.5e9), Link(1e-3, 1e6)


def nodes(*speeds: float, link: Link = QUICK) -> ClusterSpec:
    return replace(cluster(*(node(f"n{i}", speed) for i, speed in enumerate(speeds))), network=link)


def planned(
    spec: ClusterSpec, target: ModelShape = TARGET, draft: ModelShape | None = None, mode: Mode | None = None
) -> Plan:
    plan = make_plan(spec, target, draft, replace(request(0.1, groups=True), mode=mode))
    check(plan, spec, target)
    return plan


def sizes_of(plan: Plan) -> list[int]:
    assert plan.placement.layout is not None
    return [len(stage.ranks) for stage in plan.placement.layout.stages]


def test_sizes_of_groups() -> None:
    assert group_sizes(8, 16) == [(8,), (4, 4), (3, 3, 2), (2, 2, 2, 2)]
    assert group_sizes(7, 4) == [(4, 3), (3, 2, 2), (2, 2, 2, 1)]
    assert group_sizes(2, 2) == [(2,)]
    assert group_sizes(1, 16) == group_sizes(4, 1) == []


def test_a_quick_link_makes_groups_and_a_slow_one_stages() -> None:
    quick, slow = (planned(nodes(1, 1, 1, 1, link=link), mode="iterative") for link in (QUICK, SLOW))
    assert sizes_of(quick) == [4]
    assert max(sizes_of(slow)) == 1
    for plan in (quick, slow):
        assert plan.alternative is not None
        placement, prediction = plan.alternative
        assert plan.best.tokens_per_s > prediction.tokens_per_s
        assert placement.layout is not None
        assert (max(len(stage.ranks) for stage in placement.layout.stages) > 1) == (plan is slow)


def test_a_draft_beside_a_group() -> None:
    plan = planned(nodes(1, 1, 1, 1, 1), draft=DRAFT, mode="async")
    assert max(sizes_of(plan)) > 1
    assert plan.draft_inside or len(plan.placement.draft_on) == 1


def test_a_large_draft_on_a_group() -> None:
    large = even_shape(
        name="draft", n_layer=16, weight_bytes=10e9, parameters=18e9, n_embd=4096, cell_bytes=64e3, n_vocab=32000
    )
    counts = []
    for draft, link in ((large, QUICK), (large, SLOW), (replace(large, max_parts=1), QUICK)):
        plan = planned(nodes(1, 1, 1, 1, 1, 1, link=link), draft=draft, mode="async")
        counts.append(sum(rank.drafts for rank in plan.ranks))
    assert counts[0] > 1
    assert max(counts[1:]) <= 1


def test_faster_machines_of_a_group_get_more_of_each_tensor() -> None:
    plan = planned(nodes(1, 3), mode="iterative")
    assert sizes_of(plan) == [2]
    speeds = {"n0": 1.0, "n1": 3.0}
    for rank, share in zip(plan.ranks, plan.placement.tensor_split, strict=True):
        assert share == pytest.approx(speeds[rank.node], abs=0.3)


def test_sums_are_sent_as_halves_where_that_pays() -> None:
    usual, quick = nodes(1, 1, link=Link(80e-6, 1.5e7)), nodes(1, 1)
    sockets = replace(cluster(node("n"), ranks=(0, 0)), local=Link(80e-6, 1.5e7))
    wires = []
    for spec in (usual, quick, sockets):
        plan = make_plan(spec, TARGET, None, request(0.1, groups=True, halves=True, n_ranks=2))
        check(plan, spec, TARGET)
        wires.append((sizes_of(plan), plan.placement.tensor_wire))
        assert (plan.with_floats is None) == (plan.placement.tensor_wire == "f32")
        if plan.with_floats is not None:
            assert plan.best.tokens_per_s > 1.05 * plan.with_floats.tokens_per_s
    assert wires == [([2], "f16"), ([2], "f32"), ([2], "f32")]
    assert planned(usual).placement.tensor_wire == "f32", "it rounds, so it is not for `auto`"


def test_what_cannot_be_divided_is_not() -> None:
    spec = nodes(1, 1, 1, 1)
    assert max(sizes_of(planned(spec, replace(TARGET, max_parts=1)))) == 1
    assert planned(spec, replace(TARGET, max_parts=1)).alternative is None
    assert max(sizes_of(planned(spec, replace(TARGET, max_parts=2), mode="iterative"))) == 2
    plan = make_plan(spec, TARGET, None, request(0.1))
    assert (max(sizes_of(plan)), plan.alternative) == (1, None)


def test_ranks_in_order_make_groups_of_neighbours() -> None:
    """Two sockets each of two machines: sums within a machine take little."""
    spec = replace(cluster(*(node(f"n{i}") for i in range(2)), ranks=(0, 0, 1, 1)), network=Link(10e-3, 1e7))
    plan = make_plan(spec, TARGET, None, request(0.2, groups=True, in_order=True))
    check(plan, spec, TARGET)
    assert sizes_of(plan) == [2, 2]


@pytest.mark.parametrize("link", [QUICK, Link(80e-6, 1e8)], ids=["quick", "usual"])
def test_no_plan_with_groups_is_better(link: Link, full: bool) -> None:
    """Compared with every split of every arrangement."""
    spec = nodes(1, 2, link=link)
    own = request(1.0, groups=True)
    plan = make_plan(spec, SMALL, DRAFT, own)
    check(plan, spec, SMALL)
    plain = arrangements(spec, True, (1, 2).__getitem__)
    possible = (g for a in plain for g in grouped(a, 16, lambda n, _: (1, 2)[n]))
    assert plan.best.tokens_per_s >= 0.98 * fastest(spec, own, possible, full)
