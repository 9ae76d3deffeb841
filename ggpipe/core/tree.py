"""The speculation tree: what may follow the last accepted token, and how it lies in the KV cache's sequences.

A sequence id stands for one path: its cells hold the text so far and one branch of the tree, without a gap. So

    a node that follows the tip of an id   takes that id           no operation
    a node beside one that has it          takes a free id         CP(id of its parent -> new id, up to the node)
    a branch that died                     gives its ids back      RM(id, everything)
    a text that leaves its own branch      cuts it                 RM(id, from there on)

libllama wants a sequence's next token at its last position + 1, also inside one batch; so the ancestors that share a
run with a new branch carry its id too, and the copy ends before them.

Where states cannot go back, a tree has one id, and its draft tokens are taken back as `state_rollback` says.

The target's scheduler and the draft model keep one each: for both, `root` is the last accepted token.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence

import msgspec

from ggpipe.core.messages import KvKind, KvOp, RowLogits
from ggpipe.core.sequence_ids import SequenceIds
from ggpipe.core.state_rollback import StateRollback

_LEAST = 1e-30  # a probability that counts as none, but has a logarithm
_LOG_LEAST = math.log(_LEAST)
_LOG_PATH = operator.attrgetter("log_path")


class Proposal(msgspec.Struct, frozen=True, gc=False):
    """A drafter named a token: under its own number, with its own probability of the token after its parent."""

    drafter: int
    number: int
    prob: float


class Node(msgspec.Struct, eq=False, kw_only=True):
    """A token that may come. Tokens of the prompt and accepted ones are nodes too, while they are in flight."""

    token: int
    pos: int
    parent: Node | None = None
    proposals: list[Proposal] = msgspec.field(default_factory=list)
    """Of the drafters that named it; none: the target's own token."""
    probability: float = 1.0
    """Probability of this token after its parent, as the tree's owner judges the proposals; 1 for accepted ones."""
    log_path: float = 0.0
    """Logarithm of the probabilities of all draft tokens up to this one. Accepted ones add the same to every path."""
    children: dict[int, Node] = msgspec.field(default_factory=dict)
    """By token."""
    seqs: set[int] = msgspec.field(default_factory=set)
    """Ids whose path goes through it; empty until it is submitted."""
    tip_of: int | None = None
    """The id whose path ends here: the next node after this one takes it."""
    run: int = -1
    """The run that carries it; -1 before it is submitted."""
    depth: int = 0
    """Its depth below the root when it was submitted."""
    logits: RowLogits | None = None
    """What its run brought back for it."""
    dead: bool = False
    """It was rejected, or hangs on a rejected one, or its request is over."""

    @property
    def submitted(self) -> bool:
        """A run carries it, or did."""
        return self.run >= 0

    @property
    def sorted_seqs(self) -> tuple[int, ...]:
        """`seqs` in order."""
        return tuple(self.seqs) if len(self.seqs) == 1 else tuple(sorted(self.seqs))

    @property
    def path(self) -> tuple[int, ...]:
        """Its token and those between it and the root, the root's own left out, in order."""
        tokens, node = [], self
        while node.parent is not None:
            tokens.append(node.token)
            node = node.parent
        return tuple(reversed(tokens))

    def within(self, root: Node) -> bool:
        """It is that root, or hangs on it: not dead, and not an earlier root."""
        return not self.dead and (self is root or self.parent is not None)

    def below(self) -> Iterator[Node]:
        """All its descendants, parents before children."""
        rest = list(self.children.values())
        while rest:
            node = rest.pop()
            yield node
            rest += node.children.values()


def _log(probability: float) -> float:
    return math.log(probability) if probability > _LEAST else _LOG_LEAST


def _update_log_paths(nodes: Iterable[Node]) -> None:
    """Set the paths' probabilities of these draft tokens, parents before children."""
    for node in nodes:
        if node.parent is not None:
            node.log_path = node.parent.log_path + _log(node.probability)


