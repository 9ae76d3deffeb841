"""A front end whose head does not do what it should, and a head whose front end does not."""

from __future__ import annotations

import socket

import pytest
from support.channel import Connected
from support.commands import wait_for

from ggpipe.channel import messages, remote
from ggpipe.channel.events import Failure
from ggpipe.channel.front_end import FrontEnd
from ggpipe.channel.link import ChannelLink
from ggpipe.channel.messages import EndRanks, FromFrontEnd, FromHead, Interrupt, RanksFailed, Ready, UserLine
from ggpipe.errors import (
    RankError,
    RunError,
    Setting,
    SilentRankError,
    Terminated,
    UsageError,
    Wording,
)


def ready(connected: Connected) -> None:
    connected.head.send(Ready("rank 0 (there)", 0.0))


def test_lines_and_errors_of_the_ranks(connected: Connected) -> None:
    ready(connected)
    ranks = connected.ranks()
    connected.head.send(
        UserLine(Wording("measured ", Setting("n_ctx"))),
        RanksFailed(Failure(error="ModelError", message=Wording("rank 1 (there): damaged"))),
    )
    with pytest.raises(UsageError, match=r"^rank 1 \(there\): damaged$"):
        ranks.profile()
    assert connected.lines == ["measured `n_ctx`"]


def test_a_head_that_is_gone(connected: Connected) -> None:
    ready(connected)
    ranks = connected.ranks()
    connected.head.close()
    with pytest.raises(RankError, match=r"^rank 0 \(there\) is gone: killed, or crashed$"):
        ranks.load()
    ranks.close()


def test_what_mpirun_knows_is_said(connected: Connected) -> None:
    ready(connected)
    ranks = connected.ranks(cause=lambda: "rank 1 (there) ended: signal 9 (Killed)")
    connected.head.close()
    with pytest.raises(RankError, match=r"^rank 1 \(there\) ended: signal 9 \(Killed\)$"):
        ranks.load()


def test_a_head_that_is_silent(connected: Connected, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote, "_TICK_S", 0.01)
    ready(connected)
    ranks = connected.ranks(rank_timeout_s=0.05)
    with pytest.raises(SilentRankError, match=r"^rank 0 \(there\) sent nothing for 0.05 s"):
        ranks.load()


def test_another_rank_reports_that_the_head_is_silent(connected: Connected) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        other = ChannelLink(socket.create_connection(server.getsockname()), messages.from_front_end)
        accepted, _ = server.accept()
    other.send(RanksFailed(Failure(error="SilentRankError", message=Wording("rank 0 (there) sent nothing for 3 s"))))
    ready(connected)
    ranks = connected.ranks(more_links=lambda: ChannelLink(accepted, messages.from_head))
    with pytest.raises(SilentRankError, match=r"^rank 0 \(there\) sent nothing for 3 s$"):
        ranks.load()
    other.close()


def test_a_front_end_that_is_to_end(connected: Connected) -> None:
    ready(connected)
    ranks = connected.ranks()
    ranks.fail(lambda: Terminated("terminated from outside"))
    assert ranks.is_ending()
    with pytest.raises(Terminated):
        ranks.load()


def test_a_stop_is_sent_once(connected: Connected) -> None:
    ready(connected)
    ranks = connected.ranks()
    ranks.stop()
    connected.head.send(
        UserLine("one"), UserLine("two"), RanksFailed(Failure(error="RunError", message=Wording("stopped")))
    )
    with pytest.raises(RunError, match="stopped"):
        ranks.profile()
    ranks.close()
    got: list[FromFrontEnd] = []
    while (more := connected.head.receive(20)) is not None:
        got += more
    assert got == [Interrupt(), EndRanks()]


def test_the_head_says_every_second_that_it_is_there(connected: Connected) -> None:
    front_end = FrontEnd(connected.head, "rank 0 (here)")
    got: list[FromHead] = []
    while len(got) < 3:
        got += connected.front_end.receive(20) or []
    assert [type(message).__name__ for message in got] == ["Ready", "Alive", "Alive"]
    connected.front_end.send(Interrupt())
    connected.front_end.close()
    wait_for(lambda: front_end.has_left)
    with pytest.raises(RunError, match="stopped before all was measured"):
        front_end.attend()
    front_end.close()
