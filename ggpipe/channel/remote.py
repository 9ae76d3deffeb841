"""Ranks and their engine at the other end of a channel, as front ends see them.

The front end keeps every request with its tokens. When ranks die, they may be restarted (`Restarts`), and the engine
has them continue the active requests. `step` and questions wait for that.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
import time
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from ggpipe.channel.client import ClientRequest, EngineClient, Stoppable
from ggpipe.channel.events import (
    ChannelMessage,
    Failure,
    RequestAccepted,
    RequestEnded,
    RequestEvent,
    RequestFigures,
    RequestRefused,
    Sendable,
    TokenReady,
)
from ggpipe.channel.link import ChannelLink, Waker
from ggpipe.channel.messages import (
    Alive,
    CancelRequest,
    ChatTokenized,
    Detokenize,
    Detokenized,
    EndRanks,
    EngineLoaded,
    FromHead,
    Interrupt,
    LoadProgress,
    Measure,
    Measured,
    NotAnswered,
    Profiled,
    RanksFailed,
    Ready,
    SubmitRequest,
    Tokenize,
    TokenizeChat,
    Tokenized,
    UserLine,
)
from ggpipe.cluster.profile import Profile
from ggpipe.core.prefixes import PrefixDone, PrefixOrder
from ggpipe.core.prompt import Conversation
from ggpipe.core.request import Finish
from ggpipe.errors import GgpipeError, RankError, RunError, Setting, SilentRankError, Terminated, UsageError, Wording
from ggpipe.stats.records import RankStats
from ggpipe.text.chat.conversation import ChatPrompt

M = TypeVar("M", bound=ChannelMessage)

_TICK_S, _REPORT_S = 0.1, 1.0
_LAST_LOOKS = 3  # for a report, after the head has disconnected
DEATHS = (RankError, Terminated)
"""Errors after which ranks may be restarted."""


class RemoteRanks:
    """Ranks that were started for this front end, with nothing loaded yet. Used only in the main thread."""

    is_loading = False
    """Always: restarts are the Supervisor's."""

    def __init__(
        self,
        link: ChannelLink[FromHead],
        on_line: Callable[[str | Wording], None],
        cause: Callable[[], str | None] = lambda: None,
        more_links: Callable[[], ChannelLink[FromHead] | None] = lambda: None,
        rank_timeout_s: float = 30.0,
        ranks: list[RankStats] | None = None,
        waker: Waker | None = None,
    ) -> None:
        """`on_line` gets lines for the user. `cause`: why the ranks ended, if the head could not report it.
        `more_links`: further connections, which may be other ranks that report a failure. `rank_timeout_s`: the head is
        lost if it sends nothing for this long (0: never); it sends something every second. `ranks`: the list to keep
        all ranks in. `waker`: interrupts a wait for messages.

        Raises the error if the head cannot start.
        """
        self.ranks: list[RankStats] = ranks if ranks is not None else []
        """All ranks in order; empty before the first has loaded. The list itself never changes, so others may keep it.
        """
        self.stopping = False
        """The user has asked to stop."""
        self.is_open = True
        """Whether EndRanks has not been sent."""
        self._link = link
        self._on_line = on_line
        self._cause = cause
        self._more_links = more_links
        self._rank_timeout_s = rank_timeout_s
        self._waker = waker
        self._silent_s = 0.0
        self._failure: Callable[[], GgpipeError] | None = None
        self._place = "the first rank"
        self._arrived: list[FromHead] = []
        ready = self.wait_for(Ready)
        self._place = ready.place
        self.offset_s = 0.0 if link.is_local else time.monotonic() - ready.now_s
        """This process's clock minus the head's."""

    # Stopping

    def stop(self) -> None:
        """Stop loading or the active requests soon. May be called from any thread or a signal handler."""
        self.stopping = True

    def fail(self, error: Callable[[], GgpipeError]) -> None:
        """Make `receive` raise this error. May be called from any thread or a signal handler."""
        self._failure = self._failure or error

    def is_ending(self) -> bool:
        """Whether the user has asked to stop, or this process should end."""
        return self.stopping or self._failure is not None

    # Messages

    def send(self, *messages: Sendable) -> None:
        """Send to the head. If it has disconnected, the next `receive` raises the error."""
        self._link.send(*messages, attend=self._go_on)

    def receive(self) -> FromHead | None:
        """The head's next message; None after 0.1 s without one, or when woken.

        Raises the ranks' error if they failed, RankError if the head is lost, and the error of `fail`.
        """
        self._go_on()
        if not self._arrived:
            began = time.monotonic()
            received = self._link.receive(_TICK_S, self._waker)
            if received is None:
                self._take_last_reports()
                raise RankError(self._cause() or f"{self._place} is gone: killed, or crashed")
            # Counts our own waits instead of the clock, since this process may have been stopped for a while.
            self._silent_s = 0.0 if received else self._silent_s + min(time.monotonic() - began, _TICK_S)
            if self._silent_s > (self._rank_timeout_s or math.inf):
                raise SilentRankError(
                    f"{self._place} sent nothing for {self._rank_timeout_s:g} s: stopped, or cut off from the "
                    "network (the limit is ",
                    Setting("rank_timeout_s"),
                    ")",
                )
            if not received and (link := self._more_links()) is not None:
                self._take_report(link)
            self._arrived = received
        if not self._arrived:
            return None
        match self._arrived.pop(0):
            case Alive():
                return None
            case UserLine(text):
                self._on_line(text)
                return None
            case RanksFailed(why):
                raise why.to_error()
            case message:
                return message

    def _go_on(self) -> None:
        if self._failure is not None:
            raise self._failure()

    def _take_last_reports(self) -> None:
        """The launcher may have ended the head because of another rank, which is just reporting its failure."""
        for _ in range(_LAST_LOOKS):
            if (link := self._more_links()) is not None:
                self._take_report(link)
            time.sleep(_TICK_S)

    @staticmethod
    def _take_report(link: ChannelLink[FromHead]) -> None:
        """Raise the failure of a rank other than the head."""
        with contextlib.closing(link):
            for message in link.receive(_REPORT_S) or ():
                if isinstance(message, RanksFailed):
                    raise message.why.to_error()

    def wait_for(
        self, kind: type[M], on_other: Callable[[FromHead], None] = lambda _: None, forwards_stop: bool = False
    ) -> M:
        """The next message of this type. Others go to `on_other`, which may raise. `forwards_stop`: tell the head when
        the user asks to stop."""
        while True:
            if forwards_stop and self.stopping:
                forwards_stop = False
                self.send(Interrupt())
            message = self.receive()
            if isinstance(message, kind):
                return message
            if message is not None:
                on_other(message)

    # Commands

    def load(self) -> RemoteEngine:
        """Load the models on all ranks. Raises the first error of any rank, and RunError when the user stops it."""
        return RemoteEngine(self, self.loaded())

    def loaded(self) -> EngineLoaded:
        """Same as `load`, but without making an engine."""

        def show(message: FromHead) -> None:
            if isinstance(message, LoadProgress):
                self.ranks[:] = message.ranks

        loaded = self.wait_for(EngineLoaded, show, forwards_stop=True)
        self.ranks[:] = loaded.ranks
        return loaded

    def profile(self) -> Profile:
        """The ranks' measurements of themselves. Raises the first error of any rank, and RunError when the user stops
        it."""
        return self.wait_for(Profiled, forwards_stop=True).profile

    def close(self) -> None:
        """End the ranks. A second call does nothing."""
        if self.is_open:
            self.is_open = False
            self._link.send(EndRanks(), attend=self._link.end)
            self._link.close()


