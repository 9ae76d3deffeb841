"""What the head knows of the drafters that work for a request, one entry each: look-ahead, pace, calibration, numbers.

A token may be named by several drafters. Each of them keeps its own number for it and its own probability
(`core.tree.Proposal`), and is judged by that probability only. How probable the token is, all of them say together
(`consensus`).
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence

from msgspec import structs

from ggpipe.core.draft_messages import ROOT, BlockOf, MicroBatch, SharedToken
from ggpipe.core.drafters.calibration import Calibration, Pace
from ggpipe.core.drafters.consensus import Consensus
from ggpipe.core.request import Counters
from ggpipe.core.tree import Node, Proposal, Tree


class DrafterState:
    """What the head knows of one drafter's work for a request."""

    def __init__(self, answers_at_once: bool = False) -> None:
        self.answers_at_once = answers_at_once
        """Whether it needs no model, so that its draft tokens for a root are in the tree before the root is
        submitted."""
        self.drafts_blocks = False
        """Whether it drafts anew at a root, even where its draft tokens from an earlier one are still good."""
        self.calibration = Calibration()
        self.pace = Pace()
        self.look_ahead = 0
        """How far it may be ahead of the root; 0: it computes nothing."""
        self.is_paused = False
        """Whether it is paused because it does not pay."""
        self.n_told = 0
        """Accepted tokens that it was sent."""
        self.told_look_ahead = 0
        """The look-ahead that it was sent last."""
        self.complete = False
        """Whether it sends no more draft tokens below this root."""
        self.nodes: dict[int, Node] = {}
        """Live draft tokens by its numbers, and those of others by the numbers under which it was sent them."""
        self.shared: dict[Node, int] = {}
        """Live draft tokens of others that it was sent, with their numbers."""
        self.n_shared = 0
        """Draft tokens of others that it was sent so far."""
        self.accepted: dict[int, int] = {}
        """Its draft tokens that became text: number -> tokens accepted with it."""

    @property
    def is_steered(self) -> bool:
        """It is sent accepted tokens now. A drafter that knows that it is to compute nothing gets them later."""
        return self.answers_at_once or self.look_ahead > 0 or self.told_look_ahead > 0

    @property
    def is_due(self) -> bool:
        """Whether it may send more draft tokens below this root."""
        return self.look_ahead > 0 and not self.complete


