"""Where a rank's main thread waits: it never misses anything, and never hangs."""

import collections
import functools
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

import ggpipe.engine.inbox as inbox_module
from ggpipe.engine.inbox import Inbox, poll_interval
from ggpipe.transport.base import Kind, Message, Payload, Transport
from ggpipe.transport.local import LocalTransport, LocalWorld

WATCHDOG_S = 120.0  # far beyond what anything here takes: only a hang gets there
FOREVER_S = 3600.0


class Silent(Transport):
    """An MPI from which nothing comes by itself."""

    rank, size, host, ranks_on_host, must_poll, sends_from_any_thread = 0, 1, "here", 1, True, False

    def __init__(self) -> None:
        self.arriving: collections.deque[Message] = collections.deque()

    def send(self, dest: int, kind: Kind, payload: Payload) -> None: ...

    def poll(self) -> Message | None:
        return self.arriving.popleft() if self.arriving else None

    def flush(self, timeout_s: float) -> bool:
        return True

    def close(self, wait_limit_s: float | None, on_all_leaving: Callable[[], None] = lambda: None) -> None: ...


class Slow(Silent):
    """Only every so many polls see a message that is there."""

    def __init__(self, n_polls: int) -> None:
        super().__init__()
        self._n_polls = n_polls
        self._polled = 0

    def poll(self) -> Message | None:
        self._polled += 1
        return super().poll() if self._polled % self._n_polls == 0 else None


