"""Restarting ranks after they died.

Remaining processes of the old ranks are ended first. The engine (`remote`) then has the new ones continue the active
requests.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, ExitStack
from dataclasses import dataclass
from types import TracebackType

from ggpipe.channel.messages import EngineLoaded
from ggpipe.channel.remote import DEATHS, RemoteEngine, RemoteRanks
from ggpipe.errors import GgpipeError, Interrupted, RunError, StartError, UsageError, Wording
from ggpipe.stats.records import RankStats

WINDOW_S = 600.0


class Budget:
    """A limit of restarts per ten minutes. Pure: the time is an argument, in seconds."""

    def __init__(self, n_restarts: int, window_s: float = WINDOW_S) -> None:
        self.n_restarts = n_restarts
        self._window_s = window_s
        self._taken_s: deque[float] = deque()

    def take(self, now_s: float) -> int | None:
        """Count of restarts in the last `window_s` seconds, including this one; None if the limit is reached."""
        while self._taken_s and now_s - self._taken_s[0] >= self._window_s:
            self._taken_s.popleft()
        if len(self._taken_s) >= self.n_restarts:
            return None
        self._taken_s.append(now_s)
        return len(self._taken_s)


@dataclass(frozen=True)
class StartMethod:
    """A way to start the ranks."""

    start: Callable[[Supervisor], AbstractContextManager[RemoteRanks]]
    """A context with started ranks, which use the supervisor's list of ranks. Errors in the context end them."""
    line: str = ""
    """Tells the user how it differs from the settings."""


class Supervisor:
    """Ranks that are running or being restarted. A context manager that ends them on exit.

    Call all methods but `stop` and `fail` from the main thread.
    """

    def __init__(
        self,
        ways: Callable[[Callable[[], None]], Sequence[StartMethod]],
        n_restarts: int,
        on_line: Callable[[str | Wording], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`ways`: ways to restart the ranks, the best first. If the ranks raise UsageError, the next one is tried. It
        is called with `attend`, to call while it waits. `on_line` gets lines for the user."""
        self.ranks: list[RankStats] = []
        """All ranks in order; empty before the first has loaded. The list itself never changes, so others may keep it.
        """
        self.is_loading = False
        """Ranks are being restarted while requests wait."""
        self.n_restarts = 0
        """Number of restarts."""
        self._ways = ways
        self._budget = Budget(n_restarts)
        self.say = on_line
        self._clock = clock
        self._current: RemoteRanks | None = None
        self._context = ExitStack()
        self._is_stopped = False
        self._died: GgpipeError | None = None
        """Why the first ranks died during their start."""
        self._failure: Callable[[], GgpipeError] | None = None

    # Stopping

    @property
    def stopping(self) -> bool:
        """The user has asked to stop."""
        return self._is_stopped if self._current is None else self._current.stopping

    @stopping.setter
    def stopping(self, value: bool) -> None:
        self._is_stopped = value
        if self._current is not None:
            self._current.stopping = value

    def stop(self) -> None:
        """Stop loading or the active requests soon. May be called from any thread or a signal handler."""
        self.stopping = True

    def fail(self, error: Callable[[], GgpipeError]) -> None:
        """Make everything that waits raise this error. May be called from any thread or a signal handler."""
        self._failure = self._failure or error
        if self._current is not None:
            self._current.fail(self._failure)

    def is_ending(self) -> bool:
        """Whether the user has asked to stop, or this process should end."""
        return self.stopping or self._failure is not None

    def attend(self) -> None:
        """Call it while ranks start. Raises Interrupted after a stop, and the error of `fail`."""
        if self._failure is not None:
            raise self._failure()
        if self.stopping:
            raise Interrupted("stopped while loading")

    # The ranks

    def start(self, way: StartMethod) -> None:
        """Start ranks, without loading models. Raises the error if they cannot start.

        Ranks that die meanwhile are restarted by `load`, if restarts are allowed.
        """
        try:
            self._start(way)
        except DEATHS as e:
            if not self._budget.n_restarts:
                raise
            self._died = e

    def _start(self, way: StartMethod) -> RemoteRanks:
        self._current = started = self._context.enter_context(way.start(self))
        if self._failure is not None:
            started.fail(self._failure)
        if self._is_stopped:
            started.stop()
        return started

    def load(self) -> RemoteEngine:
        """Load the models on all ranks, and restart ranks that die meanwhile. Raises the first error of any rank, and
        RunError when the user stops it."""
        if self._current is None:
            assert self._died is not None
            return RemoteEngine(*self.restarted(self._died), self)
        try:
            return RemoteEngine(self._current, self._current.loaded(), self)
        except DEATHS as e:
            return RemoteEngine(*self.restarted(e), self)

    def restarted(self, error: GgpipeError) -> tuple[RemoteRanks, EngineLoaded]:
        """New ranks, loaded. Raises the error that the previous ones died of if none may be started.

        Other errors become RunErrors, since the settings worked before.
        """
        self.is_loading = True
        try:
            while not self.is_ending() and (number := self._budget.take(self._clock())) is not None:
                self.n_restarts += 1
                self.say(Wording(error, f"; starting the ranks again ({number} of {self._budget.n_restarts})"))
                self._end(error)
                try:
                    return self._loaded_again()
                except (*DEATHS, StartError) as e:
                    error = e
                except UsageError as e:
                    raise RunError(e) from e
        finally:
            self.is_loading = False
        raise RunError(error) if isinstance(error, StartError) else error

    def _loaded_again(self) -> tuple[RemoteRanks, EngineLoaded]:
        ways = deque(self._ways(self.attend))
        while True:
            way = ways.popleft()
            if way.line:
                self.say(way.line)
            try:
                ranks = self._start(way)
                return ranks, ranks.loaded()
            except StartError:
                raise
            except UsageError as e:
                if not ways or self.is_ending():
                    raise
                self.say(e.wording)
                self._end(e)

    def _end(self, error: GgpipeError) -> None:
        """End the remaining ranks."""
        error.is_reported = True
        self._is_stopped, self._current = self.stopping, None
        self.ranks[:] = [
            RankStats(rank=rank.rank, model=rank.model, drafter=rank.drafter, host=rank.host, layers=rank.layers)
            for rank in self.ranks
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
