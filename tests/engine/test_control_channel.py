"""The control channel: replies by type, errors by class, nothing lost while a rank waits for something else."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
from support.commands import HANG_S

from ggpipe.engine.control_channel import ControlChannel, Received, error_of
from ggpipe.errors import (
    GgpipeError,
    IndivisibleModelError,
    LaunchError,
    ModelError,
    RankError,
    RunError,
    Terminated,
    UsageError,
    Wording,
)
from ggpipe.transport.base import HEAD, Kind, Message
from ggpipe.transport.control import Abort, AskClock, AskUsage, Clock, Quit, RankFailed, Usage
from ggpipe.transport.local import LocalWorld

Channel = ControlChannel[str]


def channels(n_ranks: int) -> list[Channel]:
    return [ControlChannel(transport) for transport in LocalWorld(n_ranks).transports]


def test_events_come_in_their_order() -> None:
    head, other = channels(2)
    other.send(HEAD, Clock(1.5))
    other.transport.send(HEAD, Kind.RESULT, b"result")
    assert head.next(0) == Received(1, Clock(1.5))
    event = head.next(0)
    assert isinstance(event, Message)
    assert event.kind is Kind.RESULT
    assert head.next(0) is None
    head.inbox.put("notice")
    assert head.next(0) == "notice"


def test_all_other_ranks_get_a_message() -> None:
    ranks = channels(3)
    ranks[1].send_to_all(Quit(2))
    assert ranks[0].next(0) == Received(1, Quit(2))
    assert ranks[1].next(0) is None
    assert ranks[2].next(0) == Received(1, Quit(2))


def test_gather_keeps_the_ranks_order() -> None:
    head, one, two = channels(3)
    two.send(HEAD, Clock(2.0))
    one.send(HEAD, Clock(1.0))
    gathered = head.gather(Clock, [1, 2])
    assert list(gathered.items()) == [(1, Clock(1.0)), (2, Clock(2.0))]


def test_gather_hands_on_what_it_is_not_for() -> None:
    head, one, two = channels(3)
    others: list[object] = []
    head.inbox.put("notice")
    one.send(HEAD, Usage(1.0, 2))
    two.send(HEAD, Clock(2.0))
    assert head.gather(Clock, [2], lambda: head.next(0), others.append) == {2: Clock(2.0)}
    assert sorted(map(str, others)) == sorted(map(str, ["notice", Received(1, Usage(1.0, 2))]))


@pytest.mark.parametrize(("sender", "message"), [(1, Usage(1.0, 2)), (2, Clock(1.0))])
def test_gather_refuses_other_messages_where_none_are_due(sender: int, message: Usage | Clock) -> None:
    ranks = channels(3)
    ranks[sender].send(HEAD, message)
    with pytest.raises(RunError, match=f"rank {sender} sent {type(message).__name__} instead of Clock: use one"):
        ranks[HEAD].gather(Clock, [1])


def test_gather_gives_up_after_a_timeout() -> None:
    head, one, _ = channels(3)
    one.send(HEAD, Clock(1.0))
    assert head.gather(Clock, [1, 2], lambda: head.next(0), lambda _: None, timeout_s=0.01) == {1: Clock(1.0)}


def test_messages_are_kept_while_a_notice_is_waited_for() -> None:
    head, other = channels(2)
    results: list[Message] = []
    head = ControlChannel(head.transport, on_message=results.append)
    for message in (AskClock(), AskUsage(), AskClock()):
        other.send(HEAD, message)
    other.transport.send(HEAD, Kind.RESULT, b"result")
    timer = threading.Thread(target=head.inbox.put, args=("notice",))
    while not results:  # LocalTransport keeps the order
        head.wait()
    timer.start()
    assert head.notice() == "notice"
    timer.join()
    assert head.take(AskClock) == [AskClock(), AskClock()]
    assert head.take(AskClock) == []
    assert head.receive() == Received(1, AskUsage())


def test_the_user_ends_any_wait() -> None:
    def attend() -> None:
        raise RunError("enough")

    head = Channel(LocalWorld(2).transports[0], attend)
    for wait in (head.receive, head.notice, lambda: head.gather(Clock, [1])):
        with pytest.raises(RunError, match="enough"):
            wait()


# Errors


@pytest.mark.parametrize(
    ("error", "kind"),
    [
        (UsageError("reason"), UsageError),
        (ModelError("reason"), ModelError),
        (IndivisibleModelError("reason"), IndivisibleModelError),
        (LaunchError("reason"), LaunchError),
        (RunError("reason"), RankError),
        (GgpipeError("reason"), RankError),
        (Terminated("reason"), RankError),
    ],
)
def test_the_head_raises_what_a_rank_failed_with(error: GgpipeError, kind: type[GgpipeError]) -> None:
    head, other = channels(2)
    other.fail(error)
    with pytest.raises(kind) as caught:
        head.next(0)
    assert type(caught.value) is kind
    assert str(caught.value) == f"rank 1 ({other.transport.host}): reason"
    assert caught.value.exit_code == error.exit_code


@pytest.mark.parametrize("name", ["NoSuchError", "ValueError", "annotations", "__name__", ""])
def test_an_error_of_an_unknown_class_is_a_rank_error(name: str) -> None:
    error = error_of(RankFailed("rank 2 (node1)", name, Wording("reason")))
    assert type(error) is RankError
    assert str(error) == "rank 2 (node1): reason"


def test_other_ranks_end_with_the_head() -> None:
    head, other = channels(2)
    head.send_to_all(Abort())
    with pytest.raises(RankError, match="another rank"):
        other.receive()


def together(*works: Callable[[Channel], object]) -> list[BaseException | None]:
    """Each rank's work, all of which fail together; what each raised."""
    raised: list[BaseException | None] = [None] * len(works)

    def run(rank: int, channel: Channel) -> None:
        try:
            with channel.failing_together():
                works[rank](channel)
        except BaseException as e:
            raised[rank] = e

    ranks = [threading.Thread(target=run, args=pair, daemon=True) for pair in enumerate(channels(len(works)))]
    for rank in ranks:
        rank.start()
    for rank in ranks:
        rank.join(HANG_S)
        assert not rank.is_alive(), "hangs"
    return raised


def fail(_: Channel) -> None:
    raise ModelError("reason")


def wait(channel: Channel) -> None:
    channel.receive()


def gather(channel: Channel) -> None:
    channel.gather(Clock, [1, 2])


@pytest.mark.parametrize(
    "works", [(fail, wait, wait), (gather, fail, wait), (gather, wait, fail), (gather, fail, fail)]
)
def test_an_error_of_one_rank_ends_all(works: tuple[Callable[[Channel], object], ...]) -> None:
    first, *others = together(*works)
    assert type(first) is ModelError
    assert str(first).endswith("reason")
    assert [type(error) for error in others] == [RankError, RankError]


def test_nobody_fails_alone_without_need() -> None:
    assert together(lambda channel: channel.gather(Clock, [1]), lambda channel: channel.send(HEAD, Clock(1.0))) == [
        None,
        None,
    ]


def test_a_bug_at_the_head_ends_the_others() -> None:
    first, other = together(lambda _: {}["no such key"], wait)  # type: ignore[index]
    assert type(first) is KeyError
    assert type(other) is RankError