class RequestDrafters:
    """All drafters of one request, by their ids."""

    def __init__(self, drafters: Iterable[int], tree: Tree, at_once: Container[int] = ()) -> None:
        """`tree`: of the request; draft tokens go into it. `at_once`: ids of the drafters that need no model."""
        self._states = {drafter: DrafterState(drafter in at_once) for drafter in drafters}
        self.at_once = frozenset(drafter for drafter in self._states if drafter in at_once)
        """Those that need no model."""
        self._calibrations = {drafter: state.calibration for drafter, state in self._states.items()}
        self._consensus = Consensus()
        self._together = Calibration()
        self._tree = tree

    def __iter__(self) -> Iterator[tuple[int, DrafterState]]:
        """(id, state) of each drafter, in the order in which the request names them."""
        return iter(self._states.items())

    def __len__(self) -> int:
        return len(self._states)

    def __contains__(self, drafter: int) -> bool:
        return drafter in self._states

    def __getitem__(self, drafter: int) -> DrafterState:
        return self._states[drafter]

    @property
    def leading(self) -> DrafterState:
        """The drafter for whose further draft tokens a root may wait: the one that agrees most often with the target,
        of those that may send more below this root; of all with a model where none may. Drafters without one have sent
        what they have."""
        states = self._states.values()
        slow = [state for state in states if not state.answers_at_once]
        due = [state for state in slow if state.is_due]
        return max(due or slow or states, key=lambda state: state.calibration.agreement)

    @property
    def calibration(self) -> Calibration:
        """What all drafters reach together: how often the most probable draft token is right, whoever named it."""
        return self._together if len(self._states) > 1 else self.leading.calibration

    @property
    def coming(self) -> Calibration:
        """The agreement of draft tokens that are still to come below this root: that of their drafter, or what several
        of them reach together."""
        n_due = sum(state.is_due for state in self._states.values() if not state.answers_at_once)
        return self.calibration if n_due > 1 else self.leading.calibration

    @property
    def any_paused(self) -> bool:
        """A drafter is paused because it does not pay."""
        return any([state.is_paused for state in self._states.values()])

    @property
    def all_complete(self) -> bool:
        """No drafter sends more draft tokens below this root."""
        return not any(state.is_due for state in self._states.values())

    def _probabilities(self, siblings: Collection[Node]) -> Sequence[float]:
        """How probable each of these draft tokens, all children of a node, is after it."""
        if len(self._states) > 1:
            together = self._consensus.probabilities(siblings, self._calibrations)
            if together is not None:
                return together
        return [self._probability(node) for node in siblings]

    def _probability(self, node: Node) -> float:
        """How probable a draft token is, as the drafter says that gives it most."""
        calibrations, proposals = self._calibrations, node.proposals
        if len(proposals) == 1:
            return calibrations[proposals[0].drafter].probability(proposals[0].prob)
        return max([calibrations[proposal.drafter].probability(proposal.prob) for proposal in proposals])

    def root_sent(self, now: float) -> None:
        """The drafters are sent the root."""
        named_by = {proposal.drafter for proposal in self._tree.root.proposals}
        for drafter, state in self._states.items():
            state.pace.root_sent(drafter not in named_by, now)

    def judge(self, token: int, counters: Counters) -> None:
        """The target's token after the root is known: each drafter that named one is judged by its own numbers."""
        siblings = self._tree.root.children.values()
        if len(self._states) > 1 and siblings:
            self._consensus.judged(siblings, token, self._calibrations)
            likeliest = max(siblings, key=lambda node: node.probability)
            self._together.judged(likeliest.probability, likeliest.token == token)
        best: dict[int, tuple[Proposal, bool]] = {}
        named: list[tuple[Proposal, bool]] = []
        for node in siblings:
            for proposal in node.proposals:
                one = proposal, node.token == token
                named.append(one)
                if proposal.drafter not in best or proposal.prob > best[proposal.drafter][0].prob:
                    best[proposal.drafter] = one
        for one in named:
            proposal, is_right = one
            is_best = best[proposal.drafter] is one
            self._states[proposal.drafter].calibration.judged(proposal.prob, is_right, is_best)
            if is_best:
                counters.judged(proposal.drafter, is_right)
        for drafter, state in self._states.items():
            if state.complete and not state.answers_at_once and drafter not in best:  # no token was worth sending
                state.calibration.judged(0.0, False)

    def advanced(self, dead: Iterable[Node], epoch: int) -> None:
        """The tree has its next root, with `epoch` accepted tokens, and these nodes died of it."""
        root = self._tree.root
        for proposal in root.proposals:
            self._states[proposal.drafter].accepted[proposal.number] = epoch
        for node in (root, *dead):
            for proposal in node.proposals:
                self._states[proposal.drafter].nodes.pop(proposal.number, None)
        for state in self._states.values():
            state.complete = False
            if (number := state.shared.get(root)) is not None:
                state.accepted[number] = epoch
            for node in (root, *dead) if state.shared else ():
                if (number := state.shared.pop(node, None)) is not None:
                    del state.nodes[number]
        self._tree.reevaluate(self._probabilities)

    def add(
        self, micro_batch: MicroBatch, output: Sequence[int], may_follow: Callable[[Node, int], bool], now: float
    ) -> list[Node]:
        """A drafter sent draft tokens: add those to the tree that may still be accepted, and that `may_follow` their
        parents, and return them. `output`: all accepted tokens. The drafter must be one of the request's."""
        state, added = self._states[micro_batch.drafter], list[Node]()
        state.drafts_blocks |= micro_batch.block is not BlockOf.NONE
        if micro_batch.epoch == len(output):
            if not state.answers_at_once and micro_batch.block is not BlockOf.EARLIER_ROOT:
                state.pace.came(_n_levels(micro_batch), now, at_once=micro_batch.block is BlockOf.THIS_ROOT)
            state.complete = state.complete or micro_batch.complete
        for expansion in micro_batch.expansions:
            at = micro_batch.epoch if expansion.parent == ROOT else state.accepted.get(expansion.parent)
            parent = state.nodes.get(expansion.parent)
            for i, (token, prob) in enumerate(expansion.candidates[: expansion.n]):
                number = expansion.first + i
                if at is not None:  # after the accepted tokens that the drafter knew
                    if at < len(output):  # a token was accepted since: whether it was this one is known
                        if output[at] == token:
                            state.accepted[number] = at + 1
                        continue
                    parent = self._tree.root
                if parent is not None and parent.within(self._tree.root) and may_follow(parent, token):
                    proposal = Proposal(micro_batch.drafter, number, prob)
                    node = self._tree.add(parent, token, proposal, state.calibration.probability(prob))
                    state.nodes[number] = node
                    added.append(node)
            if parent is None and at == len(output):
                parent = self._tree.root
            if parent is not None and expansion.again and parent.within(self._tree.root):
                self._name_again(micro_batch.drafter, parent, dict(expansion.again))
            if parent is not None and len(self._states) > 1:
                together = self._consensus.probabilities(parent.children.values(), self._calibrations)
                if together is not None:
                    self._tree.reevaluate_children(parent, together)
        return added

    def _name_again(self, drafter: int, parent: Node, probs: Mapping[int, float]) -> None:
        """A drafter sent new probabilities of draft tokens after this node. `probs`: by its numbers."""
        for child in parent.children.values():
            child.proposals = [
                structs.replace(one, prob=probs.get(one.number, one.prob)) if one.drafter == drafter else one
                for one in child.proposals
            ]
        self._tree.reevaluate_children(parent, [self._probability(child) for child in parent.children.values()])

    def shared_with(self, drafter: int, nodes: Iterable[Node]) -> tuple[SharedToken, ...]:
        """Those of these draft tokens, which another drafter just named, that this one is to be sent."""
        known, tokens = self._states[drafter], list[SharedToken]()
        for node in nodes if known.look_ahead > 0 else ():
            if node not in known.shared and all(proposal.drafter != drafter for proposal in node.proposals):
                known.n_shared += 1
                number = known.shared[node] = -known.n_shared
                known.nodes[number] = node
                tokens.append(SharedToken(node.path, number, node.probability))
        return tuple(tokens)

    def validate(self) -> None:
        """Check what must hold between events. Raises AssertionError."""
        named: dict[tuple[int, int], Node] = {}
        for node in self._tree.root.below():
            for proposal in node.proposals:
                named[proposal.drafter, proposal.number] = node
        for drafter, state in self._states.items():
            named |= {(drafter, number): node for node, number in state.shared.items()}
            for number, node in state.nodes.items():
                assert node.within(self._tree.root), f"drafter {drafter} has a dead node"
                assert named[drafter, number] is node, f"drafter {drafter} has another one's node"


def _n_levels(micro_batch: MicroBatch) -> int:
    """How much deeper a micro-batch makes a tree at most: its draft tokens may follow each other."""
    levels: dict[int, int] = {}
    for expansion in micro_batch.expansions:
        level = levels.get(expansion.parent, 0) + 1
        levels |= dict.fromkeys(range(expansion.first, expansion.first + expansion.n), level)
    return max(levels.values(), default=0)
