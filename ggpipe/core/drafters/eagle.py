"""An EAGLE-3 head as a drafter: it drafts from the target's hidden states, and shares the rest with draft models.

    the row at position P      the text's token at P + 1, with the target's state at P
    a draft token's row        the draft token, with the state that the head gave for its parent

So its text is the request's without the first token, and a row of it waits until the target's state has come
(`StatesArrived`; `Accepted.rows` names the rows). States themselves never come here: rows name them (`StateRef`).

True states end with the last verified token. From there the head drafts on its own states, no further than its
`HORIZON`, and when the next token is accepted, it starts again from true ones: nothing of the old tree stays but the
numbers of draft tokens that the head of the pipeline has, which are not sent twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from msgspec import structs

from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, Candidates, Expansion
from ggpipe.core.drafters.base import DraftAction, DraftEvent, DraftPipeline, ForgetStates, StatesArrived
from ggpipe.core.drafters.draft_model import DraftModel
from ggpipe.core.drafters.draft_state import DraftState
from ggpipe.core.events import RunEnded
from ggpipe.core.in_flight import RunPart
from ggpipe.core.messages import LogitsRequest, StateRef
from ggpipe.core.tree import Node, Proposal

HORIZON = 8
"""Depth of the deepest draft token below the last verified one, unless the model sets it: each reads the state of the
one before it."""
_ROWS_WITH_ROOT = 8
"""Rows of a text that go with its last token, whose logits are wanted: the head computes those of all rows of a run, or
of none."""
_MOST_RUNS = 512
"""Runs of the target whose states are kept, at most."""
_MOST_CAME = 4096
"""Runs whose states are known to have come: far more than can come before an accepted token names one of them."""
_MOST_WAITING = 32
"""Tokens that wait to be computed while no draft tokens are wanted; their states take memory."""


class _Sent:
    """A draft token that the head of the pipeline was sent, or the root."""

    __slots__ = ("children", "number", "prob")

    def __init__(self, number: int = ROOT, prob: float = 0.0) -> None:
        self.number = number
        self.prob = prob
        self.children: dict[int, _Sent] = {}


@dataclass(slots=True, eq=False, kw_only=True)
class HeadState(DraftState):
    """A request that is drafted for. Its tokens are those of the text from the second one on."""

    horizon: int = HORIZON
    shift: int = 1
    """Tokens of the text before its own ones. 0 for prompts of one token: that one reads no state."""
    refs: dict[int, StateRef] = field(default_factory=dict)
    """By the numbers of its tokens that are not submitted yet: the states that they read."""
    n_known: int = 0
    """Tokens for which it is known whether there is a state, and where."""
    reads_from: int | None = None
    """The target's run whose states were read last: later rows read those of no earlier run."""
    sent: _Sent = field(default_factory=_Sent)
    """The root."""
    sent_nodes: dict[Node, _Sent] = field(default_factory=dict)

    @property
    def deepest(self) -> int:
        usual: int = DraftState.deepest.__get__(self)  # a dataclass with slots is not the class that super() looks for
        return min(usual, self.tree.root.pos + self.horizon)

    def accept(self, tokens: Iterable[int], epoch: int) -> list[Node]:
        """Append accepted tokens, and start the tree again at the last of them."""
        dead: list[Node] = []
        for token in tokens:
            self._judge(token)
            dead += self.tree.advance(token, afresh=True)
            self._append(token)
            self.sent = self.sent.children.get(token) or _Sent()
        self.sent_nodes = {self.tree.root: self.sent}
        self.open.clear()
        self.untried.clear()
        self.epoch, self.complete, self.retry_at, self.n_drafted = epoch, False, None, 0
        self.thresholds.accepted()
        return dead

    def _expand(self, node: Node, found: Candidates, probabilities: Sequence[float]) -> None:
        """As for a draft model. Draft tokens that were sent earlier under this node keep their numbers, and the head is
        told how probable they are now."""
        sent, n = self.sent_nodes[node], len(probabilities)
        new = tuple(one for one in found[:n] if one[0] not in sent.children)
        probs, least = dict(found), found[-1][1]
        again: list[tuple[int, float]] = []
        for token, one in sent.children.items():
            if (prob := probs.get(token, least)) != one.prob:
                one.prob = prob
                again.append((one.number, prob))
        for number, (token, prob) in enumerate(new, self.next_number):
            sent.children[token] = _Sent(number, prob)
        for (token, prob), probability in zip(found, probabilities, strict=False):
            child = self.tree.add(node, token, Proposal(0, sent.children[token].number, prob), probability)
            self.sent_nodes[child] = sent.children[token]
        if new or again:
            parent = ROOT if node is self.tree.root else sent.number
            self.held.append(Expansion(parent, self.next_number, len(new), (*new, *found[n:]), tuple(again)))
            self.next_number += len(new)
        self.n_drafted += len(new)


