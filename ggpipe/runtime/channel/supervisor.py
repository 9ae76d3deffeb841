"""Ranks that are started again after they died, as front ends see them: one engine, without an end.

The front end has every request with all of its tokens. When ranks die, what is left of them is ended, ranks are started
again, and the active requests go on behind their tokens. `step` and the others take as long as that takes.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, TypeVar

from ggpipe.chat.conversation import ChatPrompt
from ggpipe.core.request import Finish
from ggpipe.errors import GgpipeError, Interrupted, RankError, RunError, StartError, Terminated, UsageError
from ggpipe.metrics.stats import RankStats
from ggpipe.prefixes import PrefixDone, PrefixOrder
from ggpipe.prompt import Conversation
from ggpipe.runtime.channel.client import ClientRequest, EngineClient, StartedRanks
from ggpipe.runtime.channel.events import Ended, Event, Refused

T = TypeVar("T")

WINDOW_S = 600.0
_DEATHS = (RankError, Terminated)


class Budget:
    """At most so many restarts in any ten minutes. Pure: the time is an argument, in seconds of one clock."""

    def __init__(self, n_restarts: int, window_s: float = WINDOW_S) -> None:
        self.n_restarts = n_restarts
        self._window_s = window_s
        self._taken_s: deque[float] = deque()

    def take(self, now_s: float) -> int | None:
        """The number of this restart among those of the last `window_s` seconds; None when there are too many."""
        while self._taken_s and now_s - self._taken_s[0] >= self._window_s:
            self._taken_s.popleft()
        if len(self._taken_s) >= self.n_restarts:
            return None
        self._taken_s.append(now_s)
        return len(self._taken_s)


class MortalRanks(StartedRanks, Protocol):
    """Ranks in other processes."""

    def fail(self, error: Callable[[], GgpipeError]) -> None:
        """Give up waiting for anything. From any thread or a signal handler."""


@dataclass(frozen=True)
class Way:
    """A way to start the ranks."""

    start: Callable[[Supervisor], AbstractContextManager[MortalRanks]]
    """A context with started ranks, whose list of all ranks is the supervisor's. Errors that leave it end the ranks."""
    line: str = ""
    """For the user: how it differs from what was asked for."""


