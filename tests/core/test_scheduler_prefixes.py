"""What the scheduler takes from the prefix cache and leaves there, step by step."""

from __future__ import annotations

from support.fakes import Tokens
from support.heads import Head, opened

from ggpipe.core.messages import KvKind, KvOp
from ggpipe.core.request import Finish, Request

PROMPT = (1, 2, 3, 4, 5, 6)


def come_back(head: Head) -> None:
    """The oldest run comes back, and tokens are drawn from it as far as it goes."""
    run = next(iter(head.pipeline.in_flight))
    while run in head.pipeline.in_flight:
        head.pipeline.moves("", head._hear_result)[-1][1]()
    while head.to_sample:
        head._sample()


def tokens_in_flight(head: Head) -> list[list[int]]:
    return [[row.token for row in run.rows] for run in head.pipeline.live]


def after_a_text(n_predict: int = 2, **limits: int) -> tuple[Head, Tokens]:
    """A request has ended; returns its tokens as well."""
    head = opened(n_seq=6, n_prefixes=2, n_requests=2, **limits)
    head.arrive(Request(id=1, prompt=PROMPT, n_predict=n_predict))
    head.drain()
    return head, head.seen[1].tokens


def cached(head: Head, request: int) -> int:
    return head.seen[request].counters.cached_tokens


def test_a_text_is_kept_to_its_last_computed_token() -> None:
    head, tokens = after_a_text()
    assert head.scheduler._prefixes.kept == {0: tokens[:-1]}


def test_the_next_question_computes_what_is_new() -> None:
    head, tokens = after_a_text()
    head.arrive(Request(id=2, prompt=(*tokens, 7, 8), n_predict=1))
    assert tokens_in_flight(head) == [[tokens[-1], 7, 8]], "what is left is cut from its own beginning"
    assert cached(head, 2) == len(tokens) - 1
    assert head.seen[2].runs[0].ops == ()


def test_a_common_beginning_is_copied() -> None:
    head, tokens = after_a_text()
    head.arrive(Request(id=2, prompt=(*tokens[:5], 7), n_predict=1))
    assert tokens_in_flight(head) == [[7]]
    assert head.seen[2].runs[0].ops == (KvOp(KvKind.CP, 0, 1, 0, 5),)


def test_two_requests_share_the_prompt_of_the_first() -> None:
    head = opened(n_seq=6, n_prefixes=2, n_requests=2)
    head.arrive(Request(id=1, prompt=PROMPT, n_predict=5))
    while not head.seen[1].text:
        come_back(head)
    head.arrive(Request(id=2, prompt=(*PROMPT[:-1], 9), n_predict=5))
    assert cached(head, 2) == len(PROMPT) - 1
    head.drain()
    head.check_end()


def test_a_request_that_is_stopped_while_its_prompt_is_read_leaves_what_is_computed() -> None:
    head = opened(n_seq=6, n_prefixes=2)
    head.arrive(Request(id=1, prompt=tuple(range(1, 30)), n_predict=5))
    come_back(head)
    head.stop(1)
    head.drain()
    assert head.seen[1].finish is Finish.STOPPED
    assert head.scheduler._prefixes.kept == {0: (1, 2, 3, 4)}
    head.check_end()


def test_requests_take_cells_when_they_need_them_and_not_before() -> None:
    head, tokens = after_a_text(n_ctx=16)
    head.arrive(Request(id=2, prompt=(21, 22, 23, 24), n_predict=12))
    while len(head.seen[2].text) < 4:
        assert head.scheduler._prefixes.kept == {0: tokens[:-1]}
        come_back(head)
    head.drain()
    assert head.seen[2].finish is Finish.LENGTH
    assert tokens[:-1] not in head.scheduler._prefixes.kept.values()
    head.check_end()


def test_a_shared_prefix_leaves_room_for_a_further_request() -> None:
    head = opened(n_seq=6, n_prefixes=2, n_requests=2, n_ctx=21)
    prompt = tuple(range(1, 13))
    head.arrive(Request(id=1, prompt=prompt, n_predict=4))
    while not head.seen[1].text:
        come_back(head)
    head.arrive(Request(id=2, prompt=(*prompt[:-1], 50), n_predict=4))
    assert cached(head, 2) == 11, "11 of its 16 cells are the first one's"
    head.drain()
    head.check_end()


def test_a_request_without_the_cache() -> None:
    head, tokens = after_a_text()
    head.arrive(Request(id=2, prompt=(*tokens, 7), n_predict=1, cache_prompt=False))
    head.drain()
    assert cached(head, 2) == 0
    assert list(head.scheduler._prefixes.kept.values()) == [tokens[:-1]]
