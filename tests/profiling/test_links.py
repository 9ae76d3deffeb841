"""Links: round trips are timed, and every rank answers those of the others."""

from __future__ import annotations

import threading

import pytest
from support.commands import HANG_S

from ggpipe.engine.control_channel import ControlChannel
from ggpipe.profiling.links import LinkTimer
from ggpipe.transport.base import Kind, Message
from ggpipe.transport.local import LocalWorld
from ggpipe.transport.profile_messages import EndProfile


class Rank:
    """A rank that waits, and answers meanwhile."""

    def __init__(self, world: LocalWorld, rank: int) -> None:
        transport = world.transports[rank]
        self.links = LinkTimer(transport)
        self.channel: ControlChannel[str] = ControlChannel(transport, on_message=self.on_message)
        self.messages: list[Message] = []

    def on_message(self, message: Message) -> None:
        self.messages.append(message)
        self.links.on_message(message)


def test_a_link_is_measured() -> None:
    world = LocalWorld(2)
    one, other = Rank(world, 0), Rank(world, 1)
    waiting = threading.Thread(target=other.channel.receive, daemon=True)
    waiting.start()
    link = one.links.measure(1, 0.0, one.channel.wait)
    one.channel.send(1, EndProfile())
    waiting.join(HANG_S)
    assert not waiting.is_alive()
    assert link.latency_s > 0
    assert link.bytes_per_s > 0
    sizes = [len(message.payload) for message in other.messages]
    assert sizes[:7] == [512] * 7, "small messages first"
    assert min(sizes[7:-3]) >= 256 << 10
    assert sizes[-3:] == [512] * 3, "small messages whose answers are only received"
    assert link.send_s > 0
    assert link.read_s > 0
    assert [len(message.payload) for message in one.messages] == [512] * len(sizes), "every message has a small answer"


@pytest.mark.parametrize(
    ("small_s", "large_s", "bytes_per_s"),
    [(1e-3, 5e-3, (4 << 20) / 4e-3), (3e-3, 2e-3, (4 << 20) / 0.2e-3), (2e-3, 2e-3, (4 << 20) / 0.2e-3)],
)
def test_small_messages_that_take_longer_than_large_ones(
    small_s: float, large_s: float, bytes_per_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a machine that does other work: no bandwidth beyond what the large ones can have."""
    timer = LinkTimer(LocalWorld(2).transports[0])

    def round_trip(_: int, payload: bytes, __: object) -> float:
        timer._send_s.append(1e-6)
        return small_s if len(payload) == 512 else large_s

    monkeypatch.setattr(timer, "_read_s", lambda *_: 1e-6)
    monkeypatch.setattr(timer, "_round_trip", round_trip)
    assert timer.measure(1, 0.0, lambda: None).bytes_per_s == pytest.approx(bytes_per_s)


@pytest.mark.parametrize("kind", [Kind.RUN, Kind.CANCEL, Kind.TO_DRAFTER, Kind.MICRO_BATCH])
def test_other_messages_are_not_answered(kind: Kind) -> None:
    world = LocalWorld(2)
    one, other = Rank(world, 0), Rank(world, 1)
    world.transports[1].send(0, kind, b"late")
    while not one.messages:
        one.channel.wait()
    assert other.channel.next(0) is None


def test_a_third_rank_is_answered_while_a_link_is_measured() -> None:
    world = LocalWorld(3)
    one, other, third = (Rank(world, rank) for rank in range(3))
    world.transports[2].send(0, Kind.RESULT, b"ping")
    waiting = threading.Thread(target=other.channel.receive, daemon=True)
    waiting.start()
    one.links.measure(1, 0.0, one.channel.wait)
    one.channel.send(1, EndProfile())
    waiting.join(HANG_S)
    answer = third.channel.next(0)
    assert isinstance(answer, Message)
    assert (answer.source, answer.kind) == (0, Kind.RESULT)
