"""Connections of the channel, and messages over them."""

from __future__ import annotations

import os
import resource
import socket
import threading
from collections.abc import Iterator

import pytest

from ggpipe.channel import link, messages
from ggpipe.channel.events import Failure
from ggpipe.channel.link import ChannelLink, Listener, address_for
from ggpipe.channel.messages import (
    Alive,
    CancelRequest,
    EndRanks,
    FromFrontEnd,
    FromHead,
    RanksFailed,
    Tokenize,
    UserLine,
)
from ggpipe.errors import LaunchError, ModelError, RunError, Terminated, UsageError, Wording
from ggpipe.launch.environment import CHANNEL_VARIABLES

ADDRESS, SECRET = CHANNEL_VARIABLES
WAIT_S = 20.0


class Lines:
    """A listener and its lines."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.listener = Listener(on_line=self.said.append)
        host, port = self.listener.environment[ADDRESS].rsplit(":", 1)
        self.address = (host, int(port))

    def accept(self) -> ChannelLink[FromHead]:
        """Wait for the connection."""
        while (accepted := self.listener.accept(WAIT_S)) is None:
            pass
        return accepted

    def until_said(self) -> None:
        """Serve until it has written a line."""
        while not self.said:
            assert self.listener.accept(WAIT_S) is None


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> Iterator[Lines]:
    """Set the environment of its ranks."""
    lines = Lines()
    for name, value in lines.listener.environment.items():
        monkeypatch.setenv(name, value)
    with lines.listener:
        yield lines


@pytest.fixture
def many_files() -> Iterator[None]:
    """More files are open than `select` supports."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, 2048), hard))
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    yield
    for file in files:
        os.close(file)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.fixture
