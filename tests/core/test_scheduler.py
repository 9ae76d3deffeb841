"""The scheduler, step by step."""

from __future__ import annotations

from dataclasses import replace

import pytest
from support.head_steps import come_back, draft_token, right, speculating, tokens_in_flight
from support.heads import opened
from support.requests import changed, core_request

from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import ROOT, Accepted, BeginDrafting, Expansion, MicroBatch
from ggpipe.core.events import CancelRuns, Drafted, RunEnded, StopRequest
from ggpipe.core.messages import KvKind, KvOp, RunResult
from ggpipe.core.request import Finish


def test_chunks_follow_each_other_without_waiting() -> None:
    head = opened(n_in_flight=3)
    head.arrive(core_request(id=1, prompt=tuple(range(1, 18)), n_predict=1))
    assert [len(run.rows) for run in head.pipeline.live] == [4, 4, 4]
    come_back(head)
    assert len(head.pipeline.live) == 3


@pytest.mark.parametrize("is_late", [False, True])
def test_a_draft_on_a_stages_machine_reads_the_prompt_after_it(is_late: bool) -> None:
    head = opened(n_in_flight=3, drafts_late=is_late)
    head.arrive(core_request(id=1, prompt=tuple(range(1, 18)), n_predict=1, speculation=SpeculationConfig()))
    while tokens_in_flight(head)[-1][-1] != 17:  # the prompt's last token is still to come
        assert bool(head.drafts[0].steering) is not is_late
        come_back(head)
    assert [type(message) for message in head.drafts[0].steering] == [BeginDrafting]


def test_a_request_that_is_stopped_before_its_drafter_began() -> None:
    head = opened(n_in_flight=2, drafts_late=True)
    head.arrive(core_request(id=1, prompt=tuple(range(1, 18)), speculation=SpeculationConfig()))
    head.handle(StopRequest(1))
    assert not head.drafts[0].steering


def test_a_draft_token_that_is_right_is_not_evaluated_again() -> None:
    head = opened(n_in_flight=3)
    head.arrive(speculating())
    a, b = right(head, 2)
    draft_token(head, ROOT, 1, a)
    come_back(head)  # the prompt
    assert head.seen[1].text == [a]
    assert tokens_in_flight(head) == [[a]]
    draft_token(head, 1, 2, b)
    assert tokens_in_flight(head) == [[a], [b]]
    come_back(head)
    assert head.seen[1].text == [a, b]
    assert tokens_in_flight(head) == [[b]]


def test_a_draft_token_that_waited_goes_in_when_it_turns_out_right() -> None:
    head = opened(n_in_flight=1)
    head.arrive(speculating())
    a, b = right(head, 2)
    draft_token(head, ROOT, 1, a)
    draft_token(head, 1, 2, b)
    assert len(head.pipeline.live) == 1, "the prompt fills the pipeline"
    come_back(head)
    assert tokens_in_flight(head) == [[a]]
    assert head.scheduler.counters(1).submitted_tokens == 0
    assert head.seen[1].n_drafted == 0


def test_one_run_may_confirm_many_tokens() -> None:
    head = opened(n_in_flight=3)
    head.arrive(speculating())
    a, b, c = right(head, 3)
    candidates = tuple(Expansion(i, i + 1, 1, ((token, 0.9),)) for i, token in enumerate((a, b)))
    head.handle(Drafted(MicroBatch(request=1, epoch=0, expansions=candidates, complete=False)))
    come_back(head)
    assert tokens_in_flight(head) == [[a, b]]
    come_back(head)
    assert head.seen[1].text == [a, b, c]
    assert tokens_in_flight(head) == [[c]]
    told = [message.tokens for message in head.drafts[0].steering if isinstance(message, Accepted)]
    assert told == [(a,), (b, c)], "tokens that come together are told together"


def test_the_root_does_not_wait_for_wrong_draft_tokens() -> None:
    head = opened(n_in_flight=3)
    head.arrive(speculating(cancel=False))
    draft_token(head, ROOT, 1, 998)
    draft_token(head, 1, 2, 997)
    come_back(head)
    (a,) = head.seen[1].text
    assert tokens_in_flight(head) == [[998], [997], [a]]
    assert not head.pipeline.cancelled


