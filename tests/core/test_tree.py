"""Which sequence ids and KV operations a growing, moving tree takes."""

from __future__ import annotations

import math

import pytest
from support.fake_cache import FakeCache
from support.fake_model import Tokens

from ggpipe.core.messages import KvKind, KvOp, Row
from ggpipe.core.sequence_ids import SequenceIds
from ggpipe.core.tree import Node, Proposal, Tree

PROMPT = (101, 102, 103)


class Grower:
    """A tree and the cache that it speaks of."""

    def __init__(self, n_seq: int = 4) -> None:
        self.ids = SequenceIds(n_seq, 1)
        self.ops: list[KvOp] = []
        self.tree = Tree(self.ids, self.ops, PROMPT[-1], len(PROMPT) - 1)
        self.cache = FakeCache(64, n_seq)
        self.cache.decode(
            [Row(token=token, pos=i, seqs=(self.tree.seq,), request=1) for i, token in enumerate(PROMPT[:-1])]
        )
        self._n_runs = 0
        assert self.place(self.tree.root) == ([PROMPT], [])

    def grow(self, parent: Node, *tokens: int) -> list[Node]:
        """Draft tokens one below the other."""
        nodes = []
        for token in tokens:
            parent = self.name(parent, token, 0.5)
            nodes.append(parent)
        return nodes

    def name(self, parent: Node, token: int, probability: float) -> Node:
        """A draft token that is as probable as its drafter says."""
        return self.tree.add(parent, token, Proposal(0, 1, probability), probability)

    def place(self, *nodes: Node, most: int = 99) -> tuple[list[Tokens], list[KvOp]]:
        """Put nodes into a run: what each of those that are in it sees, and the operations before it."""
        self._n_runs += 1
        placed = self.tree.place(nodes, self._n_runs, most)
        ops = list(self.ops)
        self.ops.clear()
        for op in ops:
            self.cache.apply(op)
        rows = [Row(token=node.token, pos=node.pos, seqs=tuple(sorted(node.seqs)), request=1) for node in placed]
        return self.cache.decode(rows), ops

    def take_ops(self) -> list[KvOp]:
        ops = list(self.ops)
        self.ops.clear()
        for op in ops:
            self.cache.apply(op)
        return ops


def test_a_chain_takes_no_operation() -> None:
    it = Grower()
    a, b, c = it.grow(it.tree.root, 1, 2, 3)
    assert it.place(a, b) == ([(*PROMPT, 1), (*PROMPT, 1, 2)], [])
    assert it.place(c) == ([(*PROMPT, 1, 2, 3)], [])
    assert it.tree.n_submitted == 3
    for token in (1, 2, 3):
        assert it.tree.advance(token) == []
    assert it.take_ops() == []
    assert it.tree.root is c
    assert it.tree.n_submitted == 0


def test_a_token_that_was_not_drafted_cuts_the_chain() -> None:
    it = Grower()
    a, b = it.grow(it.tree.root, 1, 2)
    it.place(a, b)
    assert set(it.tree.advance(7)) == {a, b}
    assert it.take_ops() == [KvOp(KvKind.RM, 0, p0=3)]
    assert it.place(it.tree.root) == ([(*PROMPT, 7)], [])
    assert it.tree.n_submitted == 0


def test_a_branch_is_a_copy_up_to_it() -> None:
    it = Grower()
    a, b = it.grow(it.tree.root, 1, 2)
    it.place(a, b)
    (c,) = it.grow(a, 3)
    assert it.place(c) == ([(*PROMPT, 1, 3)], [KvOp(KvKind.CP, 0, 1, 0, 4)])
    assert len(it.cache.cells) == len(PROMPT) + 3, "cells are shared"


def test_ancestors_in_the_same_run_carry_a_branchs_id() -> None:
    it = Grower()
    a, b = it.grow(it.tree.root, 1, 2)
    (c,) = it.grow(a, 3)
    seen, ops = it.place(a, b, c)
    assert seen == [(*PROMPT, 1), (*PROMPT, 1, 2), (*PROMPT, 1, 3)]
    assert ops == [KvOp(KvKind.CP, 0, 1, 0, 3)], "up to the run's first row on that path"
    assert (a.seqs, b.seqs, c.seqs) == ({0, 1}, {0}, {1})


