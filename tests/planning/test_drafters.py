"""Plans that choose among several drafters."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import cast

import pytest
from support.planning import DRAFT, GB, SMALL, cluster, node, request

from ggpipe.cluster.model_shape import ModelShape, even_shape, head_shape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.layer_split import n_ranks_of, parse_layer_split, text_of
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.errors import UsageError
from ggpipe.planning import drafters
from ggpipe.planning.drafters import DrafterCandidate, DrafterPlan, plan_drafters
from ggpipe.planning.placements import FurtherDraft
from ggpipe.planning.plan import Plan, Prediction
from ggpipe.planning.planner import PlanRequest, make_plan
from ggpipe.sim.simulation_spec import SyntheticText

NODES = [node(f"n{i}") for i in range(4)]
TOKENS = SyntheticText(agreement=0.5, n_prompt=32, overlap=0.0)
ASYNC = replace(request(0.05, TOKENS), mode="async")
LARGE = even_shape(
    name="large", n_layer=8, weight_bytes=6 * GB, parameters=10e9, n_embd=4096, cell_bytes=64e3, n_vocab=32000
)


# The choice, with plans whose speeds are given


@dataclass(frozen=True)
class GivenPlan:
    best: Prediction


Speed = Callable[[tuple[str, ...], tuple[int | None, ...]], float]
"""Of a plan with these drafters, of which all but the first one are on these machines."""


class Planner:
    """In place of `make_plan`. Plans of whole searches are iterative if that is faster than the drafters."""

    def __init__(self, speed: Speed, iterative: float = 1.0) -> None:
        self.asked: list[tuple[tuple[str, ...], tuple[int | None, ...], PlanRequest]] = []
        self._speed, self._iterative = speed, iterative

    def __call__(
        self,
        spec: ClusterSpec,
        target: ModelShape,
        draft: ModelShape | None,
        request: PlanRequest,
        on_run: Callable[[int, int], None] = lambda done, total: None,
    ) -> Plan:
        names = (draft.name if draft else "-", *(own.shape.name for own in request.further))
        nodes = tuple(own.node for own in request.further)
        self.asked.append((names, nodes, request))
        for done in (2, 4):
            on_run(done, 3)
        speed = self._speed(names, nodes)
        mode: Mode = "iterative" if request.mode is None and speed < self._iterative else "async"
        return cast(Plan, GivenPlan(Prediction(mode, SpeculationConfig(mode=mode), speed, 0.1)))


def candidate(name: str, agreement: float | None = None) -> DrafterCandidate:
    return DrafterCandidate(shape=replace(DRAFT, name=name), agreement=agreement, flags=("-md", f"{name}.gguf"))


def chosen(
    monkeypatch: pytest.MonkeyPatch, planner: Planner, *candidates: DrafterCandidate, of: PlanRequest = ASYNC
) -> DrafterPlan:
    monkeypatch.setattr(drafters, "make_plan", planner)
    return plan_drafters(cluster(*NODES, replace(NODES[0], name="gpu", cores=16)), SMALL, candidates, of)


def names_of(made: DrafterPlan) -> list[str]:
    return [own.shape.name for own in made.used]


def test_the_best_one_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(lambda names, nodes: {"a": 5.0, "b": 6.0}[names[0]])
    made = chosen(monkeypatch, planner, candidate("a", 0.6), candidate("b", 0.7))
    assert names_of(made) == ["b"]
    assert [(len(own.used), own.tokens_per_s) for own in made.trials][:2] == [(1, 5.0), (1, 6.0)]
    names, nodes, last = planner.asked[-1]
    assert (names, nodes, last.effort, last.tunes) == (("b",), (), ASYNC.effort, ASYNC.tunes), "the whole search"
    assert isinstance(last.tokens, SyntheticText)
    assert (last.tokens.agreement, last.tokens.others) == (0.7, ())


def test_a_further_one_where_it_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    """Next to the first one, on the last of the equal machines, or on the one of another kind."""

    def speed(names: tuple[str, ...], nodes: tuple[int | None, ...]) -> float:
        return 6.0 if len(names) == 1 else {None: 6.5, 3: 7.0, 4: 6.8}[nodes[0]]

    planner = Planner(speed)
    made = chosen(monkeypatch, planner, candidate("a", 0.6), candidate("b"))
    assert names_of(made) == ["a", "b"]
    names, nodes, last = planner.asked[-1]
    assert (names, nodes) == (("a", "b"), (3,))
    assert isinstance(last.tokens, SyntheticText)
    assert (last.tokens.agreement, last.tokens.others) == (0.6, (0.5,)), "the request's, where it has none"


def test_three_of_three(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(lambda names, nodes: 5.0 + len(names))
    made = chosen(monkeypatch, planner, *map(candidate, "abc"))
    assert sorted(names_of(made)) == ["a", "b", "c"]
    assert len({node for node in planner.asked[-1][1] if node is not None}) == len(
        [node for node in planner.asked[-1][1] if node is not None]
    ), "a machine for each"


def test_one_that_adds_little_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(lambda names, nodes: 6.0 + 0.1 * len(names))
    assert names_of(chosen(monkeypatch, planner, candidate("a"), candidate("b"))) == ["a"]


def test_none_if_that_is_fastest(monkeypatch: pytest.MonkeyPatch) -> None:
    made = chosen(
        monkeypatch, Planner(lambda names, nodes: 2.0, iterative=3.0), candidate("a"), candidate("b"), of=request(0.05)
    )
    assert names_of(made) == []


def test_a_head_never_comes_second(monkeypatch: pytest.MonkeyPatch) -> None:
    head = DrafterCandidate(shape=replace(head_shape(SMALL), name="head"))
    planner = Planner(lambda names, nodes: 5.0 + len(names) + (names[0] == "a"))
    assert names_of(chosen(monkeypatch, planner, candidate("a"), head)) == ["a"]
    assert all("head" not in names[1:] for names, *_ in planner.asked)


def test_the_number_of_ranks_counts_all_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(lambda names, nodes: 5.0 + len(names))
    own = replace(ASYNC, constraints=replace(ASYNC.constraints, n_ranks=4))
    chosen(monkeypatch, planner, candidate("a"), candidate("b"), of=own)
    assert [asked.constraints.n_ranks for names, _, asked in planner.asked] == [
        5 - len(names) for names, *_ in planner.asked
    ]


def test_a_single_rank_has_no_room_for_further_drafters(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(lambda names, nodes: 5.0 + len(names))
    own = replace(ASYNC, constraints=replace(ASYNC.constraints, n_ranks=1))
    assert len(chosen(monkeypatch, planner, candidate("a"), candidate("b"), of=own).used) == 1
    assert all(asked.constraints.n_ranks == 1 for *_, asked in planner.asked)


def test_drafters_that_do_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    def speed(names: tuple[str, ...], nodes: tuple[int | None, ...]) -> float:
        if names[0] == "a" or len(names) > 1:
            raise UsageError("too large")
        return 5.0

    assert names_of(chosen(monkeypatch, Planner(speed), candidate("a"), candidate("b"))) == ["b"]
    with pytest.raises(UsageError, match="too large"):
        chosen(monkeypatch, Planner(speed), candidate("a"), candidate("a"))


def test_one_candidate_or_none_is_planned_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    planner = Planner(lambda names, nodes: 5.0)
    assert chosen(monkeypatch, planner, candidate("a")).trials == ()
    chosen(monkeypatch, planner)
    chosen(monkeypatch, planner, candidate("a"), candidate("b"), of=replace(ASYNC, mode="iterative"))
    assert [(names, asked.effort) for names, _, asked in planner.asked] == [
        (("a",), 0.05), (("-",), 0.05), (("a",), 0.05),
    ]  # fmt: skip


def test_progress_never_goes_back(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[int, int]] = []
    monkeypatch.setattr(drafters, "make_plan", Planner(lambda names, nodes: 5.0 + len(names)))
    two = candidate("a"), candidate("b")
    plan_drafters(cluster(*NODES), SMALL, two, ASYNC, lambda done, total: seen.append((done, total)))
    assert seen
    assert all(done <= total for done, total in seen)
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)


# Plans with a further draft model


@pytest.mark.parametrize("beside", [True, False])
def test_places_of_a_further_draft(beside: bool) -> None:
    """On the first one's machine, whose cores they share, or on one where no other rank is."""
    further = (FurtherDraft(shape=LARGE, node=None if beside else 2),)
    plan = make_plan(
        cluster(*NODES[:3]), SMALL, DRAFT, replace(ASYNC, further=further, tokens=replace(TOKENS, others=(0.5,)))
    )
    *_, first, last = plan.ranks
    assert (last.drafts, last.layers) == (True, (0, LARGE.n_layer))
    assert last.memory.weights > 5 * GB
    if not plan.draft_inside:
        assert (first.drafts, first.layers) == (True, (0, DRAFT.n_layer))
    splits = parse_layer_split(text_of(plan.placement.layer_splits))
    assert (len(splits), n_ranks_of(splits)) == (3, len(plan.ranks)), "as a user would write it"
    if beside:
        assert first.node == last.node
        assert first.threads + last.threads <= 8
    else:
        assert [rank.node for rank in plan.ranks].count("n2") == 1
        assert (last.node, last.threads) == ("n2", 8)
