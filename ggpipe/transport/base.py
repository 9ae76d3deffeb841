"""What a transport does, whatever it runs over."""

from __future__ import annotations

import abc
import enum
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

Payload = bytes | bytearray | memoryview

T = TypeVar("T")
OverMemory = Callable[[int, int, int], T]
"""Takes an open file, a part and the number of parts."""
OverMessages = Callable[[str, int, int, int, int], T]
"""Takes mpi4py's file, the handles of a communicator of its own and of MPI_BYTE, a part and the number of parts."""

HEAD = 0
"""The rank that leads all others."""


class Kind(enum.IntEnum):
    """What a message is."""

    RUN = 1  # a run on its way down the pipeline: header and activations
    RESULT = 2  # a run's end, from the last rank to the head
    CANCEL = 3  # ids of cancelled runs, from the head to a stage
    CONTROL = 4  # everything else: see `transport/control`
    TO_DRAFTER = 5  # accepted tokens and steering, from the head to the draft's head
    MICRO_BATCH = 6  # draft tokens, from the draft's head to the head
    PART_SPAN = 7  # time on a run, from a part of a group that does not send the run on, to the head
    FETCH = 8  # which kept row is to be sent whole, from the head to the last rank
    FETCHED = 9  # such a row, from the last rank to the head
    STATES = 10  # inputs of layers in a run, from the rank that has them to a draft head's


@dataclass(frozen=True, slots=True)
class Message:
    """A message that arrived."""

    source: int
    kind: Kind
    payload: Payload


class Transport(abc.ABC):
    """One rank's connection to all others. Messages of one pair of ranks keep their order.

    Belongs to the main thread; with `sends_from_any_thread`, `send` may also be called from others.
    """

    rank: int
    size: int
    host: str
    hosts: Sequence[str]
    """The machines of all ranks, in order."""
    place: str
    """This rank in words, for messages to the user."""
    ranks_on_host: int
    """Ranks on this rank's machine, itself included."""
    ranks_on_cores: float
    """Ranks that share this rank's cores, itself included; one that may also run elsewhere counts in part."""
    sends_from_any_thread: bool
    must_poll: bool
    """Whether messages are only noticed by polling, because nothing calls the waker."""

    @abc.abstractmethod
    def send(self, dest: int, kind: Kind, payload: Payload) -> None:
        """Start sending; the payload must not change afterwards. Never waits."""

    @abc.abstractmethod
    def poll(self) -> Message | None:
        """The next message that has arrived, if any. Never waits. Also moves unfinished sends on."""

    @abc.abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until all sends are done; False when they are not in time."""

    def set_waker(self, wake: Callable[[], None]) -> None:  # noqa: B027
        """Call `wake` (from any thread) when a message arrives, unless `must_poll`."""

    def duplicate(self) -> Transport:
        """A second transport between the same ranks, whose messages are apart from this one's; any one thread may use
        it. All ranks call it at the same time, and only if `sends_from_any_thread`.

        Its methods raise TimeoutError when another thread is blocked.
        """
        raise RuntimeError("this transport has no duplicates: it does not send from any thread")

    def join_group(self, ranks: Sequence[int], over_memory: OverMemory[T] | None, over_messages: OverMessages[T]) -> T:
        """What the parts of a group add up tensors with, in native code: `over_memory` of a file in memory that they
        share, this rank's part and their number; or `over_messages`, where they share none or `over_memory` is None.

        All of these ranks, which are the parts in order, call it at the same time. Raises MpiError and RunError.
        """
        raise RuntimeError("this transport has no groups")

    @abc.abstractmethod
    def close(self, wait_limit_s: float | None, on_all_leaving: Callable[[], None] = lambda: None) -> None:
        """Leave together with all ranks. None waits for the last of them; else all ranks are ended, this one included,
        when some are not leaving after `wait_limit_s` seconds.

        `on_all_leaving` is called when all are leaving. After it nothing may be sent on duplicates, either.
        """
