"""How a draft's tree grows, and which draft tokens it sends in which micro-batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
from support.draft_steps import END, Draft

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import ROOT, Vocabularies
from ggpipe.core.drafters.draft_state import candidates
from ggpipe.core.drafters.thresholds import Thresholds
from ggpipe.core.events import Tick
from ggpipe.core.messages import KvKind, KvOp, RowLogits


def test_thresholds_move_with_micro_batches_and_rejected_attempts() -> None:
    policy = Thresholds(SpeculationConfig(p_accept=0.5, p_split=0.3, p_recovery=0.2, p_decay=0.05))
    assert (policy.cutoff, policy.split) == (0.5, 0.3)
    policy.n_batches, policy.n_failed = 2, 3
    assert policy.cutoff == pytest.approx(0.5 + 2 * 0.2 - 3 * 0.05)
    assert policy.split == pytest.approx(0.3 + 2 * 0.2 - 3 * 0.05)
    policy.accepted()
    assert (policy.cutoff, policy.split) == (0.5, 0.3)
    assert policy.can_fall
    assert not Thresholds(SpeculationConfig()).can_fall


def test_probabilities_come_from_logits() -> None:
    assert candidates(RowLogits(0, (5, 6), (3.0, 1.0), 4.0)) == ((5, math.exp(-1)), (6, math.exp(-3)))


def test_candidates_that_are_probable_enough_are_branches() -> None:
    draft = Draft()
    draft.begin(n_parallel=3, p_split=0.2)
    draft.answer({5: 0.4, 6: 0.3, 8: 0.1})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5), (ROOT, 2, 6)]
    assert draft.decoding() == [[(5, 3), (6, 3)]]
    assert draft.runs[0].ops == (KvOp(KvKind.CP, 0, 1, 0, 3),)
    draft.answer({10: 0.5, 11: 0.3, 12: 0.2}, {20: 0.6, 21: 0.3})
    assert draft.take_draft_tokens() == [(1, 3, 10), (1, 4, 11), (2, 5, 20)], "three branches, no more"
    assert draft.decoding() == [[(10, 4), (11, 4), (20, 4)]] or draft.decoding() == [[(10, 4), (20, 4), (11, 4)]]


def test_the_ids_that_there_are_limit_what_is_decoded() -> None:
    draft = Draft(n_seq=1)
    draft.begin(n_parallel=3, p_split=0.2)
    draft.answer({5: 0.4, 6: 0.3})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5), (ROOT, 2, 6)], "the target may have more"
    assert draft.decoding() == [[(5, 3)]]


def test_a_branch_ends_below_the_cutoff() -> None:
    draft = Draft()
    draft.begin(p_accept=0.5)
    draft.answer({5: 0.4})
    assert draft.take_draft_tokens() == []
    assert draft.decoding() == []
    assert draft.drafter.wake_at is None


def test_the_head_hears_when_there_is_no_draft_token_below_its_root() -> None:
    draft = Draft()
    draft.begin(p_accept=0.5)
    draft.answer({5: 0.4})
    assert [batch.complete for batch in draft.sent] == [True]
    draft.accept(1, 9)
    draft.answer({6: 0.9})
    draft.answer({8: 0.4})
    assert [batch.complete for batch in draft.sent] == [True, False], "there is one"


def test_after_a_while_the_cutoff_falls() -> None:
    draft = Draft()
    draft.begin(p_accept=0.5, p_decay=0.1, p_split=1.0)
    draft.now = 1.0
    draft.answer({5: 0.9})
    draft.now = 3.0  # the attempt took 2 s
    draft.answer({6: 0.35})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5)]
    assert draft.drafter.wake_at == 5.0
    draft.now = 4.0
    draft.say(Tick())
    assert draft.drafter.wake_at == 5.0, "too early"
    draft.now = 5.0
    draft.say(Tick())
    assert draft.drafter.wake_at == 7.0, "0.4 is still too much"
    draft.now = 7.0
    draft.say(Tick())
    assert draft.take_draft_tokens() == [(1, 2, 6)]
    assert draft.drafter.wake_at is None


def test_an_accepted_token_starts_the_thresholds_anew() -> None:
    draft = Draft()
    draft.begin(p_accept=0.5, p_decay=0.3)
    draft.answer({5: 0.4})
    assert draft.drafter.wake_at is not None
    draft.accept(1, 9)
    assert draft.drafter.wake_at is None
    draft.answer({6: 0.4})
    assert draft.take_draft_tokens() == []


def test_full_micro_batches_raise_the_cutoff() -> None:
    draft = Draft()
    draft.begin(n_draft=2, p_accept=0.3, p_recovery=0.4, p_split=1.0)
    draft.answer({5: 0.6})
    draft.answer({6: 0.6})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5), (1, 2, 6)]
    draft.answer({8: 0.6})
    assert draft.take_draft_tokens() == []


def test_nothing_is_drafted_below_the_end() -> None:
    draft = Draft()
    draft.begin(n_parallel=3, p_split=0.1, p_decay=0.1)
    draft.answer({5: 0.5, END: 0.4, 6: 0.2})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5)]
    draft.answer({END: 0.9, 6: 0.1})
    assert draft.take_draft_tokens() == []
    assert draft.drafter.wake_at is None


def test_few_draft_tokens_wait_for_more() -> None:
    draft = Draft()
    draft.begin(n_min=2)
    draft.answer({5: 0.9})
    assert draft.sent == []
    draft.answer({6: 0.9})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5), (1, 2, 6)]


def test_a_new_root_sends_what_waits_as_it_was_numbered() -> None:
    draft = Draft()
    draft.begin(n_min=3)
    draft.answer({5: 0.9})
    draft.accept(1, 5)
    (batch,) = draft.sent
    assert batch.epoch == 0
    assert draft.take_draft_tokens() == [(ROOT, 1, 5)]
    draft.answer({6: 0.9})
    draft.answer({8: 0.9})
    draft.answer({9: 0.9})
    (batch,) = draft.sent
    assert batch.epoch == 1
    assert draft.take_draft_tokens() == [(ROOT, 2, 6), (2, 3, 8), (3, 4, 9)]


def test_a_micro_batch_has_no_more_draft_tokens_than_asked() -> None:
    draft = Draft()
    draft.begin(n_draft=2, n_parallel=4, p_split=0.01)
    draft.answer({5: 0.3, 6: 0.2, 8: 0.1, 9: 0.1})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5), (ROOT, 2, 6)]
    draft.answer({10: 0.3, 11: 0.2, 12: 0.1, 13: 0.1}, {20: 0.3, 21: 0.2, 22: 0.1, 23: 0.1})
    assert [sum(e.n for e in batch.expansions) for batch in draft.sent] == [2, 2]


@pytest.mark.parametrize("settings", [{"mode": "speculative"}, {"continuous": False}])
def test_without_overlap_it_says_when_nothing_more_comes(settings: dict[str, Any]) -> None:
    draft = Draft()
    draft.begin(n_draft=2, **settings)
    draft.answer({5: 0.9})
    assert [batch.complete for batch in draft.sent] == [False]
    draft.answer({6: 0.9})
    assert [batch.complete for batch in draft.sent] == [False, True]
    assert draft.decoding() == [], "the second draft token is not needed yet"
    draft.sent.clear()
    draft.accept(1, 5)
    assert draft.sent == []
    assert draft.decoding() == [[(6, 4)]], "half of the micro-batch is still there"
    draft.answer({8: 0.9})
    (batch,) = draft.sent
    assert (batch.epoch, batch.complete) == (1, True)


def test_without_overlap_too_few_draft_tokens_are_none() -> None:
    draft = Draft()
    draft.begin(mode="speculative", n_min=2, p_accept=0.5)
    draft.answer({5: 0.9})
    draft.answer({6: 0.1})
    (batch,) = draft.sent
    assert (batch.expansions, batch.complete) == ((), True)


def test_tokens_that_only_the_draft_has_are_never_drafted() -> None:
    draft = Draft(vocabularies=Vocabularies(n_target=1000, n_draft=1003, stand_in=END))
    draft.begin()
    assert draft.runs[0].logits_requests[0].banned == (7, 1000, 1001, 1002)


def test_nothing_is_drafted_where_all_tokens_are_banned() -> None:
    draft = Draft()
    draft.begin()
    draft.answer({})
    assert draft.take_draft_tokens() == []
    assert draft.decoding() == []
    draft.accept(1, 5)
    assert draft.decoding() == [[(5, 3)]]
