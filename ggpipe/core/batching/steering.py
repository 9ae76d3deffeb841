"""What the head tells drafters: tokens that were accepted, and how far ahead of them to draft."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ggpipe.core.batching import frontier
from ggpipe.core.batching.payoff import Payoff
from ggpipe.core.batching.pipeline_state import PipelineState
from ggpipe.core.draft_messages import Accepted, DrafterMessage, EndDrafting, Shared
from ggpipe.core.drafters.base import TextDrafter
from ggpipe.core.drafters.calibration import Pace
from ggpipe.core.drafters.request_drafters import DrafterState
from ggpipe.core.events import ToDrafter
from ggpipe.core.request_state import Phase, RequestState, SequenceState
from ggpipe.core.tree import Node


class Steering:
    """Steers the drafters of all requests. Drafters that need no model answer at once; for others, it returns
    messages."""

    def __init__(self, pipeline: PipelineState, text_drafters: Mapping[int, TextDrafter]) -> None:
        """`text_drafters`: the drafters that need no model, by their ids. Their draft tokens go in with the root that
        they follow."""
        self._pipeline = pipeline
        self._text_drafters = text_drafters
        self._payoff = Payoff()
        self._paces: dict[int, Pace] = {}
        """By drafter: its pace for the latest request that was served alone."""

    def begin(self, state: SequenceState, n_ctx: int, served: Sequence[SequenceState]) -> list[ToDrafter]:
        """A sequence was admitted, or a run with its root goes in: if it is a request, its drafters begin, in a context
        of that size, with `Limits.drafts_late` after its prompt. `served`: all that is open, itself included."""
        if not isinstance(state, RequestState) or state.has_begun or not state.request.drafts:
            return []
        if state.phase is Phase.PREFILL and self._pipeline.limits.drafts_late:
            return []
        state.has_begun = True
        self._pipeline.set_turns(state, len(served) == 1)
        self._set_look_aheads(state, served)
        messages: list[ToDrafter] = []
        for drafter, known in _models_first(state):
            known.told_look_ahead = known.look_ahead
            self._tell(state, drafter, state.begin(n_ctx, known.look_ahead), messages)
        self._share_all(state, messages)
        return messages

    def accepted(self, state: RequestState, served: Sequence[SequenceState]) -> list[ToDrafter]:
        """A request has its next root."""
        self._weigh(state, served)
        self._pipeline.set_turns(state, len(served) == 1)
        state.drafters.root_sent(self._pipeline.now)
        self._set_look_aheads(state, served)
        least_path = frontier.least_path(self._pipeline, state, served)
        messages: list[ToDrafter] = []
        for drafter, known in _models_first(state):
            if known.is_paused:
                state.counters.paused(drafter)
            if known.is_steered:
                tokens, rows = tuple(state.output[known.n_told :]), tuple(state.sampled_from[known.n_told :])
                known.n_told, known.told_look_ahead = state.epoch, known.look_ahead
                accepted = Accepted(state.id, state.epoch, tokens, known.look_ahead, least_path, rows, state.n_drawn)
                self._tell(state, drafter, accepted, messages)
        self._share_all(state, messages)
        return messages

    def drafted(
        self, drafter: int, state: RequestState, served: Sequence[SequenceState], nodes: Sequence[Node]
    ) -> list[ToDrafter]:
        """A drafter sent draft tokens for a request; `nodes` are those of them that are in the tree."""
        self._payoff.drafted(drafter)
        if drafter in state.drafters and drafter in self._paces and len(served) == 1:
            state.drafters[drafter].pace.recall(self._paces[drafter])
        messages: list[ToDrafter] = []
        for other in self._joining(state):
            if state.drafters[other].n_told == state.epoch:
                self._share(other, state, nodes, messages)
        self._share_with_models(drafter, state, nodes, messages)
        return messages

    def _share_with_models(
        self, drafter: int, state: RequestState, nodes: Sequence[Node], messages: list[ToDrafter]
    ) -> None:
        """Tell draft models of a drafter's draft tokens."""
        shares = state.overlaps and state.request.speculation.is_best_first
        for other in self._pipeline.limits.sharing if shares else ():
            if other != drafter and other in state.drafters and other not in self._text_drafters:
                self._share(other, state, nodes, messages)

    def _share_all(self, state: RequestState, messages: list[ToDrafter]) -> None:
        """Tell drafters that join others of all draft tokens, and draft models of theirs. All know the root."""
        for drafter in self._joining(state):
            self._share(drafter, state, [*state.tree.root.below()], messages)

    def _joining(self, state: RequestState) -> list[int]:
        if not state.request.speculation.is_best_first:
            return []
        return [drafter for drafter, one in self._text_drafters.items() if one.joins and drafter in state.drafters]

    def _share(self, to: int, state: RequestState, nodes: Sequence[Node], messages: list[ToDrafter]) -> None:
        """Tell a drafter of those of these draft tokens that it does not know."""
        if nodes and (tokens := state.drafters.shared_with(to, nodes)):
            self._tell(state, to, Shared(state.id, state.epoch, tokens), messages)

    def end(self, state: RequestState) -> list[ToDrafter]:
        """A request is over."""
        self._pipeline.in_turn = False
        messages: list[ToDrafter] = []
        for drafter, _ in state.drafters if state.has_begun else ():
            self._tell(state, drafter, EndDrafting(state.id), messages)
        return messages

    def _set_look_aheads(self, state: RequestState, served: Sequence[SequenceState]) -> None:
        """How far each drafter may be ahead of the root from now on."""
        others = [other for other in served if other is not state]
        state.is_copying = frontier.is_copying(self._pipeline, state)
        for number, drafter in state.drafters:
            drafter.is_paused = state.overlaps and self._payoff.is_paused(number, len(others) + 1)
            if drafter.answers_at_once:
                drafter.look_ahead = frontier.look_ahead_at_once(self._pipeline, state, others)
            elif drafter.is_paused or state.is_copying:
                drafter.look_ahead = 0
            else:
                drafter.look_ahead = frontier.look_ahead(self._pipeline, state, drafter.calibration, others)

    def _weigh(self, state: RequestState, served: Sequence[SequenceState]) -> None:
        """Learn how fast tokens come with the draft models that draft now."""
        n_accepted, state.n_weighed = state.epoch - state.n_weighed, state.epoch
        with_model = [drafter for drafter, known in state.drafters if not known.answers_at_once]
        if not with_model:
            return
        alike = all(
            isinstance(other, RequestState)
            and other.overlaps
            and not other.is_copying
            and other.phase is not Phase.PREFILL
            for other in served
        )
        named_by = {proposal.drafter for proposal in state.tree.root.proposals}
        requests = [other.id for other in served] if alike else ()
        if len(requests) == 1 and (since := self._payoff.since(requests)) is not None:
            self._weigh_turns(state, n_accepted, self._pipeline.now - since)
        self._payoff.accepted(n_accepted, self._pipeline.now, requests, with_model, named_by, self._pipeline.cost)

    def _weigh_turns(self, state: RequestState, n_accepted: int, seconds: float) -> None:
        """Learn how fast tokens of the only request come while drafters draft ahead, or in turn with the target."""
        pipeline, known = self._pipeline, state.drafters
        if not pipeline.limits.shares_machine or known.leading.is_paused:
            return
        most = min(state.request.speculation.most_drafted, pipeline.limits.n_rows - 1)
        expected, pace = pipeline.expected_tokens, known.leading.pace
        self._paces |= {drafter: pace for drafter, one in known if one is known.leading}
        was_in_turn = pipeline.turns.in_turn
        pipeline.turns.accepted(
            pipeline.ahead_cost,
            pipeline.turn_cost,
            known.calibration,
            pace,
            most,
            n=n_accepted,
            expected=expected,
            seconds=seconds,
        )
        if pipeline.turns.in_turn != was_in_turn:
            pace.change_way()

    def _tell(self, state: RequestState, drafter: int, message: DrafterMessage, messages: list[ToDrafter]) -> None:
        if (text_drafter := self._text_drafters.get(drafter)) is None:
            messages.append(ToDrafter(drafter, message))
            return
        for micro_batch in text_drafter.answer(message, state.draft_check):
            nodes = state.add(micro_batch, self._pipeline.now)
            if text_drafter.joins:
                self._share_with_models(drafter, state, nodes, messages)


def _models_first(state: RequestState) -> list[tuple[int, DrafterState]]:
    """The drafters of a request in the order in which they are told: draft models may be sent what others answer."""
    return sorted(state.drafters, key=lambda one: one[1].answers_at_once)
