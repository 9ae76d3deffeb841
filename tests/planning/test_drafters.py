"""Plans that choose among several drafters."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.planning import DRAFT, GB, SMALL, cluster, node, request

from ggpipe.cluster.model_shape import even_shape, head_shape
from ggpipe.config.layer_split import n_ranks_of, parse_layer_split, text_of
from ggpipe.errors import UsageError
from ggpipe.planning.drafters import DrafterCandidate, DrafterPlan, plan_drafters
from ggpipe.planning.placements import FurtherDraft
from ggpipe.planning.planner import PlanRequest, make_plan
from ggpipe.sim.simulation_spec import SyntheticText

SLOW = even_shape(
    name="slow", n_layer=8, weight_bytes=6 * GB, parameters=10e9, n_embd=4096, cell_bytes=64e3, n_vocab=32000
)
NODES = [node(f"n{i}") for i in range(4)]
TOKENS = SyntheticText(agreement=0.5, n_prompt=32, overlap=0.0)
ASYNC = replace(request(0.05, TOKENS), mode="async")


def planned(*candidates: DrafterCandidate, of: PlanRequest = ASYNC) -> DrafterPlan:
    return plan_drafters(cluster(*NODES), SMALL, candidates, of)


def test_the_better_one_of_two() -> None:
    """The other one is as good, but takes too long."""
    fast, slow = DrafterCandidate(shape=DRAFT, agreement=0.8), DrafterCandidate(shape=SLOW, agreement=0.8)
    for candidates in ((fast, slow), (slow, fast)):
        made = planned(*candidates)
        assert made.used[0] is fast
        alone = {trial.used[0].shape.name: trial.tokens_per_s for trial in made.trials if len(trial.used) == 1}
        assert alone["draft"] > alone["slow"]


def test_two_drafters_whose_mistakes_differ() -> None:
    """Together they are right more often, which pays for their machine."""
    two = [DrafterCandidate(shape=replace(DRAFT, name=name), agreement=0.5) for name in ("a", "b")]
    made = planned(*two)
    assert {drafter.shape.name for drafter in made.used} == {"a", "b"}
    plan = made.plan
    assert [rank.drafts for rank in plan.ranks][-2:] == [True, True]
    assert [rank.layers for rank in plan.ranks][-2:] == [(0, DRAFT.n_layer)] * 2
    splits = parse_layer_split(text_of(plan.placement.layer_splits))
    assert (len(splits), n_ranks_of(splits)) == (3, len(plan.ranks)), "as a user would write it"
    alone = make_plan(cluster(*NODES), SMALL, DRAFT, ASYNC)
    assert plan.best.tokens_per_s > alone.best.tokens_per_s


def test_a_drafter_that_adds_nothing_is_left_out() -> None:
    """It is right wherever the first one is, and only there."""
    two = [DrafterCandidate(shape=replace(DRAFT, name=name), agreement=0.6) for name in ("a", "b")]
    made = planned(*two, of=replace(ASYNC, tokens=replace(TOKENS, overlap=1.0)))
    assert len(made.used) == 1
    assert len(made.plan.placement.layer_splits) <= 2
    assert {len(trial.used) for trial in made.trials} == {1, 2}, "it was tried"


@pytest.mark.parametrize("beside", [True, False])
def test_places_of_a_further_draft(beside: bool) -> None:
    """On the first one's machine, whose cores they share, or on one where no other rank is."""
    spec = cluster(*NODES)
    further = (FurtherDraft(shape=SLOW, node=None if beside else 2),)
    own = replace(ASYNC, further=further, tokens=replace(TOKENS, others=(0.5,)))
    plan = make_plan(spec, SMALL, DRAFT, own)
    *_, first, further = plan.ranks
    assert (first.drafts, further.drafts) == (True, True)
    assert further.layers == (0, SLOW.n_layer)
    assert further.memory.weights > first.memory.weights
    if beside:
        assert first.node == further.node
        assert first.threads + further.threads <= 8
    else:
        assert [rank.node for rank in plan.ranks].count("n2") == 1
        assert (further.node, further.threads) == ("n2", 8)


def test_the_number_of_ranks_counts_all_of_them() -> None:
    two = [DrafterCandidate(shape=replace(DRAFT, name=name), agreement=0.5) for name in ("a", "b")]
    made = planned(*two, of=replace(request(0.05, TOKENS, n_ranks=4), mode="async"))
    assert len(made.plan.ranks) == 4


def test_a_head_drafts_first() -> None:
    """Its horizon limits the stages; a draft model can only come in addition."""
    head, model = DrafterCandidate(shape=head_shape(SMALL)), DrafterCandidate(shape=DRAFT)
    made = planned(model, head)
    assert made.used[0] in (head, model)
    assert all(not own.shape.taps for trial in made.trials for own in trial.used[1:])


def test_a_useless_drafter_is_not_used() -> None:
    two = [DrafterCandidate(shape=DRAFT, agreement=0.02), DrafterCandidate(shape=SLOW, agreement=0.02)]
    made = planned(*two, of=request(0.05))
    assert (made.plan.best.mode, made.used) == ("iterative", ())


def test_one_candidate_or_none_is_planned_as_ever() -> None:
    spec = cluster(*NODES)
    assert planned().plan == make_plan(spec, SMALL, None, ASYNC)
    one = planned(DrafterCandidate(shape=DRAFT))
    assert (one.plan, one.trials) == (make_plan(spec, SMALL, DRAFT, ASYNC), ())
    two = DrafterCandidate(shape=DRAFT), DrafterCandidate(shape=SLOW)
    assert planned(*two, of=replace(ASYNC, mode="iterative")).used == ()


def test_models_that_do_not_fit() -> None:
    huge = even_shape(
        name="huge", n_layer=80, weight_bytes=900 * GB, parameters=1e12, n_embd=8192, cell_bytes=64e3, n_vocab=32000
    )
    with pytest.raises(UsageError, match="does not fit"):
        plan_drafters(cluster(*NODES), huge, [DrafterCandidate(shape=DRAFT), DrafterCandidate(shape=SLOW)], ASYNC)


def test_progress_never_goes_back() -> None:
    seen: list[tuple[int, int]] = []
    two = [DrafterCandidate(shape=DRAFT), DrafterCandidate(shape=SLOW)]
    plan_drafters(cluster(*NODES[:3]), SMALL, two, ASYNC, lambda done, total: seen.append((done, total)))
    assert seen
    assert all(done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
