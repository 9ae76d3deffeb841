"""Chooses which of several drafters a plan uses, and where they run.

1. A short search plans for each drafter alone.
2. To the best one, the others are added one at a time: on a machine of their own, one of each kind, or next to the
   first draft model's rank. The fastest addition stays if it pays.
3. The whole search plans for what was chosen. It also plans without any drafter, and the faster plan wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.errors import UsageError
from ggpipe.planning.placements import FurtherDraft
from ggpipe.planning.plan import Plan
from ggpipe.planning.planner import PlanRequest, make_plan
from ggpipe.sim.simulation_spec import SyntheticText

_WORTH = 1.03  # a further drafter has to make the plan this much faster
_EFFORT = 0.3  # of short searches, relative to the whole one
_MOST_KINDS = 3  # kinds of machines that are tried for a further drafter

OnRun = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class DrafterCandidate:
    """A drafter that a plan may use: a draft model, a draft head, or MTP layers."""

    shape: ModelShape
    agreement: float | None = None
    """How often its best candidate is the target's token; None: as the request's tokens say."""
    flags: tuple[str, ...] = ()
    """How a command line names it: `-md FILE`."""


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Drafters that were compared in short searches."""

    used: tuple[DrafterCandidate, ...]
    tokens_per_s: float


@dataclass(frozen=True, kw_only=True)
class DrafterPlan:
    """A plan, and its drafters."""

    plan: Plan
    used: tuple[DrafterCandidate, ...]
    """In the order of their ranks; empty if the plan drafts nothing."""
    trials: tuple[Trial, ...] = ()
    """What was compared, in that order; empty if there was nothing to choose."""


def plan_drafters(
    spec: ClusterSpec,
    target: ModelShape,
    candidates: Sequence[DrafterCandidate],
    request: PlanRequest,
    on_run: OnRun = lambda done, total: None,
) -> DrafterPlan:
    """Find the best plan with none, one or several of the candidates. `on_run`: see `make_plan`.

    Raises UsageError if the models do not fit into memory.
    """
    if len(candidates) < 2 or request.mode == "iterative":
        shape = candidates[0].shape if candidates else None
        plan = make_plan(spec, target, shape, _with_tokens(request, candidates[:1]), on_run)
        return DrafterPlan(plan=plan, used=_used(plan, candidates[:1]))
    return _Choice(spec, target, candidates, request, on_run).choose()


class _Choice:
    """A choice among several drafters."""

    def __init__(
        self,
        spec: ClusterSpec,
        target: ModelShape,
        candidates: Sequence[DrafterCandidate],
        request: PlanRequest,
        on_run: OnRun,
    ) -> None:
        self._spec = spec
        self._target = target
        self._candidates = candidates
        self._request = request
        self._on_run = on_run
        self._n_done = 0
        self._n_left = 2 * len(candidates) + 1
        """Searches that are still to come, about."""
        self._trials: list[Trial] = []
        self._error: UsageError | None = None

    def choose(self) -> DrafterPlan:
        alone = {i: speed for i in range(len(self._candidates)) if (speed := self._try((i,), ())) is not None}
        if not alone:
            assert self._error is not None
            raise self._error
        best = max(alone, key=alone.__getitem__)
        chosen: tuple[int, ...] = (best,)
        places: tuple[int | None, ...] = ()
        speed = alone[best]
        while (added := self._best_addition(chosen, places)) is not None and added[2] > _WORTH * speed:
            chosen, places, speed = added
        plan = self._plan(chosen, places, self._request)
        used = _used(plan, [self._candidates[i] for i in chosen])
        return DrafterPlan(plan=plan, used=used, trials=tuple(self._trials))

    def _best_addition(
        self, chosen: tuple[int, ...], places: tuple[int | None, ...]
    ) -> tuple[tuple[int, ...], tuple[int | None, ...], float] | None:
        """The fastest set with one more drafter: (drafters, machines of all but the first, tokens per second)."""
        n_ranks = self._request.constraints.n_ranks
        if n_ranks is not None and n_ranks < len(places) + 2:  # one is for the target
            return None
        found = []
        for i, candidate in enumerate(self._candidates):
            if i in chosen or candidate.shape.taps:  # heads draft first, with their horizon
                continue
            for node in self._nodes(places):
                more = (*chosen, i), (*places, node)
                if (speed := self._try(*more)) is not None:
                    found.append((*more, speed))
        return max(found, key=lambda one: one[2], default=None)

    def _nodes(self, places: tuple[int | None, ...]) -> Iterator[int | None]:
        """Where a further draft model may run: next to the first one, or on the last free machine of each kind."""
        yield None
        of_kind = {replace(own, name=""): node for node, own in enumerate(self._spec.nodes) if node not in places}
        if len(self._spec.nodes) - len([node for node in places if node is not None]) > 1:
            yield from list(of_kind.values())[-_MOST_KINDS:]

    def _try(self, chosen: tuple[int, ...], places: tuple[int | None, ...]) -> float | None:
        """The speed in a short search; None if it does not fit."""
        short = replace(
            self._request, mode=self._request.mode or "async", tunes=False, effort=self._request.effort * _EFFORT
        )
        try:
            speed = self._plan(chosen, places, short).best.tokens_per_s
        except UsageError as e:
            self._error = self._error or e
            return None
        self._trials.append(Trial(used=tuple(self._candidates[i] for i in chosen), tokens_per_s=speed))
        return speed

    def _plan(self, chosen: tuple[int, ...], places: tuple[int | None, ...], request: PlanRequest) -> Plan:
        first, *others = [self._candidates[i] for i in chosen]
        further = tuple(FurtherDraft(shape=other.shape, node=node) for other, node in zip(others, places, strict=True))
        constraints = request.constraints
        if constraints.n_ranks is not None:
            constraints = replace(constraints, n_ranks=constraints.n_ranks - len(further))
        request = replace(request, constraints=constraints, further=further)
        base, last = self._n_done, 0

        def on_run(done: int, total: int) -> None:
            nonlocal last
            last = done
            self._on_run(base + done, base + max(total, done) * max(self._n_left, 1))

        plan = make_plan(self._spec, self._target, first.shape, _with_tokens(request, (first, *others)), on_run)
        self._n_done, self._n_left = base + last, self._n_left - 1
        return plan


def _used(plan: Plan, candidates: Sequence[DrafterCandidate]) -> tuple[DrafterCandidate, ...]:
    return () if plan.best.mode == "iterative" else tuple(candidates)


def _with_tokens(request: PlanRequest, used: Sequence[DrafterCandidate]) -> PlanRequest:
    """The request with the agreements of these drafters. A recording has its own."""
    tokens = request.tokens
    if not used or not isinstance(tokens, SyntheticText):
        return request
    first, *others = [tokens.agreement if own.agreement is None else own.agreement for own in used]
    return replace(request, tokens=replace(tokens, agreement=first, others=tuple(others)))
