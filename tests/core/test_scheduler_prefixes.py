"""What the scheduler takes from the prefix cache and leaves there, step by step."""

from __future__ import annotations

from support.fake_model import Tokens
from support.heads import Head, opened
from support.requests import core_request

from ggpipe.core.messages import KvKind, KvOp
from ggpipe.core.request import Finish

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
    head.arrive(core_request(id=1, prompt=PROMPT, n_predict=n_predict))
    head.drain()
    return head, head.seen[1].tokens


def cached(head: Head, request: int) -> int:
    return head.seen[request].counters.cached_tokens


def test_a_text_is_kept_to_its_last_computed_token() -> None:
    head, tokens = after_a_text()
    assert head.scheduler._prefixes.kept == {0: tokens[:-1]}


def test_the_next_question_computes_what_is_new() -> None:
    head, tokens = after_a_text()
    head.arrive(core_request(id=2, prompt=(*tokens, 7, 8), n_predict=1))
    head._tick()  # nobody came with it
    assert tokens_in_flight(head) == [[tokens[-1], 7, 8]], "what is left is cut from its own beginning"
    assert cached(head, 2) == len(tokens) - 1
    assert head.seen[2].runs[0].ops == ()


def test_a_common_beginning_is_copied() -> None:
    head, tokens = after_a_text()
    head.arrive(core_request(id=2, prompt=(*tokens[:5], 7), n_predict=1))
    head._tick()
    assert tokens_in_flight(head) == [[7]]
    assert head.seen[2].runs[0].ops == (KvOp(KvKind.CP, 0, 1, 0, 5),)


def test_two_requests_share_the_prompt_of_the_first() -> None:
    head = opened(n_seq=6, n_prefixes=2, n_requests=2)
    head.arrive(core_request(id=1, prompt=PROMPT, n_predict=5))
    while not head.seen[1].text:
        come_back(head)
    head.arrive(core_request(id=2, prompt=(*PROMPT[:-1], 9), n_predict=5))
    assert cached(head, 2) == len(PROMPT) - 1
    head.drain()
    head.check_end()


def test_a_request_that_is_stopped_while_its_prompt_is_read_leaves_what_is_computed() -> None:
    head = opened(n_seq=6, n_prefixes=2)
    head.arrive(core_request(id=1, prompt=tuple(range(1, 30)), n_predict=5))
    come_back(head)
    head.stop(1)
    head.drain()
    assert head.seen[1].finish is Finish.STOPPED
    assert head.scheduler._prefixes.kept == {0: (1, 2, 3, 4)}
    head.check_end()


def test_requests_take_cells_when_they_need_them_and_not_before() -> None:
    head, tokens = after_a_text(n_ctx=16)
    head.arrive(core_request(id=2, prompt=(21, 22, 23, 24), n_predict=12))
    head._tick()
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
    head.arrive(core_request(id=1, prompt=prompt, n_predict=4))
    while not head.seen[1].text:
        come_back(head)
    head.arrive(core_request(id=2, prompt=(*prompt[:-1], 50), n_predict=4))
    assert cached(head, 2) == 11, "11 of its 16 cells are the first one's"
    head.drain()
    head.check_end()


def test_a_request_without_the_cache() -> None:
    head, tokens = after_a_text()
    head.arrive(core_request(id=2, prompt=(*tokens, 7), n_predict=1, cache_prompt=False))
    head.drain()
    assert cached(head, 2) == 0
    assert list(head.scheduler._prefixes.kept.values()) == [tokens[:-1]]


# Models whose states cannot go back


def recurrent(**limits: int) -> Head:
    return opened(n_seq=8, n_prefixes=4, n_requests=2, partial_prefixes=False, **limits)


def serve(head: Head, number: int, prompt: Tokens, n_predict: int = 1) -> Tokens:
    """Serve a request to its end; returns its tokens."""
    head.arrive(core_request(id=number, prompt=prompt, n_predict=n_predict))
    head.drain()
    return head.seen[number].tokens


def test_a_run_begins_where_a_state_is_kept() -> None:
    head = recurrent()
    serve(head, 1, tuple(range(1, 11)))
    runs = head.seen[1].runs
    assert [len(run.rows) for run in runs] == [4, 2, 2, 2], "the runs of full prompts end where they would anyway"
    assert [run.ops for run in runs] == [(), (), (KvOp(KvKind.CP, 0, 1),), ()]
    assert head.scheduler._prefixes.kept == {1: tuple(range(1, 7)), 0: tuple(range(1, 11))}


def test_another_end_of_the_prompt_goes_on_from_the_kept_state() -> None:
    head = recurrent()
    serve(head, 1, tuple(range(1, 11)))
    serve(head, 2, (*range(1, 9), 50, 51, 52))
    assert cached(head, 2) == 6
    assert head.seen[2].runs[0].ops[0] == KvOp(KvKind.CP, 1, 2)
    assert len(head.scheduler._prefixes) == 4, "the one before its end as well"


def test_the_next_question_goes_on_from_the_end_of_the_text_and_leaves_it() -> None:
    head = recurrent()
    tokens = serve(head, 1, tuple(range(1, 11)), n_predict=5)
    for number in (2, 3):
        serve(head, number, (*tokens, 7, 8, number))
        assert cached(head, number) == len(tokens) - 1


def test_what_two_prompts_share_is_kept_for_a_third() -> None:
    head = recurrent()
    shared = tuple(range(1, 11))
    for number in (1, 2, 3):
        serve(head, number, (*shared, *range(100 * number, 100 * number + 20)))
    assert [cached(head, number) for number in (1, 2, 3)] == [0, 0, 10]


def test_a_state_that_was_not_computed_is_not_kept() -> None:
    head = recurrent(n_in_flight=9)
    head.arrive(core_request(id=1, prompt=tuple(range(1, 31)), n_predict=5))
    while len(head.seen[1].runs) < 9:
        come_back(head)
    while len(tokens_in_flight(head)) > 2:
        come_back(head)
    n_computed = 30 - sum(map(len, tokens_in_flight(head)))
    head.stop(1)
    head.drain()
    kept = list(head.scheduler._prefixes.kept.values())
    assert kept, "those before it are"
    assert all(len(tokens) <= n_computed for tokens in kept)
    head.check_end()