class Supervisor:
    """Ranks that run, now or soon again. A context manager; when it is left, the ranks are ended.

    All methods but `stop` and `fail` belong to the main thread.
    """

    def __init__(
        self,
        ways: Callable[[Callable[[], None]], Sequence[Way]],
        n_restarts: int,
        on_line: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ways`: those to start the ranks again, the best first; the next one is taken where the ranks refuse one with
        a UsageError. It gets `attend`, to be called while it waits. `on_line` gets lines for the user."""
        self.ranks: list[RankStats] = []
        """All ranks in order, of which others may hold this very list; nothing before the first has loaded."""
        self.is_loading = False
        """Ranks are started again while requests wait."""
        self.n_restarts = 0
        """How often that was begun."""
        self._ways = ways
        self._budget = Budget(n_restarts)
        self._on_line = on_line
        self._clock = clock
        self._current: MortalRanks | None = None
        self._context = ExitStack()
        self._is_stopped = False
        self._died: GgpipeError | None = None
        """Why the first ranks died while they were started."""
        self._failure: Callable[[], GgpipeError] | None = None

    # What the user wants

    @property
    def stopping(self) -> bool:
        """The user wants an end of what is going on."""
        return self._is_stopped if self._current is None else self._current.stopping

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._is_stopped = value
        if self._current is not None:
            self._current.stopping = value

    def stop(self) -> None:
        """End loading, or the active requests, soon. From any thread or a signal handler."""
        self.stopping = True

    def fail(self, error: Callable[[], GgpipeError]) -> None:
        """Give up waiting for anything: what waits raises this error. From any thread or a signal handler."""
        self._failure = self._failure or error
        if self._current is not None:
            self._current.fail(self._failure)

    def is_ending(self) -> bool:
        """The user wants an end of what is going on, or this process is to end."""
        return self.stopping or self._failure is not None

    def attend(self) -> None:
        """To be called while ranks start. Raises Interrupted after a stop, and the error of `fail`."""
        if self._failure is not None:
            raise self._failure()
        if self.stopping:
            raise Interrupted("stopped while loading")

    # The ranks

    def start(self, way: Way) -> None:
        """Start ranks, of which nothing is loaded yet. Raises what they cannot start for.

        Those that die meanwhile are started again by `load`, if they may be.
        """
        try:
            self._start(way)
        except _DEATHS as e:
            if not self._budget.n_restarts:
                raise
            self._died = e

    def _start(self, way: Way) -> MortalRanks:
        self._current = started = self._context.enter_context(way.start(self))
        if self._failure is not None:
            started.fail(self._failure)
        if self._is_stopped:
            started.stop()
        return started

    def load(self) -> SupervisedEngine:
        """Load the models everywhere; ranks that die meanwhile are started again. Raises the first error that any rank
        met, RunError when the user stops it."""
        if self._current is None:
            assert self._died is not None
            engine = self.restarted(self._died)
        else:
            try:
                engine = self._current.load()
            except _DEATHS as e:
                engine = self.restarted(e)
        return SupervisedEngine(self, engine, self._on_line)

    def restarted(self, error: GgpipeError) -> EngineClient:
        """A new engine after the ranks died of this error, which is raised when they are not to be started again.

        What cannot be repeated is a RunError now, since it worked before.
        """
        self.is_loading = True
        try:
            while not self.is_ending() and (number := self._budget.take(self._clock())) is not None:
                self.n_restarts += 1
                self._on_line(f"{error}; starting the ranks again ({number} of {self._budget.n_restarts})")
                self._end(error)
                try:
                    return self._loaded_again()
                except (*_DEATHS, StartError) as e:
                    error = e
                except UsageError as e:
                    raise RunError(str(e)) from e
        finally:
            self.is_loading = False
        raise RunError(str(error)) if isinstance(error, StartError) else error

    def _loaded_again(self) -> EngineClient:
        ways = deque(self._ways(self.attend))
        while True:
            way = ways.popleft()
            if way.line:
                self._on_line(way.line)
            try:
                return self._start(way).load()
            except StartError:
                raise
            except UsageError as e:
                if not ways or self.is_ending():
                    raise
                self._on_line(str(e))
                self._end(e)

    def _end(self, error: GgpipeError) -> None:
        """End what is left of the ranks."""
        error.is_reported = True
        self._is_stopped, self._current = self.stopping, None
        self.ranks[:] = [
            RankStats(rank=rank.rank, model=rank.model, host=rank.host, layers=rank.layers) for rank in self.ranks
        ]
        context, self._context = self._context, ExitStack()
        with contextlib.suppress(GgpipeError):
            context.__exit__(type(error), error, error.__traceback__)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._context.__exit__(kind, error, traceback)


class SupervisedEngine(EngineClient):
    """The engine of ranks that may be other ones than before. All methods but `stop` belong to the main thread."""

    def __init__(self, own: Supervisor, engine: EngineClient, on_line: Callable[[str], None]) -> None:
        super().__init__(
            own, own.ranks, engine.n_ctx, engine.can_speculate, engine.warnings, engine.sampling, engine.model
        )
        self._own = own
        self._engine = engine
        self._on_line = on_line
        self._cancelled: set[int] = set()
        self._ended: dict[int, Ended | PrefixDone] = {}
        """What came of requests while ranks were started again."""
        engine.serve_for(self)

    @property
    def is_open(self) -> bool:
        return self._engine.is_open

    def tokenize(self, text: str) -> tuple[int, ...]:
        return self._ask(lambda engine: engine.tokenize(text))

    def tokenize_chat(self, conversation: Conversation) -> ChatPrompt:
        return self._ask(lambda engine: engine.tokenize_chat(conversation))

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> tuple[bytes, ...]:
        return self._ask(lambda engine: engine.detokenize(tokens, special))

    def measure(self) -> None:
        self._ask(lambda engine: engine.measure())

    def align_clocks(self) -> None:
        self._ask(lambda engine: engine.align_clocks())

    def idle(self, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        self._ask(lambda engine: engine.idle(max(deadline - time.monotonic(), 0.0)))

    def _submit(self, request: ClientRequest) -> None:
        self._engine._submit(request)

    def _order(self, order: PrefixOrder) -> None:
        self._engine._order(order)

    def _cancel(self, number: int) -> None:
        self._cancelled.add(number)
        self._engine._cancel(number)

    def _step(self) -> list[Event]:
        events: list[Event] = [*self._ended.values()]
        self._ended.clear()
        if not events:
            try:
                events = self._engine._step()
            except _DEATHS as e:
                self._go_on(e)
            self.n_cells = self._engine.n_cells
        over = (event.request for event in events if isinstance(event, Ended | Refused | PrefixDone))
        self._cancelled.difference_update(over)
        return events

    def _ask(self, ask: Callable[[EngineClient], T]) -> T:
        while True:
            try:
                return ask(self._engine)
            except _DEATHS as e:
                self._go_on(e)

    def _go_on(self, error: GgpipeError) -> None:
        """Have new ranks go on with the active requests. Raises what ends all of it."""
        self._engine = engine = self._own.restarted(error)
        if engine.model.fingerprint != self.model.fingerprint:  # nothing of the texts so far would be its own
            raise RunError(
                "the file of `model` is another one than when it was loaded first: start ggpipe again to use it"
            )
        engine.serve_for(self)
        self.can_speculate = engine.can_speculate
        for warning in engine.warnings:
            if warning not in self.warnings:
                self._on_line(f"warning: {warning}")
        self.warnings = tuple(dict.fromkeys((*self.warnings, *engine.warnings)))
        for request in self._requests.values():
            if request.id in self._cancelled:
                ended = Ended(request=request.id, finish=Finish.STOPPED, ended_s=time.monotonic())
                self._ended[request.id] = ended
            else:
                engine.resume(request)
        for order in self._orders.values():
            if order.id in self._cancelled:
                self._ended[order.id] = PrefixDone(order.id)
            else:
                engine._order(order)
