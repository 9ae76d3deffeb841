"""What the draft decodes and what it sends, step by step. Whole interleavings are in test_scheduler.py."""

from __future__ import annotations

import math
from typing import Any

import pytest

from ggpipe.config import SpeculationConfig
from ggpipe.core.draft_messages import ROOT, Accepted, Begin, Done, MicroBatch, Vocabularies
from ggpipe.core.drafters.base import DraftEvent, Send
from ggpipe.core.drafters.draft_model import DraftModel
from ggpipe.core.drafters.growth import candidates
from ggpipe.core.drafters.thresholds import Thresholds
from ggpipe.core.events import Cancel, RunEnded, Submit, Tick
from ggpipe.core.messages import KvKind, KvOp, RowLogits, Run, RunResult, WantKind
from ggpipe.core.request import Limits

END = 0
PROMPT = (101, 102, 103)
Candidates = dict[int, float]


class Draft:
    """A drafter whose model thinks what the test says."""

    def __init__(self, vocabularies: Vocabularies | None = None, **limits: int) -> None:
        known: dict[str, Any] = {"n_ctx": 99, "n_batch": 8, "n_ubatch": 8, "n_in_flight": 2, "n_seq": 4} | limits
        self.drafter = DraftModel(Limits(**known), vocabularies)
        self.runs: list[Run] = []
        self.sent: list[MicroBatch] = []
        self.cancelled: list[int] = []
        self.now = 0.0

    def say(self, event: DraftEvent) -> None:
        for action in self.drafter.handle(event, self.now):
            match action:
                case Submit(run):
                    self.runs.append(run)
                case Cancel(runs):
                    self.cancelled += runs
                case Send(batch):
                    self.sent.append(batch)

    def begin(
        self,
        request: int = 1,
        lead: int = 9,
        n_left: int = 50,
        prompt: tuple[int, ...] = PROMPT,
        cache_prompt: bool = True,
        **settings: Any,
    ) -> None:
        speculation = SpeculationConfig(**settings)
        self.lead = lead
        self.say(
            Begin(
                request=request,
                prompt=prompt,
                n_left=n_left,
                lead=lead,
                ends=frozenset({END}),
                banned=(7,),
                speculation=speculation,
                cache_prompt=cache_prompt,
            )
        )

    def accept(self, epoch: int, *tokens: int) -> None:
        self.say(Accepted(1, epoch, tokens, self.lead))

    def answer(self, *rows: Candidates) -> None:
        """The oldest run comes back: what follows each row that asked."""
        run = self.runs.pop(0)
        asked = [i for i, row in enumerate(run.rows) if row.want >= 0]
        assert len(asked) == len(rows)
        answers = [
            RowLogits(i, tuple(row), tuple(5 + math.log(prob) for prob in row.values()), 5.0)
            for i, row in zip(asked, rows, strict=True)
        ]
        self.say(RunEnded(RunResult(run.id, tuple(answers))))

    def decoding(self) -> list[list[tuple[int, int]]]:
        """(token, position) of all that is in flight."""
        return [[(row.token, row.pos) for row in run.rows] for run in self.runs if run.id not in self.cancelled]

    def take_draft_tokens(self) -> list[tuple[int, int, int]]:
        """(parent, number, token) of what was sent since."""
        expansions = [expansion for batch in self.sent for expansion in batch.expansions]
        self.sent.clear()
        return [(e.parent, e.first + i, token) for e in expansions for i, (token, _) in enumerate(e.candidates[: e.n])]


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


def test_the_prompt_is_decoded_in_chunks_and_asks_once() -> None:
    draft = Draft(n_ubatch=2)
    draft.begin()
    assert draft.decoding() == [[(101, 0), (102, 1)], [(103, 2)]]
    assert [row.want for run in draft.runs for row in run.rows] == [-1, -1, 0]
    (want,) = draft.runs[-1].wants
    assert (want.kind, want.banned) == (WantKind.TOP, (7,))
    assert want.n > 1


def test_each_answer_is_a_draft_token_and_the_next_run() -> None:
    draft = Draft()
    draft.begin(p_split=0.9)
    draft.answer({5: 0.6, 6: 0.3})
    assert draft.take_draft_tokens() == [(ROOT, 1, 5)]
    assert draft.decoding() == [[(5, 3)]]
    draft.answer({8: 0.6, 9: 0.3})
    assert draft.take_draft_tokens() == [(1, 2, 8)]
    assert draft.decoding() == [[(8, 4)]]
    assert draft.runs[0].ops == ()


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