def pair() -> Iterator[tuple[ChannelLink[FromHead], ChannelLink[FromFrontEnd]]]:
    """Both ends of a link: the front end's and the head's."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    front_end, head = ChannelLink(one, messages.from_head), ChannelLink(other, messages.from_front_end)
    yield front_end, head
    front_end.close()
    head.close()


# Connecting


def test_the_process_with_the_secret_is_connected(lines: Lines) -> None:
    head = link.connect()
    front_end = lines.accept()
    assert front_end.is_local
    assert head.send(Alive(), UserLine("a line"))
    got = front_end.receive(WAIT_S)
    assert got
    while len(got) < 2:
        got += front_end.receive(WAIT_S) or []
    assert got == [Alive(), UserLine("a line")]
    assert front_end.send(EndRanks())
    assert head.receive(WAIT_S) == [EndRanks()]
    front_end.close()
    assert head.receive(WAIT_S) is None
    assert lines.said == []
    head.close()


def test_a_process_with_many_files_is_connected(many_files: None, lines: Lines) -> None:
    head = link.connect()
    lines.accept().close()
    head.close()


def test_a_wrong_secret_is_refused(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    right = os.environ[SECRET]
    monkeypatch.setenv(SECRET, right[:-1] + ("0" if right[-1] != "0" else "1"))
    stranger = link.connect()
    lines.until_said()
    assert lines.said == ["warning: a connection from 127.0.0.1 was refused: it sent a wrong secret"]
    assert stranger.receive(WAIT_S) is None
    monkeypatch.setenv(SECRET, right)
    head = link.connect()
    lines.accept().close()
    head.close()


def test_another_version_is_refused(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link, "VERSION", 99)
    head = link.connect()
    monkeypatch.undo()
    with pytest.raises(LaunchError, match=r"the first rank \(127.0.0.1\) uses version 99 of the channel, .* \d+: "):
        lines.accept()
    assert head.receive(WAIT_S) is None


def test_a_stranger_who_says_nothing(lines: Lines, monkeypatch: pytest.MonkeyPatch) -> None:
    """It does not prevent the head from connecting, and is dropped after a while."""
    monkeypatch.setattr(link, "_GREETING_S", 0.0)
    silent = socket.create_connection(lines.address)
    gone = socket.create_connection(lines.address)
    gone.close()
    head = link.connect()
    accepted = lines.accept()
    while len(lines.said) < 2:
        lines.listener.accept(0)
    assert all("was refused: it did not send this job's secret" in line for line in lines.said)
    assert silent.recv(1) == b""
    silent.close()
    head.close()
    accepted.close()


def test_nobody_listens(lines: Lines) -> None:
    lines.listener.close()
    with pytest.raises(LaunchError, match=r"cannot reach the process that started it, at 127.0.0.1:\d+ \(.*refused\)"):
        link.connect()
    assert not link.report(RunError("why"))


def test_a_rank_that_cannot_start_reports_it(lines: Lines) -> None:
    reporting = threading.Thread(target=link.report, args=(ModelError("`model` is damaged"),))
    reporting.start()
    accepted = lines.accept()
    received = accepted.receive(WAIT_S)
    reporting.join()
    assert received
    (failed,) = received
    assert isinstance(failed, RanksFailed)
    error = failed.why.to_error()
    assert (type(error), str(error)) == (ModelError, "`model` is damaged")
    assert accepted.receive(WAIT_S) is None
    accepted.close()


def test_the_address_for_another_machine() -> None:
    assert address_for("localhost") == "127.0.0.1"
    assert address_for(socket.gethostname()) == "127.0.0.1"
    assert socket.inet_aton(address_for("no-such-machine.invalid"))


# Frames


def test_messages_in_pieces_and_in_one_piece(pair: tuple[ChannelLink[FromHead], ChannelLink[FromFrontEnd]]) -> None:
    front_end, head = pair
    text = Tokenize(b"a" * 3_000_000)
    sender = threading.Thread(target=lambda: front_end.send(text, CancelRequest(1), CancelRequest(2)))
    sender.start()
    got: list[FromFrontEnd] = []
    while len(got) < 3:
        got += head.receive(WAIT_S) or []
    sender.join()
    assert got == [text, CancelRequest(1), CancelRequest(2)]
    assert head.receive(0) == []


@pytest.mark.parametrize(
    ("data", "why"),
    [
        (b"\x05\0\0\0hello", "unreadable message between front end and head"),
        ((link.MAX_FRAME_BYTES + 1).to_bytes(4, "little"), "the maximum is 67108864"),
    ],
)
def test_what_is_no_message(
    data: bytes, why: str, pair: tuple[ChannelLink[FromHead], ChannelLink[FromFrontEnd]]
) -> None:
    front_end, head = pair
    front_end._connection.sendall(data)
    with pytest.raises(RunError, match=why):
        head.receive(WAIT_S)


def test_a_message_that_is_too_large(pair: tuple[ChannelLink[FromHead], ChannelLink[FromFrontEnd]]) -> None:
    with pytest.raises(UsageError, match="the maximum is 67108864: shorten it"):
        pair[0].send(Tokenize(bytes(link.MAX_FRAME_BYTES)))


def test_a_reader_who_does_not_read(pair: tuple[ChannelLink[FromHead], ChannelLink[FromFrontEnd]]) -> None:
    """The sender can give up, and optional messages are dropped."""
    front_end, head = pair
    n_asked = 0

    def attend() -> None:
        nonlocal n_asked
        n_asked += 1
        head.send_if_free(Alive())
        if n_asked == 3:
            raise Terminated("the end")

    def send_on() -> None:
        while True:
            head.send(UserLine("x" * 1_000_000), attend=attend)

    with pytest.raises(Terminated):
        send_on()
    assert n_asked == 3
    got = front_end.receive(WAIT_S)
    assert got
    assert all(isinstance(message, UserLine) for message in got)


def test_a_reader_who_has_gone(pair: tuple[ChannelLink[FromHead], ChannelLink[FromFrontEnd]]) -> None:
    front_end, head = pair
    front_end.close()
    while head.send(Alive()):
        pass
    assert head.receive(0) is None


def test_errors_that_are_not_ours() -> None:
    error = Failure(error="SystemExit", message=Wording("why")).to_error()
    assert (type(error), str(error)) == (RunError, "why")