class EagleHead(DraftModel):
    """The drafter (see the module's docstring), for any number of requests."""

    _state: type[HeadState] = HeadState
    _rows_with_root = _ROWS_WITH_ROOT
    _shift = 1
    """See `HeadState.shift`."""

    def __init__(self, drafter: int, pipeline: DraftPipeline) -> None:
        """As `DraftModel`. Nothing is restored from files, and nothing saved."""
        super().__init__(drafter, structs.replace(pipeline, restored=None))
        self._horizon = pipeline.horizon or HORIZON
        self._arrived: set[int] = set()
        """The target's runs whose states are there."""
        self._reading: dict[int, int] = {}
        """By own run in flight: the first of the target's runs whose states it reads."""
        self._newest = -1
        """The latest run whose states have come. Those of earlier ones may still come, since runs pause for others."""
        self._came: dict[int, None] = {}
        """All runs whose states have come, the last `_MOST_CAME` of them in their order, forgotten ones included."""

    def handle(self, event: DraftEvent, now: float) -> list[DraftAction]:
        """As `DraftModel.handle`."""
        if isinstance(event, StatesArrived):
            self._states_arrived(event)
        actions = super().handle(event, now)
        if isinstance(event, RunEnded):
            self._reading.pop(event.result.run, None)
        before = self._needed_from
        if any(run < before for run in self._arrived):
            self._arrived = {run for run in self._arrived if run >= before}
            actions.append(ForgetStates(before))
        return actions

    def validate(self) -> None:
        """As `DraftModel.validate`."""
        super().validate()
        for state in self._head_states:
            assert state.n_decoded <= state.n_known <= len(state.tokens)
            assert all(number >= state.n_decoded for number in state.refs)
            assert set(state.sent_nodes) == {state.tree.root, *state.tree.root.below()}

    # States

    @property
    def _head_states(self) -> Iterator[HeadState]:
        for state in self._requests.values():
            assert isinstance(state, HeadState)
            yield state

    def _states_arrived(self, arrived: StatesArrived) -> None:
        self._arrived.add(arrived.run)
        self._came[arrived.run] = None
        if len(self._came) > _MOST_CAME:
            del self._came[next(iter(self._came))]
        self._newest = max(self._newest, arrived.run)
        for i, (request, position) in enumerate(arrived.rows):
            state = self._requests.get(request)
            if not isinstance(state, HeadState):
                continue
            number = position + 1 - state.shift
            if state.n_decoded <= number <= len(state.begin.prompt):  # of the prompt: each position has one row
                state.refs.setdefault(number, StateRef(arrived.run, i, is_target=True))
        for state in self._head_states:
            self._settle_states(state)

    def _settle_states(self, state: HeadState) -> None:
        """Count tokens whose states are there, or will never be: a request's runs come in order, and what is missing
        before one that has come was cached."""
        came = (number for number, ref in state.refs.items() if ref.run in self._came)
        last = max(came, default=-1)
        state.n_known = max(state.n_known, min(last + 1, len(state.tokens)))

    @property
    def _needed_from(self) -> int:
        """The first of the target's runs that has states which may still be read."""
        needed = [self._newest + 1, *self._reading.values()]
        for state in self._head_states:
            if state.reads_from is not None:
                needed.append(state.reads_from)
            elif state.refs:
                needed.append(min(ref.run for ref in state.refs.values()))
        if len(self._arrived) < _MOST_RUNS:
            return min(needed)
        kept = sorted(self._arrived)[-_MOST_RUNS:]  # a drafter that pauses is not told which states it will read
        return max(min(needed), kept[0])

    # The text

    def _begin(self, begin: BeginDrafting) -> None:
        shift = min(self._shift, len(begin.prompt) - 1)
        cache_prompt = begin.cache_prompt and shift == self._shift
        begin = structs.replace(begin, prompt=begin.prompt[shift:], cache_prompt=cache_prompt)
        prefix = self._prefixes.open(begin.prompt, begin.cache_prompt)
        state = self._state.of(begin, prefix, self._foresight(begin))
        state.horizon, state.shift, state.n_known = self._horizon, shift, max(prefix.n_tokens, 1 - shift)
        state.sent_nodes[prefix.tree.root] = state.sent
        self._requests[begin.request] = state

    def _accepted(self, message: Accepted, actions: list[DraftAction]) -> None:
        state = self._requests.get(message.request)
        super()._accepted(message, actions)
        if isinstance(state, HeadState):
            first = len(state.tokens) - len(message.tokens)
            for number, (run, row) in enumerate(message.rows, first):
                state.refs[number] = StateRef(run, row, is_target=True)
            self._settle_states(state)

    def _save(self, state: DraftState, tokens: tuple[int, ...], now: float, actions: list[DraftAction]) -> None:
        super()._save(state, (), now, actions)

    # Draft tokens

    def _more_comes(self, state: DraftState) -> bool:
        assert isinstance(state, HeadState)
        awaits_states = state.n_known < len(state.tokens) and self._is_wanted(state)
        return awaits_states or super()._more_comes(state)

    def _is_stuck(self, state: DraftState) -> bool:
        return not state.may_retry or state.retry_at is None

    # The pipeline

    def _is_wanted(self, state: DraftState) -> bool:
        """Whether draft tokens below the root would be useful now."""
        return state.deepest > state.tree.root.pos

    def _n_ready(self, state: DraftState) -> int:
        """Tokens that are computed or may be now. Where no draft tokens are wanted, they wait to be computed together;
        the last one, whose logits are wanted with it, waits in any case."""
        assert isinstance(state, HeadState)
        if self._is_wanted(state):
            return state.n_known
        n = min(state.n_known, len(state.tokens) - 1)
        return n if n - state.n_decoded >= _MOST_WAITING else state.n_decoded

    def _tokens_wait(self, state: DraftState) -> bool:
        return state.n_decoded < self._n_ready(state) and self._free_cells > 0

    def _reads_in_parts(self) -> bool:
        return False  # states come in short parts anyway, as the target computes them

    def _chunk_end(self, state: DraftState) -> int:
        end = min(super()._chunk_end(state), self._n_ready(state))
        if end == len(state.tokens) and end - state.n_decoded > self._rows_with_root:
            end -= 1
        return end

    def _part(
        self,
        state: DraftState,
        nodes: list[Node],
        tokens: Sequence[int],
        at: int,
        logits_requests: dict[LogitsRequest, int],
    ) -> RunPart[DraftState]:
        assert isinstance(state, HeadState)
        part = super()._part(state, nodes, tokens, at, logits_requests)
        n_text = part.n_prompt_rows + sum(node is state.tree.root for node in nodes)
        refs = [state.refs.pop(at + i, None) for i in range(n_text)]
        if runs := [ref.run for ref in refs if ref is not None]:
            own = self._in_flight.next_run
            self._reading[own] = min(*runs, self._reading.get(own, runs[0]))
        state.reads_from = max((ref.run for ref in refs if ref is not None), default=state.reads_from)
        for node in nodes[n_text - part.n_prompt_rows :]:
            assert node.parent is not None
            assert node.parent.logits is not None
            refs.append(StateRef(node.parent.run, node.parent.logits.row))
        part.rows = [structs.replace(row, state=ref) for row, ref in zip(part.rows, refs, strict=True)]
        return part