@pytest.mark.parametrize(("lead", "n_left", "n_draft_tokens"), [(2, 50, 2), (9, 4, 3), (9, 1, 0)])
def test_it_stops_ahead_of_the_text(lead: int, n_left: int, n_draft_tokens: int) -> None:
    draft = Draft()
    draft.begin(lead=lead, n_left=n_left)
    for i in range(9):
        if draft.decoding():
            draft.answer({10 + i: 0.9})
    assert len(draft.take_draft_tokens()) == n_draft_tokens
    if n_left > n_draft_tokens + 1:
        draft.accept(1, 10)
        assert draft.decoding() == [[(10 + n_draft_tokens - 1, 2 + n_draft_tokens)]], "and goes on"


def test_a_right_draft_token_keeps_what_is_decoded() -> None:
    draft = Draft()
    draft.begin()
    draft.answer({5: 0.9})
    draft.answer({6: 0.9})
    draft.accept(2, 5, 6)
    assert draft.decoding() == [[(6, 4)]]
    draft.answer({8: 0.9})
    assert draft.take_draft_tokens()[-1] == (ROOT, 3, 8)
    assert draft.runs[0].ops == ()


def test_a_wrong_draft_token_is_rolled_back() -> None:
    draft = Draft()
    draft.begin()
    draft.answer({5: 0.9})
    draft.answer({6: 0.9})
    wrong = draft.runs[0].id
    draft.accept(1, 9)
    assert draft.cancelled == [wrong]
    assert draft.decoding() == [[(9, 3)]]
    assert draft.runs[1].ops == (KvOp(KvKind.RM, 0, p0=3),)


def test_the_branch_that_was_right_stays() -> None:
    draft = Draft()
    draft.begin(n_parallel=2)
    draft.answer({5: 0.5, 6: 0.4})
    draft.answer({8: 0.9}, {9: 0.9})
    both = draft.runs[0]
    draft.accept(1, 6)
    assert draft.cancelled == [], "one row lives"
    draft.answer({10: 0.9}, {11: 0.9})
    assert draft.take_draft_tokens()[-1] == (4, 5, 11), "nothing comes of the other one"
    assert draft.runs[0].ops == (KvOp(KvKind.RM, 0),)
    assert [row.seqs for row in draft.runs[0].rows] == [both.rows[1].seqs]


def test_text_that_it_did_not_see_coming_is_decoded_at_once() -> None:
    draft = Draft()
    draft.begin()
    draft.answer({5: 0.9})
    draft.accept(3, 20, 21, 22)
    assert draft.decoding() == [[(20, 3), (21, 4), (22, 5)]]
    assert [row.want for row in draft.runs[-1].rows] == [-1, -1, 0]


def test_an_adopted_draft_token_that_was_not_decoded_is_decoded_as_text() -> None:
    draft = Draft(n_seq=1)
    draft.begin(n_parallel=2)
    draft.answer({5: 0.5, 6: 0.4})
    draft.accept(1, 6)
    assert draft.decoding() == [[(6, 3)]]
    draft.take_draft_tokens()
    draft.answer({})  # the cancelled one
    draft.answer({8: 0.9})
    assert draft.take_draft_tokens() == [(ROOT, 3, 8)]


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


def test_the_end_cancels_and_empties() -> None:
    draft = Draft()
    draft.begin()
    draft.answer({5: 0.9})
    draft.say(Done(1))
    assert draft.cancelled == [draft.runs[0].id]
    assert (draft.runs[1].rows, draft.runs[1].ops) == ((), (KvOp(KvKind.RM, 0),))
    draft.say(Accepted(1, 1, (5,), 9))
    assert draft.decoding() == [[]]


def a_text_of_five_is_kept(**limits: int) -> Draft:
    """Two tokens behind the prompt are accepted, a third one was decoded."""
    draft = Draft(None, n_prefixes=2, n_seq=3, **limits)
    draft.begin()
    for token in (5, 6, 8):
        draft.answer({token: 0.9})
    draft.accept(2, 5, 6)
    draft.say(Done(1))
    draft.runs.clear()
    return draft


def test_what_was_decoded_of_an_ended_text_is_not_decoded_again() -> None:
    draft = a_text_of_five_is_kept()
    draft.begin(2, prompt=(*PROMPT, 5, 6, 20, 21))
    assert draft.decoding() == [[(20, 5), (21, 6)]]
    assert draft.runs[0].rows[0].seqs == (0,)


