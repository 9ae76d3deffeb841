"""Draft models that are sent each other's draft tokens: what they decode of them, and what the head makes of it."""

from __future__ import annotations

import pytest
from support.draft_steps import Draft

from ggpipe.core.draft_messages import ROOT, Expansion, MicroBatch, Shared, SharedToken
from ggpipe.core.drafters.request_drafters import RequestDrafters
from ggpipe.core.messages import KvKind, KvOp
from ggpipe.core.sequence_ids import SequenceIds
from ggpipe.core.tree import Tree


def share(draft: Draft, *paths: tuple[int, ...], epoch: int = 0, probability: float = 0.9) -> None:
    """Other drafters' tokens, numbered -1, -2, ..."""
    tokens = tuple(SharedToken(path, -number, probability) for number, path in enumerate(paths, 1))
    draft.say(Shared(1, epoch, tokens))


def begun() -> Draft:
    """A draft model in whose prompt's run the most probable token is 5."""
    draft = Draft()
    draft.begin(policy="best-first")
    draft.answer({5: 0.9})
    draft.take_draft_tokens()
    draft.answer({6: 0.9})
    assert draft.take_draft_tokens() == [(1, 2, 6)]
    assert draft.decoding() == [[(6, 4)]]
    return draft


def test_they_are_decoded_with_its_own_and_named_several_at_once() -> None:
    draft = begun()
    share(draft, (5, 6, 8), (5, 6, 8, 9))
    draft.answer({8: 0.9})
    assert draft.take_draft_tokens() == [(2, 3, 8)]
    assert draft.decoding() == [[(8, 5), (9, 6)]], "one run for both"
    draft.answer({9: 0.9}, {10: 0.9})
    assert draft.take_draft_tokens() == [(-1, 4, 9), (-2, 5, 10)]


def test_it_drafts_after_a_token_that_it_did_not_name() -> None:
    draft = begun()
    share(draft, (5, 6, 20))
    draft.answer({8: 0.2})
    assert (20, 5) in draft.decoding()[0]
    draft.answer(*({21: 0.9} if token == 20 else {30: 0.001} for token, _ in draft.decoding()[0]))
    assert (-1, 21) in [(parent, token) for parent, _, token in draft.take_draft_tokens()]


def test_a_token_against_which_it_is_sure_is_not_decoded() -> None:
    draft = begun()
    share(draft, (5, 6, 20), probability=0.02)
    draft.answer({8: 0.99})
    assert draft.decoding() == [[(8, 5)]]


@pytest.mark.parametrize(("path", "epoch"), [((9, 9), 0), ((5, 6, 8), 1)])
def test_tokens_that_hang_on_nothing_are_left_out(path: tuple[int, ...], epoch: int) -> None:
    draft = begun()
    share(draft, path, epoch=epoch)
    draft.answer({8: 0.9})
    assert draft.decoding() == [[(8, 5)]]


def test_an_accepted_one_keeps_its_cells() -> None:
    draft = begun()
    share(draft, (5, 6, 20))
    draft.answer({8: 0.2})
    draft.answer(*({21: 0.9} for _ in draft.decoding()[0]))
    draft.accept(3, 5, 6, 20)
    draft.take_draft_tokens()
    assert draft.decoding()[-1][-1] == (21, 6), "what follows it, and not the token itself again"
    assert KvOp(KvKind.RM, 0, p0=5) not in draft.runs[-1].ops


def test_the_head_sends_them_and_understands_what_follows_them() -> None:
    tree = Tree(SequenceIds(4, 1), [], token=1, pos=0)
    drafters = RequestDrafters((0, 1), tree)
    drafters[1].look_ahead = 9

    def named(drafter: int, parent: int, *tokens: int, output: tuple[int, ...] = ()) -> tuple[SharedToken, ...]:
        expansion = Expansion(parent, 1, len(tokens), tuple((token, 0.5) for token in tokens))
        batch = MicroBatch(request=1, epoch=len(output), expansions=(expansion,), complete=False, drafter=drafter)
        return drafters.shared_with(1, drafters.add(batch, output, lambda *_: True, 0.0))

    assert [(one.path, one.number) for one in named(0, ROOT, 5, 6)] == [((5,), -1), ((6,), -2)]
    assert not named(1, -1, 7), "its own"
    assert tree.best_leaf.path == (5, 7)
    dead = tree.advance(5)
    drafters.advanced(dead, 1)
    drafters.validate()
    named(1, -1, 8, output=(5,))
    assert {*tree.root.children} == {7, 8}, "the number is that of the root now"
    named(1, -2, 9, output=(5,))
    assert {*tree.root.children} == {7, 8}, "the other one is dead"
