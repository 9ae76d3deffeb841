"""The front end, as the head of its ranks sees it."""

from __future__ import annotations

import collections
import threading
import time
from collections.abc import Callable

from ggpipe.channel.events import Failure, Sendable
from ggpipe.channel.link import ChannelLink
from ggpipe.channel.messages import Alive, EndRanks, FromFrontEnd, Interrupt, RanksFailed, Ready, UserLine
from ggpipe.errors import GgpipeError, Interrupted, RunError, Wording

_ALIVE_S = 1.0


class FrontEnd:
    """Receives the user's wishes, and sends everything for the user.

    A thread reads messages, and tells the front end every second that this process is alive. Call all methods from the
    main thread.
    """

    def __init__(self, connection: ChannelLink[FromFrontEnd], place: str) -> None:
        """`place`: this rank and its host. The ranks must be connected."""
        self._link = connection
        self._arrived: collections.deque[FromFrontEnd] = collections.deque()
        self._on_stop: Callable[[], None] = lambda: None
        self._wake: Callable[[], None] = lambda: None
        self._attend: Callable[[], None] = lambda: None
        self._stopped = False
        self.has_left = False
        """Whether the front end has asked all ranks to end, or has disconnected."""
        self.send(Ready(place, time.monotonic()))
        self._reader = threading.Thread(target=self._read, name="channel", daemon=True)
        self._reader.start()

    def follow(self, on_stop: Callable[[], None], wake: Callable[[], None], attend: Callable[[], None]) -> None:
        """Call `on_stop` when the user asks to stop (at once if that has happened), and `wake` for every message, both
        in the reading thread. `attend` is called while the front end does not read, and may raise."""
        self._on_stop, self._wake, self._attend = on_stop, wake, attend
        if self._stopped:
            on_stop()

    def attend(self) -> None:
        """Call it during measurements. Raises Interrupted when the user asks to stop."""
        if self._stopped:
            raise Interrupted("stopped before all was measured")

    def send(self, *messages: Sendable) -> None:
        """Send messages in one piece. They are lost if the front end has disconnected."""
        self._link.send(*messages, attend=self._attend)

    def say(self, line: str | Wording) -> None:
        """Show the user a line."""
        self.send(UserLine(line))

    def report(self, error: GgpipeError) -> None:
        """Send the error that ends the ranks."""
        if not error.is_reported:
            error.is_reported = True
            self.send(RanksFailed(Failure.of(error)))

    def take(self) -> list[FromFrontEnd]:
        """Messages since the last call, without Interrupt and EndRanks."""
        taken = []
        while self._arrived:
            taken.append(self._arrived.popleft())
        return taken

    def close(self) -> None:
        """Disconnect."""
        self.has_left = True
        self._link.end()
        self._reader.join()
        self._link.close()

    # In the reading thread

    def _read(self) -> None:
        while not self.has_left:
            try:
                received = self._link.receive(_ALIVE_S)
            except RunError:
                received = None
            for message in [EndRanks()] if received is None else received:
                self._take(message)
            if time.monotonic() > self._link.sent_at + _ALIVE_S:
                self._link.send_if_free(Alive())

    def _take(self, message: FromFrontEnd) -> None:
        match message:
            case EndRanks():
                self.has_left = True
            case Interrupt():
                pass
            case _:
                self._arrived.append(message)
                self._wake()
                return
        self._stopped = True
        self._on_stop()
        self._wake()