def test_a_common_part_of_an_ended_text_is_copied() -> None:
    draft = a_text_of_five_is_kept()
    draft.begin(2, prompt=(*PROMPT, 5, 20))
    assert draft.decoding() == [[(20, 4)]]
    assert draft.runs[0].ops == (KvOp(KvKind.CP, 0, 1, 0, 4),)


def test_draft_tokens_behind_an_ended_text_are_cut_off() -> None:
    draft = Draft(n_prefixes=2, n_seq=3)
    draft.begin()
    for token in (5, 6, 8):
        draft.answer({token: 0.9})
    draft.accept(1, 5)
    draft.say(Done(1))
    assert draft.runs[-1].ops == (KvOp(KvKind.RM, 0, p0=4),)
    draft.begin(2, prompt=(*PROMPT, 5, 6, 8))
    assert draft.decoding()[-1] == [(6, 4), (8, 5)]


def test_text_in_flight_is_not_kept() -> None:
    draft = Draft(n_prefixes=2, n_seq=3, n_ubatch=1, n_in_flight=2)
    draft.begin()
    draft.answer()
    draft.say(Done(1))
    assert draft.drafter._prefixes.kept == {0: PROMPT[:1]}


def test_kept_texts_make_room() -> None:
    draft = a_text_of_five_is_kept(n_ctx=9)
    draft.begin(2, prompt=(1, 2, 3), n_left=5)
    ops = [draft.runs[0].ops]
    for token in (4, 5):
        draft.answer({token: 0.9})
        ops.append(draft.runs[0].ops)
    assert draft.decoding() == [[(5, 4)]]
    assert ops == [(), (), (KvOp(KvKind.RM, 0),)], "a tenth cell is needed"


def test_a_request_without_the_cache_neither_takes_nor_keeps() -> None:
    draft = a_text_of_five_is_kept()
    draft.begin(2, prompt=(*PROMPT, 5, 6, 20), cache_prompt=False)
    assert len(draft.runs[0].rows) == 6
    draft.answer({7: 0.9})
    draft.say(Done(2))
    assert draft.drafter._prefixes.kept == {0: (*PROMPT, 5, 6)}


def test_two_requests_share_a_run_and_take_turns_where_rows_are_few() -> None:
    draft = Draft(n_requests=2, n_in_flight=4)
    draft.begin(1)
    draft.begin(2)
    draft.answer({5: 0.9})
    draft.answer({6: 0.9})
    for i in range(3):
        assert sorted(row.request for row in draft.runs[0].rows) == [1, 2]
        draft.answer({30 + i: 0.9}, {40 + i: 0.9})
    narrow = Draft(n_requests=2, n_in_flight=4, n_ubatch=1)
    narrow.begin(1)
    narrow.begin(2)
    while narrow.runs[0].rows[0].pos < 3:
        narrow.answer(*({5: 0.9} for row in narrow.runs[0].rows if row.want >= 0))
    requests = []
    for i in range(6):
        requests.append(narrow.runs[0].rows[0].request)
        narrow.answer({20 + i: 0.9})
    assert requests == [1, 2, 1, 2, 1, 2]


def test_a_run_ends_once() -> None:
    with pytest.raises(ValueError, match="run 5 is not in flight"):
        Draft().say(RunEnded(RunResult(5)))


def test_a_stand_in_is_read_for_tokens_that_only_the_target_has() -> None:
    """In the prompt and behind it; draft tokens below it hang on the target's token."""
    draft = Draft(vocabularies=Vocabularies(n_target=104, n_draft=103, stand_in=END))
    draft.begin()
    assert draft.decoding() == [[(101, 0), (102, 1), (END, 2)]]
    draft.answer({50: 0.9, END: 0.1})
    assert draft.take_draft_tokens() == [(ROOT, 1, 50)]
    draft.accept(1, 103)
    draft.answer({60: 0.9})  # what the rejected draft token gave
    assert draft.decoding() == [[(END, 3)]]
    draft.answer({51: 0.9})
    assert draft.take_draft_tokens() == [(ROOT, 2, 51)]


def test_tokens_that_only_the_draft_has_are_never_drafted() -> None:
    draft = Draft(vocabularies=Vocabularies(n_target=1000, n_draft=1003, stand_in=END))
    draft.begin()
    assert draft.runs[0].wants[0].banned == (7, 1000, 1001, 1002)