def watched(*works: Callable[[], object]) -> None:
    """Run these at the same time, each in a thread; fail when one hangs or raises."""
    errors: list[BaseException] = []

    def guarded(work: Callable[[], object]) -> None:
        try:
            work()
        except BaseException as e:
            errors.append(e)

    threads = [threading.Thread(target=guarded, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WATCHDOG_S)
    if errors:
        raise errors[0]
    assert not any(thread.is_alive() for thread in threads), "hangs"


def payload(n: int) -> Payload:
    return n.to_bytes(8, "little")


def number(message: object) -> int:
    assert isinstance(message, Message)
    return int.from_bytes(message.payload, "little")


# Poll interval


@given(st.floats(0, 1e6))
def test_poll_interval_is_bounded(quiet_s: float) -> None:
    interval = poll_interval(quiet_s)
    assert 20e-6 <= interval <= 10e-3
    if quiet_s < 0.05:
        assert interval <= 100e-6
    assert interval <= max(quiet_s / 20, 20e-6), "a wait may add a small share of what was waited already"


@given(st.floats(0, 10), st.floats(0, 10))
def test_poll_interval_only_grows(a: float, b: float) -> None:
    assert poll_interval(min(a, b)) <= poll_interval(max(a, b))


def test_poll_interval_after_a_second() -> None:
    assert poll_interval(0.0) == pytest.approx(20e-6)
    assert poll_interval(0.001) == pytest.approx(50e-6)
    assert poll_interval(0.05) == pytest.approx(100e-6)
    assert poll_interval(1.0) == pytest.approx(2e-3)


# Inbox


def worlds() -> list[Any]:
    return [pytest.param(Silent, id="polled"), pytest.param(lambda: LocalWorld(1).transports[0], id="woken")]


@pytest.mark.parametrize("transport", worlds())
def test_nothing_comes(transport: Callable[[], Transport]) -> None:
    inbox: Inbox[int] = Inbox(transport())
    assert inbox.next(0) is None
    assert inbox.next(0.002) is None


@pytest.mark.parametrize("transport", worlds())
def test_notices_keep_their_order(transport: Callable[[], Transport]) -> None:
    inbox: Inbox[int] = Inbox(transport())
    for i in range(5):
        inbox.put(i)
    assert [inbox.next(0) for _ in range(6)] == [0, 1, 2, 3, 4, None]


@pytest.mark.parametrize("transport", worlds())
def test_a_notice_of_another_thread_ends_the_wait(transport: Callable[[], Transport]) -> None:
    inbox: Inbox[str] = Inbox(transport())
    waiting = threading.Event()
    got: list[object] = []

    def wait() -> None:
        waiting.set()
        got.append(inbox.next(FOREVER_S))

    def put() -> None:
        waiting.wait()
        inbox.put("notice")

    watched(wait, put)
    assert got == ["notice"]


def test_a_message_of_another_rank_ends_the_wait() -> None:
    here, there = LocalWorld(2).transports
    inbox: Inbox[str] = Inbox(here)
    waiting = threading.Event()
    got: list[object] = []

    def wait() -> None:
        waiting.set()
        got.append(inbox.next(FOREVER_S))

    def send() -> None:
        waiting.wait()
        there.send(0, Kind.RUN, payload(7))

    watched(wait, send)
    (message,) = got
    assert isinstance(message, Message)
    assert (message.source, message.kind, number(message)) == (1, Kind.RUN, 7)


def test_a_message_that_came_before_the_inbox_is_seen() -> None:
    here, there = LocalWorld(2).transports
    there.send(0, Kind.CANCEL, payload(1))
    assert number(Inbox[str](here).next(0)) == 1


def test_messages_and_notices_share_one_inbox() -> None:
    here, there = LocalWorld(2).transports
    inbox: Inbox[str] = Inbox(here)
    inbox.put("notice")
    there.send(0, Kind.RUN, payload(3))
    got = [inbox.next(0), inbox.next(0)]
    assert "notice" in got
    got.remove("notice")
    assert number(got[0]) == 3


def test_another_thread_may_poll() -> None:
    """A stage's thread that waits for runs: it keeps the runs, the main thread is woken for the rest."""
    transport = Silent()
    inbox: Inbox[str] = Inbox(transport)
    runs: list[int] = []
    inbox.take_run = lambda message: runs.append(number(message))
    inbox.relieved = lambda: FOREVER_S
    got: list[object] = []
    waiting = threading.Event()

    def wait() -> None:
        waiting.set()
        got.append(inbox.next(FOREVER_S))

    def poll() -> None:
        waiting.wait()
        for i, kind in enumerate((Kind.RUN, Kind.RUN, Kind.CANCEL)):
            transport.arriving.append(Message(1, kind, payload(i)))
            inbox.pump()

    watched(wait, poll)
    assert runs == [0, 1]
    assert [number(message) for message in got] == [2]
    assert not inbox.pump()


def test_a_message_behind_runs_is_not_left_lying() -> None:
    """Several messages that come while nobody waits count as one wake-up."""
    here, there = LocalWorld(2).transports
    inbox: Inbox[str] = Inbox(here)
    runs: list[int] = []
    inbox.take_run = lambda message: runs.append(number(message))
    for i, kind in enumerate((Kind.RUN, Kind.RUN, Kind.RUN, Kind.CANCEL)):
        there.send(0, kind, payload(i))
    message = inbox.next(0.3)
    assert runs == [0, 1, 2]
    assert number(message) == 3


def test_many_short_waits_do_not_hang() -> None:
    """In CPython 3.11 SimpleQueue.get can wait for ever when its timeout runs out at the wrong moment.

    That moment is short: a timer that interrupts every few instructions makes it come up (a wait on SimpleQueue hangs
    here at once). Messages come by polling alone, so whoever waits for ever once never sees the next one. In a process
    of its own, since pytest has a use for the timer.
    """
    tests = Path(__file__).parents[1]
    script = "from engine.test_inbox import wait_in_a_storm; wait_in_a_storm()"
    subprocess.run([sys.executable, "-c", script], cwd=tests, timeout=WATCHDOG_S, check=True)


def wait_in_a_storm() -> None:
    signal.signal(signal.SIGALRM, lambda *_: None)
    signal.setitimer(signal.ITIMER_REAL, 60e-6, 60e-6)
    inbox_module.poll_interval = lambda quiet_s: 2e-6
    transport = Slow(n_polls=5)
    inbox: Inbox[int] = Inbox(transport)
    for i in range(10_000):
        inbox.put(i)
        assert inbox.next(FOREVER_S) == i
        transport.arriving.append(Message(0, Kind.RESULT, payload(i)))
        assert number(inbox.next(FOREVER_S)) == i
    signal.setitimer(signal.ITIMER_REAL, 0)


def test_rapid_notices_of_another_thread_do_not_hang() -> None:
    """The reader polls every 20 µs and more; the writer lets it wait a little longer each time, round and round, so
    that notices come at all moments of a wait.
    """
    n = 20_000
    inbox: Inbox[int] = Inbox(Silent())
    got: list[int] = []

    def read() -> None:
        while len(got) < n:
            notice = inbox.next(FOREVER_S)
            assert isinstance(notice, int)
            got.append(notice)

    def write() -> None:
        for i in range(n):
            for _ in range(i % 200 * 4):
                pass
            inbox.put(i)

    watched(read, write)
    assert got == list(range(n))


def test_a_ping_pong_of_two_inboxes_does_not_hang() -> None:
    n = 5_000
    one, other = Inbox[int](Silent()), Inbox[int](LocalWorld(1).transports[0])

    def play(mine: Inbox[int], theirs: Inbox[int]) -> None:
        for i in range(n):
            assert mine.next(FOREVER_S) == i
            theirs.put(i if theirs is other else i + 1)

    one.put(0)
    watched(lambda: play(one, other), lambda: play(other, one))


def test_many_writers_lose_nothing() -> None:
    n, n_writers = 1_000, 4
    inbox: Inbox[tuple[int, int]] = Inbox(LocalWorld(1).transports[0])
    got: list[tuple[int, int]] = []

    def read() -> None:
        while len(got) < n * n_writers:
            notice = inbox.next(FOREVER_S)
            assert isinstance(notice, tuple)
            got.append(notice)

    def write(who: int) -> None:
        for i in range(n):
            inbox.put((who, i))

    watched(read, *(functools.partial(write, who) for who in range(n_writers)))
    for who in range(n_writers):
        assert [i for w, i in got if w == who] == list(range(n))


# LocalTransport


def test_messages_of_one_pair_keep_their_order() -> None:
    n, world = 500, LocalWorld(3)
    inboxes: list[Inbox[None]] = [Inbox(transport) for transport in world.transports]
    got: dict[tuple[int, int], list[int]] = {(a, b): [] for a in range(3) for b in range(3) if a != b}

    def rank(transport: LocalTransport) -> Callable[[], None]:
        me = transport.rank

        def talk() -> None:
            for i in range(n):
                for dest in {0, 1, 2} - {me}:
                    transport.send(dest, Kind.CONTROL, payload(i))
            for _ in range(2 * n):
                message = inboxes[me].next(FOREVER_S)
                assert isinstance(message, Message)
                got[message.source, me].append(number(message))

        return talk

    watched(*(rank(transport) for transport in world.transports))
    assert all(numbers == list(range(n)) for numbers in got.values())


def test_a_local_world() -> None:
    first, second = LocalWorld(2).transports
    assert (first.rank, first.size, first.ranks_on_host, first.must_poll) == (0, 2, 2, False)
    assert second.rank == 1
    assert first.host == second.host
    assert first.poll() is None
    assert first.flush(0)
    first.send(0, Kind.RESULT, payload(9))  # to itself
    assert number(first.poll()) == 9
    first.close(0)