def test_branches_of_later_runs_outlive_the_acceptance_of_their_parent() -> None:
    it = Grower()
    a, b = it.grow(it.tree.root, 1, 2)
    it.place(a)
    (c,) = it.grow(a, 3)
    it.place(b, c)
    assert it.tree.advance(1) == []
    assert it.take_ops() == [], "both branches live"
    (d,) = it.grow(c, 4)
    assert it.place(d) == ([(*PROMPT, 1, 3, 4)], [])


def test_the_branch_that_wins_keeps_its_id() -> None:
    it = Grower()
    a, b = it.grow(it.tree.root, 1)[0], it.grow(it.tree.root, 2)[0]
    it.place(a, b)
    (c,) = it.grow(a, 3)
    it.place(c)
    assert set(it.tree.advance(2)) == {a, c}
    assert it.tree.seq == 1
    assert it.take_ops() == [KvOp(KvKind.RM, 0)], "dead ids go as a whole"
    assert len(it.ids) == 3
    (d,) = it.grow(b, 4)
    assert it.place(d) == ([(*PROMPT, 2, 4)], [])


def test_ids_are_used_again() -> None:
    it = Grower(n_seq=2)
    for i in range(5):
        a, b = it.grow(it.tree.root, 10 * i + 1)[0], it.grow(it.tree.root, 10 * i + 2)[0]
        it.place(a, b)
        it.tree.advance(10 * i + 1 + i % 2)
    it.take_ops()
    assert it.cache.history(it.tree.seq) == (*PROMPT, 1, 12, 21, 32, 41)
    assert len(it.ids) == 1


def test_without_a_free_id_there_is_no_branch() -> None:
    it = Grower(n_seq=1)
    a, b = it.grow(it.tree.root, 1)[0], it.grow(it.tree.root, 2)[0]
    (c,) = it.grow(b, 3)
    assert it.place(a, b, c) == ([(*PROMPT, 1)], [])
    assert not b.submitted
    assert not c.submitted
    assert list(it.tree.best_first()) == [b, c]


def test_branches_leave_ids_for_requests_to_come() -> None:
    it = Grower(n_seq=2)
    it.ids.reserved = 1
    a, b = it.grow(it.tree.root, 1)[0], it.grow(it.tree.root, 2)[0]
    it.place(a, b)
    assert not b.submitted
    other = Tree(it.ids, it.ops, 9, 0)
    assert (other.seq, len(it.ids), it.ids.reserved) == (1, 0, 0)
    other.close()
    assert (len(it.ids), it.ids.reserved) == (1, 1)
    it.place(b)
    assert not b.submitted, "still none"


def test_a_draft_token_that_was_not_submitted_becomes_the_root() -> None:
    it = Grower()
    a, b = it.grow(it.tree.root, 1)[0], it.grow(it.tree.root, 2)[0]
    (c,) = it.grow(b, 3)
    it.place(a)
    assert it.tree.advance(2) == [a]
    assert it.tree.root is b
    assert it.take_ops() == [KvOp(KvKind.RM, 0, p0=3)]
    assert it.place(b, c) == ([(*PROMPT, 2), (*PROMPT, 2, 3)], [])


def test_the_text_may_run_ahead_of_what_is_submitted() -> None:
    it = Grower()
    (a,) = it.grow(it.tree.root, 1)
    it.place(a)
    it.tree.advance(7)
    it.tree.advance(8)
    assert it.take_ops() == [KvOp(KvKind.RM, 0, p0=3)], "once"
    assert it.tree.root.pos == len(PROMPT) + 1
    assert list(it.tree.best_first()) == []


def test_no_more_than_asked_are_placed() -> None:
    it = Grower()
    nodes = it.grow(it.tree.root, 1, 2, 3)
    assert len(it.place(*nodes, most=2)[0]) == 2
    assert list(it.tree.best_first()) == nodes[2:]


def test_draft_tokens_wait_in_the_order_of_their_paths() -> None:
    it = Grower()
    tree, root = it.tree, it.tree.root
    a, b = it.name(root, 1, 0.4), it.name(root, 2, 0.6)
    c, d = it.name(b, 3, 0.9), it.name(a, 4, 1.0)
    assert list(tree.best_first()) == [b, c, a, d]
    it.place(b)
    assert list(tree.best_first()) == [c, a, d]
    tree.advance(2)
    assert list(tree.best_first()) == [c]


