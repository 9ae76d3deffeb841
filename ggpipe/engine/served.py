"""The head while a front end at the other end of a channel uses its engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from ggpipe.channel.events import (
    ChannelMessage,
    Failure,
    RequestEnded,
    RequestFigures,
    RequestRefused,
    Sendable,
    TokenReady,
)
from ggpipe.channel.front_end import FrontEnd
from ggpipe.channel.link import framed
from ggpipe.channel.messages import (
    CancelRequest,
    ChatTokenized,
    Detokenize,
    Detokenized,
    EngineLoaded,
    FromFrontEnd,
    LoadProgress,
    Measure,
    Measured,
    NotAnswered,
    SubmitRequest,
    Tokenize,
    TokenizeChat,
    Tokenized,
)
from ggpipe.core.prefixes import ErasePrefix, RestorePrefix, SavePrefix
from ggpipe.core.request import Counters
from ggpipe.engine.head import Head
from ggpipe.engine.session import Session
from ggpipe.errors import UsageError
from ggpipe.stats.records import RequestStats

_FIGURES_S = 0.1


def serve(front_end: FrontEnd, head: Head) -> None:
    """Load, then serve requests until the front end leaves. Raises what any rank failed with."""
    shown_at = 0.0

    def on_progress() -> None:
        nonlocal shown_at
        if time.monotonic() > shown_at + _FIGURES_S:
            shown_at = time.monotonic()
            front_end.send(LoadProgress(tuple(head.ranks)))

    session = Session.load(head, on_progress)
    front_end.send(
        EngineLoaded(
            ranks=tuple(session.ranks),
            n_ctx=session.n_ctx,
            can_speculate=session.can_speculate,
            warnings=session.warnings,
            sampling=session.sampling,
            model=session.model,
        )
    )
    server = _Server(front_end, session)
    while not front_end.has_left:
        server.step()


class _Server:
    """The engine's requests, which are the front end's, and its questions."""

    def __init__(self, front_end: FrontEnd, session: Session) -> None:
        self._front_end = front_end
        self._session = session
        self._stats: dict[int, RequestStats] = {}
        """Statistics of requests that have not ended."""
        self._tokenless: set[int] = set()
        """Those of them that have no token yet."""
        self._figures_at = 0.0

    def step(self) -> None:
        """Answer what has arrived, then wait for what comes of requests, at most 0.1 s."""
        answers = [answer for message in self._front_end.take() for answer in self._handle(message)]
        if answers:
            self._front_end.send(*answers)
        news: list[Sendable] = []
        for event in self._session.engine.step():
            if isinstance(event, RequestEnded):
                stats = self._stats[event.request]
                news.append(self._figures(event.request, stats, stats.counters))
            elif isinstance(event, TokenReady) and event.request in self._tokenless:
                self._tokenless.remove(event.request)
                news.append(self._figures(event.request, self._stats[event.request]))
            if isinstance(event, RequestEnded | RequestRefused):
                self._stats.pop(event.request, None)  # orders have none
                self._tokenless.discard(event.request)
            news.append(event)
        if self._stats and time.monotonic() > self._figures_at + _FIGURES_S:
            self._figures_at = time.monotonic()
            news += [self._figures(number, stats) for number, stats in self._stats.items()]
        if news:
            self._front_end.send(*news)

    def _handle(self, message: FromFrontEnd) -> list[ChannelMessage]:
        match message:
            case SubmitRequest(number, spec):
                stats = self._stats[number] = RequestStats()
                self._tokenless.add(number)
                self._session.engine.submit(number, spec, stats)
            case SavePrefix() | RestorePrefix() | ErasePrefix():
                self._session.engine.order(message)
            case CancelRequest(number):
                self._session.engine.cancel(number)
            case Tokenize(text):
                own = text.decode("utf-8", "surrogateescape")
                return [_answer(lambda: Tokenized(self._session.tokenize(own)))]
            case TokenizeChat(conversation):
                return [_answer(lambda: ChatTokenized(self._session.tokenize_chat(conversation)))]
            case Detokenize(tokens, special):
                return [_answer(lambda: Detokenized(self._session.detokenize(tokens, special)))]
            case Measure(clocks):
                self._session.measure()
                if clocks:
                    self._session.align_clocks()
                return [Measured(tuple(self._session.ranks))]
        return []

    def _figures(self, number: int, stats: RequestStats, counters: Counters | None = None) -> RequestFigures:
        """All since the last time. `counters`: with their tables, which grow with the text."""
        figures = RequestFigures(
            request=number,
            counters=counters or dataclasses.replace(stats.counters, rejected_rows={}, by_lead={}),
            n_in_flight=stats.n_in_flight,
            runs=tuple(stats.runs),
            draft_runs=tuple(stats.draft_runs),
            started_s=stats.started,
            ranks=tuple(stats.ranks),
            totals=tuple(self._session.ranks),
            n_cells=self._session.engine.n_cells,
        )
        stats.runs.clear()
        stats.draft_runs.clear()
        return figures


def _answer(answer: Callable[[], ChannelMessage]) -> ChannelMessage:
    try:
        message = answer()
        framed(message)  # which may be too large
        return message
    except UsageError as e:
        return NotAnswered(Failure.of(e))
