"""The calibration that each drafter should have, from its own probabilities alone."""

from __future__ import annotations

import collections

from ggpipe.core.draft_messages import ROOT, Expansion, MicroBatch
from ggpipe.core.drafters.calibration import Calibration
from ggpipe.core.request_state import RequestState, SequenceState

SOME_PROBS = (0.05, 0.2, 0.4, 0.6, 0.8, 0.95, 0.98, 1.0)


class OwnCalibrations:
    """What the probabilities that each drafter sent for a request say of it."""

    def __init__(self) -> None:
        self._probs: dict[tuple[int, int, int], float] = {}
        """(request, drafter, number of a draft token) -> its probability, as the drafter sent it."""
        self._calibrations: dict[tuple[int, int], Calibration] = collections.defaultdict(Calibration)
        """(request, drafter) -> what its own probabilities alone say of it."""

    def note(self, batch: MicroBatch, state: SequenceState | None = None) -> None:
        """A drafter sent these. `state`: of the request, with what of them is still to come."""
        for expansion in batch.expansions:
            for i, (_, prob) in enumerate(expansion.candidates[: expansion.n]):
                self._probs[batch.request, batch.drafter, expansion.first + i] = prob
            if isinstance(state, RequestState) and batch.drafter in state.drafters:
                self._note_again(batch, expansion, state)

    def _note_again(self, batch: MicroBatch, expansion: Expansion, state: RequestState) -> None:
        known = state.drafters[batch.drafter]
        at = batch.epoch if expansion.parent == ROOT else known.accepted.get(expansion.parent)
        parent = state.tree.root if at == state.epoch else known.nodes.get(expansion.parent)
        for number, prob in expansion.again:
            if parent is not None and number in known.nodes and known.nodes[number].parent is parent:
                self._probs[batch.request, batch.drafter, number] = prob

    def judge(self, request: int, state: RequestState, token: int) -> None:
        """The target drew this token after the root of the request's tree."""
        named: dict[int, list[tuple[float, bool]]] = collections.defaultdict(list)
        for node in state.tree.root.children.values():
            for proposal in node.proposals:
                prob = self._probs[request, proposal.drafter, proposal.number]
                named[proposal.drafter].append((prob, node.token == token))
        for drafter, tokens in named.items():
            best = max(range(len(tokens)), key=lambda i: tokens[i][0])
            for i, (prob, is_right) in enumerate(tokens):
                self._calibrations[request, drafter].judged(prob, is_right, is_best=i == best)
        for drafter, known in state.drafters:
            if known.complete and not known.answers_at_once and drafter not in named:
                self._calibrations[request, drafter].judged(0.0, False)

    def check(self, request: int, state: RequestState) -> None:
        """The scheduler knows each drafter of the request as well."""
        for drafter, known in state.drafters:
            own = self._calibrations[request, drafter]
            assert known.calibration.n_judged == own.n_judged
            assert [known.calibration.probability(prob) for prob in SOME_PROBS] == [
                own.probability(p) for p in SOME_PROBS
            ]
