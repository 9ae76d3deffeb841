"""The control channel between the head and the other ranks: typed messages, replies by type, errors by class."""

from __future__ import annotations

import collections
import contextlib
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from ggpipe import errors
from ggpipe.engine.inbox import Inbox
from ggpipe.errors import GgpipeError, RankError, RunError
from ggpipe.transport import control
from ggpipe.transport.base import HEAD, Kind, Message, Transport
from ggpipe.transport.control import Abort, AnyControlMessage, RankFailed
from ggpipe.transport.loading_messages import ControlMessage

T = TypeVar("T")
M = TypeVar("M", bound=ControlMessage)

_TICK_S = 0.1


@dataclass(frozen=True, slots=True)
class Received:
    """A control message that arrived."""

    rank: int
    """The sender."""
    message: AnyControlMessage


class ControlChannel(Generic[T]):
    """One rank's end of it, over an inbox that also takes notices of type T. Belongs to the main thread.

    `next` hands out everything in the order of its arrival, for ranks that serve. Ranks that work through a procedure
    together use `receive`, `gather` and `notice`: each waits for one thing and keeps control messages for the others.
    """

    def __init__(
        self,
        transport: Transport,
        attend: Callable[[], None] = lambda: None,
        on_message: Callable[[Message], None] = lambda _: None,
    ) -> None:
        """While `receive`, `gather` and `notice` wait, `attend` is called at least every 0.1 s and may raise to give
        up; `on_message` gets messages that are no control messages."""
        self.transport = transport
        self.inbox: Inbox[T] = Inbox(transport)
        self.attend = attend
        self._on_message = on_message
        self._kept: collections.deque[Received] = collections.deque()

    # Sending

    def send(self, rank: int, message: ControlMessage) -> None:
        """Send to one rank."""
        self.transport.send(rank, Kind.CONTROL, control.encode(message))

    def send_to_all(self, message: ControlMessage) -> None:
        """Send to all other ranks."""
        for rank in range(self.transport.size):
            if rank != self.transport.rank:
                self.send(rank, message)

    def fail(self, error: GgpipeError) -> None:
        """Send this rank's error to the head."""
        self.send(HEAD, RankFailed(self.transport.place, type(error).__name__, error.wording))

    # Receiving

    def next(self, timeout_s: float) -> Received | Message | T | None:
        """The next message or notice; None when `timeout_s` seconds passed without one.

        Raises what another rank failed with, and RankError when the head gives up.
        """
        return self.read(self.inbox.next(timeout_s))

    def read(self, event: Message | T | None) -> Received | Message | T | None:
        """What an event of the inbox says, if it is a control message; others as they are. Raises as `next`."""
        if not (isinstance(event, Message) and event.kind is Kind.CONTROL):
            return event
        match control.decode(event.payload):
            case RankFailed() as failed:
                raise error_of(failed)
            case Abort():
                raise RankError("the head gave up: another rank failed, or the user stopped it")
            case message:
                return Received(event.source, message)

    def receive(self) -> Received:
        """The next control message."""
        while not self._kept:
            self.wait()
        return self._kept.popleft()

    def gather(
        self,
        kind: type[M],
        ranks: Collection[int],
        next_event: Callable[[], object] | None = None,
        on_other: Callable[[Any], None] | None = None,
        timeout_s: float | None = None,
    ) -> dict[int, M]:
        """A message of this kind from each of these ranks, in the order of `ranks`; after a timeout those that came.

        `next_event` brings events, by default `receive`. Other events go to `on_other`; without it they raise RunError.
        """
        next_event = next_event or self.receive
        replies: dict[int, M] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(replies) < len(ranks) and (deadline is None or time.monotonic() < deadline):
            match next_event():
                case Received(rank, message) if rank in ranks and isinstance(message, kind):
                    replies[rank] = message
                case other if on_other is not None:
                    on_other(other)
                case Received(rank, message):
                    names = f"{type(message).__name__} instead of {kind.__name__}"
                    raise RunError(f"rank {rank} sent {names}: use one ggpipe everywhere")
        return {rank: replies[rank] for rank in ranks if rank in replies}

    def notice(self) -> T:
        """The next notice of this process's threads."""
        while True:
            event = self.wait()
            if event is not None:
                return event

    def wait(self) -> T | None:
        """Wait for whatever comes next, at most a tick; messages are kept or handed on, a notice is returned."""
        event = self.next(_TICK_S)
        self.attend()
        match event:
            case Received():
                self._kept.append(event)
            case Message():
                self._on_message(event)
            case notice:
                return notice
        return None

    def take(self, kind: type[M]) -> list[M]:
        """The kept messages of this kind; they are kept no longer."""
        taken: list[M] = [received.message for received in self._kept if isinstance(received.message, kind)]
        self._kept = collections.deque(received for received in self._kept if not isinstance(received.message, kind))
        return taken

    # Failing

    @contextlib.contextmanager
    def failing_together(self) -> Iterator[None]:
        """An error of one rank in here ends the work of all: the head raises it, the others RankError."""
        try:
            yield
        except BaseException as e:
            if self.transport.rank == HEAD:
                self.send_to_all(Abort())
            elif isinstance(e, GgpipeError) and not isinstance(e, RankError):
                self.fail(e)
                self._wait_for_abort()
            raise

    def _wait_for_abort(self) -> None:
        """Raises RankError when the head gives up."""
        while True:
            try:
                self.wait()
            except RankError:
                raise
            except GgpipeError:
                continue


def error_of(failed: RankFailed) -> GgpipeError:
    """What the head raises when another rank failed: a usage error of the same class, or RankError."""
    kind: Any = getattr(errors, failed.error, None)
    if not (isinstance(kind, type) and issubclass(kind, errors.UsageError)):
        kind = RankError
    elif kind.__init__ is not GgpipeError.__init__:  # it is made of more than a message
        kind = errors.UsageError
    error: GgpipeError = kind(failed.place, ": ", failed.message)
    return error
