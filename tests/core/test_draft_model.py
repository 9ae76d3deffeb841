"""What the draft decodes, step by step: prompts, draft tokens, and what follows an accepted token.

Whole interleavings are in test_scheduler.py."""

from __future__ import annotations

import pytest
from support.draft_steps import END, Draft

from ggpipe.core.draft_messages import ROOT, Accepted, EndDrafting, Vocabularies
from ggpipe.core.events import RunEnded
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, RunResult
from ggpipe.core.prompt_chunks import chunk_rows


def test_the_prompt_is_decoded_in_chunks_and_asks_once() -> None:
    draft = Draft(n_ubatch=2)
    draft.begin()
    assert draft.decoding() == [[(101, 0), (102, 1)], [(103, 2)]]
    assert [row.logits_request for run in draft.runs for row in run.rows] == [-1, -1, 0]
    (want,) = draft.runs[-1].logits_requests
    assert (want.kind, want.banned) == (LogitsKind.TOP, (7,))
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


@pytest.mark.parametrize(("look_ahead", "n_left", "n_draft_tokens"), [(2, 50, 2), (9, 4, 3), (9, 1, 0)])
def test_it_stops_ahead_of_the_text(look_ahead: int, n_left: int, n_draft_tokens: int) -> None:
    draft = Draft()
    draft.begin(look_ahead=look_ahead, n_left=n_left)
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
    assert [row.logits_request for row in draft.runs[-1].rows] == [-1, -1, 0]


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


def test_the_end_cancels_and_empties() -> None:
    draft = Draft()
    draft.begin()
    draft.answer({5: 0.9})
    draft.say(EndDrafting(1))
    assert draft.cancelled == [draft.runs[0].id]
    assert (draft.runs[1].rows, draft.runs[1].ops) == ((), (KvOp(KvKind.RM, 0),))
    draft.say(Accepted(1, 1, (5,), 9))
    assert draft.decoding() == [[]]


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
        narrow.answer(*({5: 0.9} for row in narrow.runs[0].rows if row.logits_request >= 0))
    requests = []
    for i in range(6):
        requests.append(narrow.runs[0].rows[0].request)
        narrow.answer({20 + i: 0.9})
    assert requests == [1, 2, 1, 2, 1, 2]


def test_a_prompt_keeps_all_stages_of_the_draft_busy() -> None:
    for n_stages in (1, 2, 3):
        draft = Draft(n_in_flight=n_stages + 1, n_ctx=999, n_batch=512, n_ubatch=512)
        draft.begin(prompt=tuple(range(101, 301)))
        n_rows = chunk_rows(200, n_stages, 512)
        expected = [n_rows] * (n_stages + 1) if n_stages > 1 else [200]
        assert [len(run.rows) for run in draft.runs] == expected


def test_a_prompt_is_read_in_parts_while_another_request_drafts() -> None:
    draft = Draft(n_requests=2, n_ctx=999, n_batch=512, n_ubatch=512)
    draft.begin(1)
    draft.answer({5: 0.9})
    draft.begin(2, prompt=tuple(range(201, 301)))
    sizes = []
    for i in range(3):
        (run,) = draft.runs
        sizes.append(tuple(sum(row.request == request for row in run.rows) for request in (1, 2)))
        draft.answer(*({10 + i: 0.9} for row in run.rows if row.logits_request >= 0))
    assert sizes == [(1, 0), (1, 32), (1, 32)]
    draft.accept(1, 50)  # which was not drafted
    assert [len(run.rows) for run in draft.runs] == [1 + 32, 1], "it does not wait for the prompt"
    draft.answer({20: 0.9})
    draft.answer({21: 0.9})
    assert [len(run.rows) for run in draft.runs] == [1 + 4]


def test_a_prompt_is_read_whole_while_nobody_drafts() -> None:
    draft = Draft(n_requests=2, n_ctx=999, n_batch=512, n_ubatch=512)
    draft.begin(1, look_ahead=1)
    draft.answer({5: 0.9})
    draft.say(Accepted(1, 0, (), 0))
    draft.begin(2, prompt=tuple(range(201, 301)))
    assert [len(run.rows) for run in draft.runs] == [100]


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