def test_wrong_draft_tokens_are_cancelled_in_one_message() -> None:
    head = opened(n_in_flight=4)
    head.arrive(speculating())
    for i in range(3):
        draft_token(head, i, i + 1, 990 + i)
    come_back(head)
    assert list(head.pipeline.stages[0].cancels) == [CancelRuns((2, 3, 4))]
    counters = head.scheduler.counters(1)
    assert (counters.cancelled_runs, counters.cancelled_tokens) == (3, 3)


def test_draft_tokens_are_counted_by_how_far_ahead_they_were() -> None:
    head = opened(n_in_flight=4)
    head.arrive(speculating())
    a, b = right(head, 2)
    draft_token(head, ROOT, 1, a)
    draft_token(head, 1, 2, b)
    draft_token(head, 2, 3, 998)
    counters = head.scheduler.counters(1)
    assert counters.by_lead == {1: [1, 0], 2: [1, 0], 3: [1, 0]}
    come_back(head)  # the prompt: a is right
    assert counters.by_lead == {1: [1, 1], 2: [1, 0], 3: [1, 0]}
    draft_token(head, 3, 4, 997)
    assert counters.by_lead[3] == [2, 0], "one ahead fewer, now that a is text"
    come_back(head)
    come_back(head)
    assert counters.by_lead == {1: [1, 1], 2: [1, 1], 3: [2, 0]}
    assert counters.rejected_rows == {4: 1, 5: 1}


def test_a_dead_run_is_computed_for_a_live_one_that_hangs_on_it() -> None:
    """Its third run has a row on a branch that died, and could not be computed without the second."""
    head = opened(n_in_flight=4, n_seq=4)
    head.arrive(speculating())
    (a,) = right(head, 1)
    draft_token(head, ROOT, 1, 998)
    expansions = Expansion(ROOT, 2, 1, ((a, 0.5),)), Expansion(1, 3, 1, ((997, 0.5),))
    head.handle(Drafted(MicroBatch(request=1, epoch=0, expansions=expansions, complete=False)))
    assert tokens_in_flight(head)[1:] == [[998], [a, 997]]
    come_back(head)
    assert not head.pipeline.cancelled
    come_back(head)
    come_back(head)
    assert head.seen[1].n_drafted == 1


def test_without_continuous_draft_tokens_wait_for_each_other() -> None:
    head = opened(n_in_flight=4)
    head.arrive(speculating(continuous=False))
    draft_token(head, ROOT, 1, 998)
    draft_token(head, 1, 2, 997)
    assert tokens_in_flight(head)[1:] == [[998]]


def test_synchronous_speculation_waits_for_the_draft() -> None:
    head = opened(n_in_flight=4)
    head.arrive(speculating(mode="speculative"))
    come_back(head)
    assert not head.pipeline.live, "drafting"
    a, b, c = (*head.seen[1].text, *right(head, 2))
    draft_token(head, ROOT, 1, b)
    assert not head.pipeline.live
    draft_token(head, 1, 2, c, complete=True)
    assert tokens_in_flight(head) == [[a, b, c]]


def test_nothing_is_submitted_that_the_text_has_no_room_for() -> None:
    head = opened(n_in_flight=4)
    head.arrive(changed(speculating(), n_predict=2))
    draft_token(head, ROOT, 1, 11)
    draft_token(head, 1, 2, 12)
    assert tokens_in_flight(head)[1:] == [[11]], "the last token is drawn from the row before it"


def test_deeper_rows_want_more_logits() -> None:
    head = opened(n_in_flight=3)
    head.arrive(replace(speculating(), logits_request_grows=True))
    head.handle(
        Drafted(
            MicroBatch(
                request=1,
                epoch=0,
                expansions=tuple(Expansion(i, i + 1, 1, ((20 + i, 0.9),)) for i in range(3)),
                complete=False,
            )
        )
    )
    run = head.pipeline.live[-1]
    assert [run.logits_requests[row.logits_request].n for row in run.rows] == [4, 5, 6]


def test_operations_that_no_run_could_carry_go_alone() -> None:
    head = opened()
    first, second = (core_request(id=i, prompt=(i, 2, 3), n_predict=1) for i in (1, 2))
    head.arrive(first)
    head.arrive(second)
    come_back(head)
    clear = (KvOp(KvKind.RM, 0),)
    assert head.seen[2].runs[0].ops == clear, "the next request's run takes them along"
    come_back(head)
    (marker,) = head.pipeline.in_flight.values()
    assert (marker.rows, marker.ops) == ((), clear)
    head.drafts = {}
    head.drain()
    head.check_end()


