"""Ranks and their engine at the other end of a channel, as front ends see them.

The front end has every request with all of its tokens. When ranks die, others may be started (`Restarts`), and the
engine has them continue the active requests. `step` and questions take as long as that takes.
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
_LAST_LOOKS = 3  # for a report, once the head has gone
DEATHS = (RankError, Terminated)
"""What ranks may be started again after."""


class RemoteRanks:
    """Ranks that were started for this front end; nothing is loaded yet. Belongs to the main thread."""

    is_loading = False
    """Who starts them again has another object for all of them."""

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
        """`on_line` gets lines for the user. `cause`: why the ranks ended, for a head that could not say it.
        `more_links`: what else has connected, which may be another rank that reports a failure. A head that sends
        nothing for `rank_timeout_s` seconds is lost (0: never); it sends something every second, whatever it does.
        `ranks`: the list to keep all ranks in. `waker`: ends a wait for messages.

        Raises what the rank at the other end cannot start for.
        """
        self.ranks: list[RankStats] = ranks if ranks is not None else []
        """All ranks in order, of which others may hold this very list; nothing before the first has loaded."""
        self.stopping = False
        """The user wants an end of what is going on."""
        self.is_open = True
        """EndRanks was not sent yet."""
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

    # What the user wants

    def stop(self) -> None:
        """End loading, or the active requests, soon. From any thread or a signal handler."""
        self.stopping = True

    def fail(self, error: Callable[[], GgpipeError]) -> None:
        """Give up waiting for anything: `receive` raises this error. From any thread or a signal handler."""
        self._failure = self._failure or error

    def is_ending(self) -> bool:
        """The user wants an end of what is going on, or this process is to end."""
        return self.stopping or self._failure is not None

    # Messages

    def send(self, *messages: Sendable) -> None:
        """Send to the head. That it has gone shows when something is received."""
        self._link.send(*messages, attend=self._go_on)

    def receive(self) -> FromHead | None:
        """The head's next message; None after 0.1 s without one, or when it was woken.

        Raises what the ranks failed with, RankError when the head is lost, and the error of `fail`.
        """
        self._go_on()
        if not self._arrived:
            began = time.monotonic()
            received = self._link.receive(_TICK_S, self._waker)
            if received is None:
                self._take_last_reports()
                raise RankError(self._cause() or f"{self._place} is gone: killed, or crashed")
            # By our own waits, not by the clock: this process may have been stopped for a while.
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
        """The launcher may have ended the head because of another rank, which reported its failure in this moment."""
        for _ in range(_LAST_LOOKS):
            if (link := self._more_links()) is not None:
                self._take_report(link)
            time.sleep(_TICK_S)

    @staticmethod
    def _take_report(link: ChannelLink[FromHead]) -> None:
        """Raises what a rank that is not the head has failed with."""
        with contextlib.closing(link):
            for message in link.receive(_REPORT_S) or ():
                if isinstance(message, RanksFailed):
                    raise message.why.to_error()

    def wait_for(self, kind: type[M], on_other: Callable[[FromHead], None] = lambda _: None) -> M:
        """The next message of this kind; others go to `on_other`, which may raise."""
        while True:
            message = self.receive()
            if isinstance(message, kind):
                return message
            if message is not None:
                on_other(message)

    # What the ranks are started for

    def load(self) -> RemoteEngine:
        """Load the models everywhere. Raises the first error that any rank met, RunError when the user stops it."""
        return RemoteEngine(self, self.loaded())

    def loaded(self) -> EngineLoaded:
        """As `load`, without an engine."""

        def show(message: FromHead) -> None:
            if isinstance(message, LoadProgress):
                self.ranks[:] = message.ranks

        loaded = self._result(EngineLoaded, show)
        self.ranks[:] = loaded.ranks
        return loaded

    def profile(self) -> Profile:
        """What the ranks measure of themselves. Raises what any of them failed with, RunError when the user stops
        it."""
        return self._result(Profiled).profile

    def _result(self, kind: type[M], on_other: Callable[[FromHead], None] = lambda _: None) -> M:
        """As `wait_for`; a stop is passed on to the head."""
        is_stopped = False
        while True:
            if self.stopping and not is_stopped:
                is_stopped = True
                self.send(Interrupt())
            match self.receive():
                case None:
                    pass
                case message if isinstance(message, kind):
                    return message
                case message:
                    on_other(message)

    def close(self) -> None:
        """Have the ranks end. A second call does nothing."""
        if self.is_open:
            self.is_open = False
            self._link.send(EndRanks(), attend=self._link.end)
            self._link.close()


class Restarts(Stoppable, Protocol):
    """What starts ranks again."""

    def restarted(self, error: GgpipeError) -> tuple[RemoteRanks, EngineLoaded]:
        """Other ranks, which have loaded, after those before died of this error. Raises what ends all of it."""

    def say(self, line: str | Wording) -> None:
        """Show a line to the user."""


class RemoteEngine(EngineClient):
    """See the module's text. All methods but `stop` belong to the main thread."""

    def __init__(self, ranks: RemoteRanks, loaded: EngineLoaded, restarts: Restarts | None = None) -> None:
        """`restarts`: None where ranks that die are not started again."""
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
        """Have other ranks continue the active requests. Raises what ends all of it."""
        if self._restarts is None:
            raise error
        self._own, loaded = self._restarts.restarted(error)
        if loaded.model.fingerprint != self.model.fingerprint:  # nothing of the texts so far would be its own
            raise RunError(
                "the file of ",
                Setting("model"),
                " is another one than when it was loaded first: start ggpipe again to use it",
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
        """For `step`, what comes while an answer is waited for. Raises the error of a question that was refused."""
        if isinstance(message, NotAnswered):
            raise message.why.to_error()
        self._kept.append(message)

    def _show(self, ranks: tuple[RankStats, ...]) -> None:
        """Who holds the list of all ranks sees their new figures."""
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
                raise RunError(f"the head sent {type(message).__name__} while it serves: use one ggpipe everywhere")

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