def test_of_equally_probable_paths_the_shallower_one_comes_first() -> None:
    it = Grower()
    root = it.tree.root
    a, b = it.name(root, 1, 0.5), it.name(root, 2, 0.25)
    c, d = it.name(a, 3, 0.5), it.name(a, 4, 1.0)
    assert list(it.tree.best_first()) == [a, d, b, c]
    assert it.tree.n_nodes == 4


def test_what_dies_holds_no_circle_of_references() -> None:
    it = Grower()
    a, b, c = it.grow(it.tree.root, 1, 2, 3)
    it.name(b, 4, 0.5)
    it.place(a, b)
    it.tree.advance(7)
    assert not any(node.children for node in (a, b, c)), "only the garbage collector would free them"
    assert it.tree.n_nodes == 0


def test_a_token_that_several_drafters_name_is_as_probable_as_its_best_proposal() -> None:
    it = Grower()
    tree, root = it.tree, it.tree.root
    a, b = it.name(root, 1, 0.4), it.name(root, 2, 0.6)
    c = it.name(a, 3, 0.9)
    assert list(tree.best_first()) == [b, a, c]
    assert tree.add(root, 1, Proposal(7, 12, 0.2), 0.9) is a, "another drafter had named it"
    assert a.proposals == [Proposal(0, 1, 0.4), Proposal(7, 12, 0.2)]
    assert list(tree.best_first()) == [a, c, b]
    assert c.log_path == pytest.approx(math.log(0.81))
    assert tree.add(root, 1, Proposal(8, 3, 0.99), 0.1) is a
    assert a.probability == 0.9


def test_paths_are_reckoned_again_as_drafters_turn_out_to_be_worth() -> None:
    it = Grower()
    a, b, c = it.grow(it.tree.root, 1, 2, 3)
    it.place(a)
    it.tree.reevaluate(lambda siblings: [node.proposals[0].prob / node.pos for node in siblings])
    expected = [0.5 / 3, 0.5 / 3 * 0.5 / 4, 0.5 / 3 * 0.5 / 4 * 0.5 / 5]
    assert [math.exp(node.log_path) for node in (a, b, c)] == pytest.approx(expected)


def test_siblings_are_reckoned_again_with_what_is_below_them() -> None:
    it = Grower()
    root = it.tree.root
    a, b = it.name(root, 1, 0.6), it.name(root, 2, 0.5)
    c = it.name(a, 3, 0.9)
    assert list(it.tree.best_first()) == [a, c, b]
    it.tree.reevaluate_children(root, [0.2, 0.7])
    assert list(it.tree.best_first()) == [b, a, c]
    assert math.exp(c.log_path) == pytest.approx(0.2 * 0.9)
    it.tree.validate()


def test_long_texts_do_not_wear_probabilities_down() -> None:
    it = Grower()
    for i in range(3000):
        it.name(it.tree.root, i, 0.3)
        it.tree.advance(i)
    root = it.tree.root
    worse, better = it.name(root, 1, 0.3), it.name(root, 2, 0.4)
    impossible = it.name(root, 3, 0.0)
    assert list(it.tree.best_first()) == [better, worse, impossible]


def test_the_end_leaves_nothing() -> None:
    it = Grower()
    a, b = it.grow(it.tree.root, 1)[0], it.grow(it.tree.root, 2)[0]
    it.place(a, b)
    it.tree.close()
    assert it.take_ops() == [KvOp(KvKind.RM, 0), KvOp(KvKind.RM, 1)]
    assert not it.cache.cells
    assert len(it.ids) == 4
    assert a.dead
    assert not a.within(it.tree.root)


@pytest.mark.parametrize("n", [1, 2, 5])
def test_free_ids_are_taken_from_the_lowest(n: int) -> None:
    ids = SequenceIds(n, 0)
    taken = [ids.take() for _ in range(n)]
    assert taken == list(range(n))
    for seq in reversed(taken):
        ids.give_back(seq)
    assert (ids.take(), len(ids)) == (0, n - 1)