class Tree:
    """One request's tree, and the operations that keep the cache in step with it.

    The operations of all trees that share a pipeline go into one list, in pipeline order.
    """

    def __init__(
        self,
        ids: SequenceIds,
        ops: list[KvOp],
        token: int,
        pos: int,
        seq: int | None = None,
        rolls_back: bool = True,
        most_taken_back: int | None = None,
    ) -> None:
        """`token` at `pos` is the last one of the prompt. `seq`: an id taken from `ids`; None takes one. `rolls_back`
        and `most_taken_back`: as in `Limits`."""
        self._states = None if rolls_back else StateRollback(ids, ops, most_taken_back)
        self._ids = ids
        self._ops = ops
        ids.reserved -= 1
        self.seq = ids.take() if seq is None else seq
        """The id of the accepted text."""
        self.root = Node(token=token, pos=pos)
        self._tips: dict[int, Node] = {self.seq: self.root}
        """By id: the deepest node of its path that is in a run."""
        self.root.tip_of = self.seq
        self._waiting: list[Node] = []
        """Draft tokens that are in no run yet, parents before children."""
        self._is_sorted = True
        """`_waiting` is best-first."""
        self.n_nodes = 0
        """Draft tokens below the root."""
        self.n_submitted = 0
        """Live nodes below the root that are in a run, or were: each holds a cell."""

    def add(self, parent: Node, token: int, proposal: Proposal, probability: float) -> Node:
        """Add a draft token that a drafter named. A token that is in the tree already gets a further proposal, and
        `probability` where that is the better one."""
        if (node := parent.children.get(token)) is not None:
            node.proposals.append(proposal)
            if probability > node.probability:
                node.probability = probability
                _update_log_paths((node, *node.below()))
                self._is_sorted = False
            return node
        node = parent.children[token] = Node(
            token=token,
            pos=parent.pos + 1,
            parent=parent,
            proposals=[proposal],
            probability=probability,
            log_path=parent.log_path + _log(probability),
        )
        self._waiting.append(node)
        self._is_sorted = False
        self.n_nodes += 1
        return node

    def reevaluate(self, probabilities: Callable[[Collection[Node]], Iterable[float]]) -> None:
        """Judge all draft tokens again: `probabilities` says how probable the children of a node are after it."""
        parents = [self.root]
        while parents:
            parent = parents.pop()
            siblings = parent.children.values()
            for node, probability in zip(siblings, probabilities(siblings), strict=True):
                node.probability = probability
                node.log_path = parent.log_path + _log(probability)
                if node.children:
                    parents.append(node)
        self._is_sorted = False

    def reevaluate_children(self, parent: Node, probabilities: Iterable[float]) -> None:
        """Judge the children of a node again: how probable each is after it."""
        for node, probability in zip(parent.children.values(), probabilities, strict=True):
            if probability != node.probability:
                node.probability = probability
                _update_log_paths((node, *node.below()))
                self._is_sorted = False

    def best_first(self) -> Sequence[Node]:
        """Draft tokens that are in no run yet, the most probable path first; of equal ones, the older first, so parents
        before their children. It holds until the tree changes. Where states cannot go back, those of one chain."""
        if self._states is not None:
            return list(self._chain())
        if not self._is_sorted:
            self._waiting.sort(key=_LOG_PATH, reverse=True)
            self._is_sorted = True
        return self._waiting

    @property
    def best_leaf(self) -> Node:
        """The end of the chain of most probable draft tokens: what comes next usually follows it."""
        node = self.root
        while node.children:
            node = max(node.children.values(), key=_LOG_PATH)
        return node

    @property
    def has_waiting(self) -> bool:
        """Draft tokens are in no run yet."""
        return bool(self._waiting)

    def _chain(self) -> Iterator[Node]:
        """What follows the deepest node that is in a run, each time the most probable child."""
        children = self._tips[self.seq].children
        while children:
            best = max(children.values(), key=lambda node: node.log_path)
            yield best
            children = best.children

    def place(self, nodes: Iterable[Node], run: int, most: int) -> list[Node]:
        """Give up to `most` nodes their ids and put them into a run; parents come first or are submitted already.

        Nodes for which there is no free id, and what hangs on them, are left out. Returns those that are in.
        """
        placed: list[Node] = []
        for node in nodes:
            if len(placed) == most:
                break
            parent = node.parent
            if parent is None:
                node.seqs = {self.seq}
            elif not parent.submitted or not self._branch(parent, node, run, placed[0] if placed else node):
                continue
            node.run, node.depth = run, node.pos - self.root.pos
            self.n_submitted += node is not self.root
            placed.append(node)
        if placed:
            self._waiting = [node for node in self._waiting if node.run < 0]
            if self._states is not None:
                self._states.placed(placed[-1].pos + 1, placed[-1] is not self.root)
        return placed

    def _branch(self, parent: Node, node: Node, run: int, first: Node) -> bool:
        """Give a node the id whose path ends at its parent, or a new one. False where none is free. `first`: the first
        node of this tree in the run."""
        states, tip = self._states, parent.tip_of
        if states is not None and (tip is None or not states.begin(tip, first.pos, node.pos)):
            return False
        if (seq := parent.tip_of) is None:
            if len(self._ids) <= self._ids.reserved:
                return False
            seq = self._ids.take()
            source, upto, ancestor = min(parent.seqs), node.pos, node.parent
            while ancestor is not None:
                ancestor.seqs.add(seq)
                if ancestor.run == run:
                    upto = ancestor.pos
                ancestor = ancestor.parent
            self._ops.append(KvOp(KvKind.CP, source, seq, 0, upto))
        parent.tip_of, node.tip_of = None, seq
        node.seqs, self._tips[seq] = {seq}, node
        return True

    def advance(self, token: int, afresh: bool = False) -> list[Node]:
        """The token after the root is known: it becomes the root. Returns the nodes that died of it. `afresh`: these
        are all nodes below the old root, and the token is computed again."""
        old = self.root
        child = (None if afresh else old.children.pop(token, None)) or Node(token=token, pos=old.pos + 1)
        dead = self._kill(old.below())
        self.n_submitted -= child.submitted
        self.n_nodes -= len(dead) + (child.parent is old)
        self._waiting = [node for node in self._waiting if not node.dead and node is not child]
        self._keep(child.seqs, child.pos)
        if not child.submitted:
            self._tips[self.seq], child.tip_of = child, self.seq
        old.children, child.parent = {}, None
        self.root = child
        return dead

    def _kill(self, nodes: Iterable[Node]) -> list[Node]:
        dead = list(nodes)
        for node in dead:
            node.dead = True
            node.children.clear()  # no circles are left, which only the garbage collector would free
        self.n_submitted -= sum([node.run >= 0 for node in dead])
        return dead

    def drop_waiting(self) -> None:
        """All draft tokens die. None of them may be in a run."""
        self._kill(self.root.below())
        self.root.children = {}
        self._waiting, self.n_nodes = [], 0

    def _keep(self, seqs: set[int], pos: int) -> None:
        """Free all ids but these; with none, the own one stays, up to `pos`."""
        if seqs:
            if self.seq not in seqs:
                self.seq = min(seqs)
        elif self._tips[self.seq] is not self.root:
            if self._states is None:
                self._ops.append(KvOp(KvKind.RM, self.seq, p0=pos))
            else:
                self._states.reject(self.seq, pos)
        if seqs and self._states is not None:
            self._states.accepted(pos)
        for seq in [s for s in self._tips if s not in seqs and s != self.seq]:
            self._free(seq)

    def _free(self, seq: int) -> None:
        self._ops.append(KvOp(KvKind.RM, seq))
        self._ids.give_back(seq)
        del self._tips[seq]

    @property
    def n_again(self) -> int:
        """Accepted tokens right before the root that are to be decoded again with it."""
        return self._states.n_again if self._states is not None else 0

    def hide(self, first: int, end: int) -> None:
        """Free the cells of the text at positions [first, end), which is decoded, for all paths."""
        self._ops += [KvOp(KvKind.RM, seq, p0=first, p1=end) for seq in self._tips]

    def settle(self, n: int) -> int | None:
        """The request is nearly over, and its first `n` tokens are computed: bring the state back to the end of as many
        of them as possible. Returns their number; None where no state is that old, or where this tree needs none."""
        if self._states is None:
            return None
        if not self.n_submitted and self.root.pos + self.root.submitted - self.n_again == n:
            return n
        return self._states.back(self.seq, n)

    def close(self, keep: bool = False) -> None:
        """The request is over: everything dies. With `keep`, the id of the text becomes the caller's."""
        for node in (self.root, *self.root.below()):
            node.dead = True
            node.children.clear()
        self._waiting = []
        for seq in list(self._tips):
            if not keep or seq != self.seq:
                self._free(seq)
        if self._states is not None:
            self._states.close()
        self._ids.reserved += 1
        self.n_submitted = self.n_nodes = 0

    def validate(self) -> frozenset[int]:
        """Check what must hold of an open tree; returns its ids. Raises AssertionError."""
        nodes, waiting, n_submitted = [self.root], set[Node](), 0
        for node in nodes:  # tests do this after each event: properties of nodes are spelt out
            assert not node.dead, f"{node.token} at {node.pos} is dead and in the tree"
            assert bool(node.seqs) == (submitted := node.run >= 0)
            pos, most = node.pos + 1, node.log_path + 1e-9
            for token, child in node.children.items():
                assert child.token == token
                assert child.pos == pos
                assert child.parent is node
                assert child.proposals, "a draft token that nobody named"
                assert child.log_path <= most
                if child.run < 0:
                    waiting.add(child)
                    continue
                n_submitted += 1
                assert submitted, "a child is submitted before its parent"
                assert child.seqs <= node.seqs, f"{child.seqs} are no ids of the parent"
            nodes += node.children.values()
        assert (len(nodes) - 1, n_submitted) == (self.n_nodes, self.n_submitted)
        places = {node: n for n, node in enumerate(self._waiting)}
        assert len(places) == len(self._waiting), "a draft token waits twice"
        assert places.keys() == waiting
        for node, n in places.items():
            assert node.parent not in places or places[node.parent] < n, "a child waits before its parent"
        assert self.seq in self._tips
        for seq, tip in self._tips.items():
            assert tip.within(self.root), f"the tip of id {seq} is not in the tree"
            assert tip.tip_of == seq, "two ids have one tip"
            assert seq in tip.seqs or (seq == self.seq and tip is self.root)
            assert not any(seq in child.seqs for child in tip.children.values()), f"id {seq} goes on below its tip"
        if self._states is None:
            return frozenset(self._tips)
        assert len(self._tips) == 1, "states of one text in several ids"
        self._states.validate(self.root.pos, self.root.submitted, self._tips[self.seq].pos)
        return frozenset((*self._tips, *self._states.seqs))
