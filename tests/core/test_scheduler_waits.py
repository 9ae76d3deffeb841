"""Roots and draft tokens that wait before they go into the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import pytest
from support.head_steps import come_back, draft_token, right, speculating, tokens_in_flight
from support.heads import Head, opened

from ggpipe.core.draft_messages import ROOT, BlockOf, Candidates, Expansion, MicroBatch
from ggpipe.core.events import Drafted


def settled(row_s: float = 0.0, **limits: int) -> Head:
    """Runs of one row take a second in each of two stages, each row more `row_s`, and the draft ten milliseconds a
    token; nothing is in flight but the root."""
    head = opened(**limits)
    head.arrive(speculating(n_draft=4))
    come_back(head)
    pace = head.state(1).drafters[0].pace
    for n in 3 * (1, 2, 3, 4, 5):
        stage_s = 1.0 + row_s * (n - 1)
        head.scheduler.cost.ended(n, stage_s, 2 * stage_s)
    pace.noted(True, 0.01)
    pace.noted(False, 0.01)
    head.now += 10
    return head


def test_a_fresh_root_waits_for_draft_tokens_where_that_pays() -> None:
    head = settled()
    (fresh,) = right(head, 1)
    come_back(head)
    assert tokens_in_flight(head) == []
    assert head.scheduler.wake_at is not None
    assert head.now < head.scheduler.wake_at < head.now + 0.1
    sent: list[int] = []
    while not tokens_in_flight(head):
        sent.append(500 + len(sent))
        draft_token(head, len(sent) - 1, len(sent), sent[-1])
    assert len(sent) > 1
    assert tokens_in_flight(head) == [[fresh, *sent]]
    assert head.scheduler.wake_at is None


def from_block(
    head: Head, parent: int, first: int, probs: Sequence[tuple[int, float]], block: BlockOf, again: Candidates = ()
) -> None:
    """Draft tokens of a head that drafts a block at a time. `again`: those of earlier blocks, by their numbers."""
    expansion = Expansion(parent, first, len(probs), tuple(probs), again)
    epoch = len(head.seen[1].text)
    head.handle(Drafted(MicroBatch(request=1, epoch=epoch, expansions=(expansion,), complete=False, block=block)))


@pytest.mark.parametrize(("prob", "waits"), [(0.3, True), (0.95, False)])
def test_a_root_waits_for_its_own_block_where_that_is_better(prob: float, waits: bool) -> None:
    """What an earlier block says of it is there."""
    head = settled()
    fresh, second, third = right(head, 3)
    come_back(head)
    from_block(head, ROOT, 1, [(second, 0.9)], BlockOf.THIS_ROOT)
    head._tick()
    assert tokens_in_flight(head) == [[fresh, second]]
    from_block(head, 1, 2, [(third, 0.9)], BlockOf.THIS_ROOT)
    for i in range(4):
        from_block(head, 2 + i, 3 + i, [(500 + i, prob)], BlockOf.THIS_ROOT)
    head.now += 1
    come_back(head)
    assert [tokens[:3] for tokens in tokens_in_flight(head)] == ([] if waits else [[third, 500, 501]])
    if waits:
        from_block(head, ROOT, 7, [(504, 0.8)], BlockOf.THIS_ROOT, again=((3, 0.1),))
        head._tick()
        assert [tokens[:2] for tokens in tokens_in_flight(head)] == [[third, 504]]
        weighed = {node.token: node.probability for node in head.state(1).tree.root.children.values()}
        assert weighed[500] < weighed[504]


def test_a_fresh_root_does_not_wait_for_a_draft_that_is_late() -> None:
    head = settled()
    (fresh,) = right(head, 1)
    come_back(head)
    draft_token(head, ROOT, 1, 500)
    head._tick()
    assert tokens_in_flight(head) == [[fresh, 500]]


def test_a_root_that_waited_in_vain_takes_only_what_is_worth_a_row() -> None:
    head = settled(row_s=0.1)
    (fresh,) = right(head, 1)
    come_back(head)
    expansion = Expansion(ROOT, 1, 4, ((500, 0.9), (501, 0.02), (502, 0.01), (503, 0.01)))
    head.handle(Drafted(MicroBatch(request=1, epoch=len(head.seen[1].text), expansions=(expansion,), complete=False)))
    assert tokens_in_flight(head) == [], "it waits for what follows 500"
    head._tick()
    assert tokens_in_flight(head) == [[fresh, 500]]


def test_a_single_stage_computes_no_draft_tokens_alone() -> None:
    """Its next run begins when the one before it ends, whether the root is in it or not."""
    head = settled()
    (fresh,) = right(head, 1)
    come_back(head)
    draft_token(head, ROOT, 1, 500, complete=True)
    draft_token(head, 1, 2, 501)
    assert tokens_in_flight(head) == [[fresh, 500]]
    assert head.scheduler.wake_at is None


def test_a_single_stage_tries_a_draft_token_twice_before_it_seems_too_dear() -> None:
    head = opened()
    head.arrive(speculating())
    come_back(head)
    cost, n_drafted = head.scheduler.cost, []
    for _ in range(30):
        cost.ended(1, 1.0, 1.0)
    for i in range(4):
        cost.ended(2, 9.0, 9.0)
        (fresh,) = right(head, 1)
        draft_token(head, ROOT, 1 + 10 * i, fresh, complete=True)
        draft_token(head, 1 + 10 * i, 2 + 10 * i, 500)
        come_back(head)
        n_drafted.append(len(tokens_in_flight(head)[0]) - 1)
    assert n_drafted == [1, 0, 0, 0]


def test_a_fresh_root_does_not_wait_for_a_draft_that_has_nothing() -> None:
    head = settled()
    (fresh,) = right(head, 1)
    come_back(head)
    draft_token(head, ROOT, 1, complete=True)
    assert tokens_in_flight(head) == [[fresh]]


def test_draft_tokens_wait_until_a_stage_is_about_to_be_free() -> None:
    head = settled(n_in_flight=4)
    (fresh,) = right(head, 1)
    come_back(head)
    head._tick()
    assert tokens_in_flight(head) == [[fresh]]
    draft_token(head, ROOT, 1, 500)
    draft_token(head, 1, 2, 501)
    assert tokens_in_flight(head) == [[fresh]]
    assert head.scheduler.wake_at is not None
    assert head.now + 0.5 < head.scheduler.wake_at < head.now + 1
    head._tick()
    assert tokens_in_flight(head) == [[fresh], [500, 501]]


@pytest.mark.parametrize("drafters", [(0,), ()])
def test_a_single_stage_waits_for_the_draft_tokens_of_all(drafters: tuple[int, ...]) -> None:
    """But not for those of a drafter that was not timed, nor where there is none."""
    head = opened(n_requests=2)
    head.arrive(speculating(1))
    head.arrive(replace(speculating(2), drafters=drafters))
    while not (head.seen[1].text and head.seen[2].text):
        come_back(head)
    for n in 3 * (1, 2, 3, 4):
        head.scheduler.cost.ended(n, 1.0, 1.0)
    pace = head.state(1).drafters[0].pace
    pace.noted(True, 0.01)
    pace.noted(False, 0.01)
    head.now += 10
    while tokens_in_flight(head):
        come_back(head)
    assert head.scheduler.wake_at is not None
    assert head.now < head.scheduler.wake_at < head.now + 0.1
    roots = [head.seen[i].text[-1] for i in (1, 2)]
    draft_token(head, ROOT, 1, 500)
    assert [sorted(tokens) for tokens in tokens_in_flight(head)] == [sorted([*roots, 500])]
    assert head.scheduler.wake_at is None