def test_a_stop_cancels_all_that_is_in_flight_and_waits_for_it() -> None:
    head = opened(n_in_flight=3)
    head.arrive(core_request(id=1, prompt=tuple(range(1, 30)), n_predict=5))
    head.stop(1)
    assert len(head.pipeline.cancelled) == 3
    assert head.seen[1].finish is None
    head.drain()
    assert head.seen[1].finish is Finish.STOPPED
    assert not head.seen[1].text


def test_a_waiting_request_is_stopped_at_once() -> None:
    head = opened()
    for i in (1, 2, 3):
        head.arrive(core_request(id=i, prompt=(i, 2, 3), n_predict=2))
    head.stop(2)
    assert head.seen[2].finish is Finish.STOPPED
    assert not head.pipeline.cancelled
    head.drain()
    assert [head.seen[i].finish for i in (1, 3)] == [Finish.LENGTH] * 2
    assert not head.seen[2].runs


def test_a_token_drawn_for_a_stopped_request_is_dropped() -> None:
    head = opened()
    head.arrive(core_request(id=1, prompt=(1, 2, 3), n_predict=5))
    while not head.to_sample:
        head.moves()[-1][1]()
    head.stop(1)
    assert head.seen[1].finish is Finish.STOPPED
    head._sample()
    assert not head.pipeline.live
    assert not head.seen[1].text


def test_nothing_to_predict_still_reads_the_prompt() -> None:
    head = opened()
    head.arrive(core_request(id=1, prompt=tuple(range(1, 11)), n_predict=0))
    head.drain()
    assert head.seen[1].finish is Finish.LENGTH
    assert [len(run.rows) for run in head.seen[1].runs] == [4, 4, 2]


def test_two_requests_share_the_pipeline() -> None:
    head = opened(n_requests=2, n_in_flight=2)
    head.arrive(core_request(id=1, prompt=(1, 2), n_predict=6))
    head.arrive(core_request(id=2, prompt=(3, 4), n_predict=6))
    assert [run.rows[0].request for run in head.pipeline.live] == [1]
    head.pipeline.step(0)
    head.pipeline.step(0)
    head._hear_result()
    head._sample()
    assert [[row.request for row in run.rows] for run in head.pipeline.live] == [[1, 2, 2]]
    head.arrive(core_request(id=3, prompt=(5, 6), n_predict=6))
    assert not head.seen[3].runs
    head.drain()
    assert all(seen.finish is Finish.LENGTH for seen in head.seen.values())


@pytest.mark.parametrize("n", [0, 64, 65])
def test_a_prompt_that_does_not_fit_is_a_bug_of_the_caller(n: int) -> None:
    with pytest.raises(ValueError, match=f"a prompt of {n} tokens in 64 cells"):
        opened().arrive(core_request(id=1, prompt=tuple(range(n)), n_predict=1))


def test_a_run_ends_once() -> None:
    head = opened()
    head.arrive(core_request(id=1, prompt=(1, 2, 3), n_predict=1))
    with pytest.raises(ValueError, match="run 99 is not in flight"):
        head.scheduler.handle(RunEnded(RunResult(99)), 0.0)
    head.drain()
    with pytest.raises(ValueError, match="run 1 is not in flight"):
        head.scheduler.handle(RunEnded(RunResult(1)), 0.0)


def test_who_leaves_the_queue_lets_those_behind_it_in() -> None:
    head = opened(n_requests=2)
    head.arrive(core_request(id=1, prompt=tuple(range(1, 21)), n_predict=8))
    head.arrive(core_request(id=2, prompt=(2, 3), n_predict=50))  # 28 of 64 cells are promised
    head.arrive(core_request(id=3, prompt=(2, 3), n_predict=8))
    head.stop(2)
    assert set(head.scheduler._states) == {1, 3}
    head.drain()
    head.check_end()


def test_rows_are_kept_though_later_ones_need_not_be() -> None:
    head = opened(n_in_flight=3)
    head.fetches = True
    head.arrive(speculating())
    a, b = right(head, 2)
    draft_token(head, ROOT, 1, a)
    rows_of_a = head.pipeline.live[-1].id
    head.fetches = False  # as where sampling takes all logits from now on
    come_back(head)
    assert head.seen[1].text == [a]
    draft_token(head, 1, 2, b)
    assert head.pipeline.live[-1].id > rows_of_a
    assert head.kept_from <= rows_of_a