class Restarts(Stoppable, Protocol):
    """Restarts ranks."""

    def restarted(self, error: GgpipeError) -> tuple[RemoteRanks, EngineLoaded]:
        """New ranks, loaded, after the previous ones died of this error. Raises an error if there are none."""

    def say(self, line: str | Wording) -> None:
        """Show the user a line."""


class RemoteEngine(EngineClient):
    """An engine over a channel. Call all methods but `stop` from the main thread."""

    def __init__(self, ranks: RemoteRanks, loaded: EngineLoaded, restarts: Restarts | None = None) -> None:
        """`restarts`: None: ranks that die are not restarted."""
        super().__init__(
            restarts or ranks, ranks.ranks, loaded.n_ctx, loaded.can_speculate, loaded.warnings, loaded.sampling,
            loaded.model,
        )  # fmt: skip
        self._own = ranks
        self._restarts = restarts
        self._offset_s = ranks.offset_s
        self._kept: list[FromHead] = []
        self._cancelled: set[int] = set()

    @property
    def is_open(self) -> bool:
        return self._own.is_open

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self._ask(Tokenize(text.encode("utf-8", "surrogateescape")), Tokenized).tokens

    def tokenize_chat(self, conversation: Conversation) -> ChatPrompt:
        return self._ask(TokenizeChat(conversation), ChatTokenized).prompt

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> tuple[bytes, ...]:
        return self._ask(Detokenize(tuple(tokens), special), Detokenized).pieces

    def measure(self) -> None:
        self._measure(clocks=False)

    def align_clocks(self) -> None:
        self._measure(clocks=True)

    def idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            if (message := self._receive()) is not None:
                self._keep(message)

    def _measure(self, clocks: bool) -> None:
        self._show(self._ask(Measure(clocks), Measured).ranks)

    def _ask(self, question: ChannelMessage, kind: type[M]) -> M:
        while True:
            try:
                self._own.send(question)
                return self._own.wait_for(kind, self._keep)
            except DEATHS as e:
                self._go_on(e)

    def _receive(self) -> FromHead | None:
        try:
            return self._own.receive()
        except DEATHS as e:
            self._go_on(e)
            return None

    def _go_on(self, error: GgpipeError) -> None:
        """Have new ranks continue the active requests. Raises an error if there are none."""
        if self._restarts is None:
            raise error
        self._own, loaded = self._restarts.restarted(error)
        if loaded.model.fingerprint != self.model.fingerprint:  # it cannot continue outputs of another model
            raise RunError(
                "the file of ",
                Setting("model"),
                " has changed since it was first loaded: restart ggpipe to use it",
            )
        self._offset_s, self.can_speculate = self._own.offset_s, loaded.can_speculate
        for warning in loaded.warnings:
            if warning not in self.warnings:
                self._restarts.say(Wording("warning: ", warning))
        self.warnings = tuple(dict.fromkeys((*self.warnings, *loaded.warnings)))
        self._kept.clear()
        for request in self._requests.values():
            if request.id in self._cancelled:
                ended_s = time.monotonic() - self._offset_s
                self._kept.append(RequestEnded(request=request.id, finish=Finish.STOPPED, ended_s=ended_s))
            else:
                self.resume(request)
        for order in self._orders.values():
            if order.id in self._cancelled:
                self._kept.append(PrefixDone(order.id))
            else:
                self._order(order)

    def _keep(self, message: FromHead) -> None:
        """Keep a message for `step` while waiting for an answer. Raises the error of a failed question."""
        if isinstance(message, NotAnswered):
            raise message.why.to_error()
        self._kept.append(message)

    def _show(self, ranks: tuple[RankStats, ...]) -> None:
        """Update the list of all ranks."""
        for stats in ranks:
            stats.clock_offset_s += self._offset_s
        self.ranks[:] = ranks

    def _submit(self, request: ClientRequest) -> None:
        request.stats.arrived = request.stats.arrived or time.monotonic()
        self._begin_there(request.id, SubmitRequest(request.id, request.continued))

    def _order(self, order: PrefixOrder) -> None:
        self._begin_there(order.id, order)

    def _begin_there(self, number: int, message: Sendable) -> None:
        try:
            self._own.send(message)
        except UsageError as e:
            self._kept.append(RequestRefused(number, Failure.of(e)))

    def _cancel(self, number: int) -> None:
        if number not in self._cancelled:
            self._cancelled.add(number)
            self._own.send(CancelRequest(number))

    def _step(self) -> list[RequestEvent]:
        match self._kept.pop(0) if self._kept else self._receive():
            case RequestAccepted() | TokenReady() as event:
                return [event]
            case RequestEnded() | RequestRefused() | PrefixDone() as event:
                self._cancelled.discard(event.request)
                return [event]
            case RequestFigures() as figures:
                if (request := self._requests.get(figures.request)) is not None:
                    self._measured(figures, request)
                return []
            case None:
                return []
            case message:
                raise RunError(f"unexpected {type(message).__name__} from the head: use one ggpipe everywhere")

    def _measured(self, figures: RequestFigures, request: ClientRequest) -> None:
        stats = request.stats
        cached = stats.counters.cached_tokens if request.n_resumed else figures.counters.cached_tokens
        stats.counters = dataclasses.replace(figures.counters, cached_tokens=cached)
        stats.n_in_flight = figures.n_in_flight
        if stats.started is None and figures.started_s is not None:
            stats.started = figures.started_s + self._offset_s
        stats.runs += figures.runs
        stats.draft_runs += figures.draft_runs
        stats.ranks[:] = figures.ranks
        self.n_cells = figures.n_cells
        self._show(figures.totals)
