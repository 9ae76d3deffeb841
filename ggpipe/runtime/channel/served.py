"""The head while a front end at the other end of a channel uses its engine."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable

from ggpipe.core.request import Counters
from ggpipe.errors import GgpipeError, UsageError
from ggpipe.metrics.stats import RankStats
from ggpipe.runtime.channel.client import ClientRequest, RequestEnded, TokenReady
from ggpipe.runtime.channel.front_end import FrontEnd
from ggpipe.runtime.channel.link import framed
from ggpipe.runtime.channel.messages import (
    Cancel,
    ChatTokenized,
    Detokenize,
    Detokenized,
    Ended,
    Figures,
    FromFrontEnd,
    Loaded,
    Loading,
    Measure,
    Measured,
    Message,
    NewTokens,
    Refused,
    Started,
    Submit,
    Tokenize,
    TokenizeChat,
    Tokenized,
)
from ggpipe.runtime.head import Head
from ggpipe.runtime.session import Session

_FIGURES_S = 0.1


def serve(front_end: FrontEnd, head: Head) -> None:
    """Load, then serve requests until the front end leaves. Raises what any rank failed with."""
    shown_at = 0.0

    def on_progress() -> None:
        nonlocal shown_at
        if time.monotonic() > shown_at + _FIGURES_S:
            shown_at = time.monotonic()
            front_end.send(Loading(tuple(head.ranks)))

    session = Session.load(head, on_progress)
    front_end.send(
        Loaded(
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
    """Requests of the front end on the session, and what comes of them."""

    def __init__(self, front_end: FrontEnd, session: Session) -> None:
        self._front_end = front_end
        self._session = session
        self._requests: dict[int, ClientRequest] = {}
        """By the front end's number."""
        self._number: dict[int, int] = {}
        """The front end's number, by the session's."""
        self._figures_at = 0.0

    def step(self) -> None:
        """Answer what has arrived, then wait for what comes of requests, at most 0.1 s."""
        answers: list[Message] = []
        for message in self._front_end.take():
            answers += self._handle(message)
        if answers:
            self._front_end.send(*answers)
            answers = []
        tokens: dict[int, list[TokenReady]] = {}
        for event in self._session.step():
            match event:
                case TokenReady(request):
                    tokens.setdefault(self._number[request.id], []).append(event)
                case RequestEnded(request):
                    number = self._number.pop(request.id)
                    del self._requests[number]
                    answers += self._tokens(number, tokens.pop(number, [])) + self._ended(number, request)
        for number, events in tokens.items():
            answers += self._tokens(number, events)
        if self._requests and time.monotonic() > self._figures_at + _FIGURES_S:
            self._figures_at = time.monotonic()
            answers += [self._figures(number, request) for number, request in self._requests.items()]
        if answers:
            self._front_end.send(*answers)

    def _handle(self, message: FromFrontEnd) -> list[Message]:
        match message:
            case Submit():
                request = self._session.submit(
                    message.prompt,
                    message.sampling,
                    message.n_predict,
                    message.speculation,
                    cache_prompt=message.cache_prompt,
                    tokens=message.tokens,
                    redrawn=message.redrawn,
                    task=message.task,
                    user=message.user,
                )
                return self._submit(message.request, request)
            case Cancel(number):
                if number in self._requests:
                    self._session.cancel(self._requests[number])
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

    def _submit(self, number: int, request: ClientRequest) -> list[Message]:
        self._requests[number], self._number[request.id] = request, number
        if request.error is not None:  # its RequestEnded follows
            return []
        stats = request.stats
        return [
            Started(
                request=number,
                seed=stats.seed,
                arrived_s=stats.arrived,
                speculation=stats.speculation,
                ranks=tuple(stats.ranks),
            )
        ]

    @staticmethod
    def _tokens(number: int, events: list[TokenReady]) -> list[Message]:
        if not events:
            return []
        request = events[0].request
        times_s = request.stats.token_times
        n = len(events)
        message = NewTokens(number, tuple(event.token for event in events), tuple(times_s[:n]))
        del times_s[:n], request.tokens[:n], request.stats.drafted[:n]  # the front end keeps them
        return [message]

    def _ended(self, number: int, request: ClientRequest) -> list[Message]:
        error, stats = request.error, request.stats
        if error is not None or stats.finish is None or stats.ended is None:
            return [_refused(number, error)]
        figures = self._figures(number, request, stats.counters)
        ended = Ended(
            request=number,
            finish=stats.finish,
            ended_s=stats.ended,
            rest=request.rest,
            not_saved=request.not_saved,
            n_saved_bytes=request.n_saved_bytes,
            embedding=request.embedding,
        )
        return [figures, ended]

    def _figures(self, number: int, request: ClientRequest, counters: Counters | None = None) -> Figures:
        """All since the last time. `counters`: with their tables, which grow with the text."""
        stats = request.stats
        figures = Figures(
            request=number,
            counters=counters or dataclasses.replace(stats.counters, rejected_rows={}, by_lead={}),
            n_in_flight=stats.n_in_flight,
            runs=tuple(stats.runs),
            draft_runs=tuple(stats.draft_runs),
            started_s=stats.started,
            ranks=tuple(stats.ranks),
            totals=self._totals(),
            n_cells=self._session.n_cells,
        )
        stats.runs.clear()
        stats.draft_runs.clear()
        return figures

    def _totals(self) -> tuple[RankStats, ...]:
        return tuple(self._session.ranks)


def _answer(answer: Callable[[], Message]) -> Message:
    try:
        message = answer()
        framed(message)  # which may be too large
        return message
    except UsageError as e:
        return _refused(0, e)


def _refused(number: int, error: GgpipeError | None) -> Refused:
    return Refused(number, type(error).__name__, str(error))
