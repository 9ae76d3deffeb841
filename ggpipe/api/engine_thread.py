"""The thread that owns the ranks and their engine: it starts them, runs the engine, and ends them.

The kernel ends mpirun with the thread that started it, so no rank outlives this process. If the user started the ranks,
the thread is the first of them.
"""

from __future__ import annotations

import collections
import concurrent.futures
import logging
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from ggpipe.api.arguments import NAMES
from ggpipe.api.feed import Feed
from ggpipe.channel.client import ClientRequest, EngineClient
from ggpipe.channel.events import RequestAccepted, RequestEnded, RequestEvent, RequestRefused, TokenReady
from ggpipe.channel.link import Waker
from ggpipe.channel.started import UserContact, supervised
from ggpipe.channel.supervisor import Supervisor
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prefixes import PrefixDone, PrefixOrder
from ggpipe.core.request import Finish
from ggpipe.core.request_spec import RequestSpec
from ggpipe.errors import GgpipeError, RunError, SilentRankError, UsageError, Wording
from ggpipe.launch.job import Job
from ggpipe.launch.rank_setup import RankSetup
from ggpipe.options.settings import RankSettings
from ggpipe.planning.n_ranks import ranks_to_start
from ggpipe.stats.records import RankStats

_LOG = logging.getLogger("ggpipe")
_LAST_WORDS_S = 1.0

if TYPE_CHECKING:
    from ggpipe.engine.head import Head
    from ggpipe.engine.session import LocalRanks

T = TypeVar("T")

RequestOf = Callable[[SamplingConfig], RequestSpec]
"""Makes a request, given the sampling settings that the model recommends. Raises UsageError."""


class EngineThread:
    """All methods may be called from any thread."""

    def __init__(
        self,
        settings: RankSetup,
        ranks: RankSettings,
        show: Callable[[str | Wording], None] | None = None,
        names: Mapping[str, str] = NAMES,
        first_rank: Callable[[Callable[[Head], int]], int] | None = None,
    ) -> None:
        """Starts at once. `loaded` ends when the models are loaded.

        `settings`: of the ranks. `ranks`: where to start them, and how often to restart them. `show` gets lines for the
        user; None: the logger `ggpipe`. `names`: the user's names of settings in errors. `first_rank`: makes this
        process the first of the ranks that the user started, and calls its argument with their head. These ranks are
        not restarted.
        """
        self.ranks: Sequence[RankStats] = ()
        """All ranks in order; empty before the first has loaded."""
        self.n_cells = 0
        """KV cells in use."""
        self.loaded = Feed()
        """Ends when the models are loaded, or with an error."""
        self.ended = Feed()
        """Ends with the error that ended the engine."""
        self._settings = settings
        self._given = ranks
        self._show = show or _show
        self._names = names
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._calls: collections.deque[Callable[[EngineClient], None]] = collections.deque()
        self._feeds: dict[Feed, ClientRequest | PrefixOrder | None] = {}
        """Feeds of active requests and orders. None: it has not reached the engine."""
        self._of_request: dict[int, Feed] = {}
        self._questions: set[concurrent.futures.Future[Any]] = set()
        """Unanswered questions of `ask`."""
        self._error: GgpipeError | None = None
        """Why the engine has ended."""
        self._first_rank = first_rank
        self._ranks: Supervisor | LocalRanks | None = None
        self._head: Head | None = None
        """The head if the user started the ranks."""
        self._is_closing = False
        self._closing = threading.Event()
        self._waker = Waker()
        self._thread = threading.Thread(target=self._run, name="ggpipe engine", daemon=True)
        self._thread.start()

    # For other threads

    def submit(self, feed: Feed, request_of: RequestOf) -> None:
        """Submit a request, whose events go to the feed."""
        self._begin_with(feed, lambda engine: engine.submit(request_of(engine.sampling), feed.stats))

    def order(self, feed: Feed, make: Callable[[int], PrefixOrder]) -> None:
        """Submit an order for a prefix, made with the id that it gets. The feed ends when it has been carried out."""
        self._begin_with(feed, lambda engine: engine.order(make))

    def _begin_with(self, feed: Feed, begin: Callable[[EngineClient], ClientRequest | PrefixOrder]) -> None:
        def call(engine: EngineClient) -> None:
            if feed not in self._feeds:  # cancelled before
                return
            try:
                begun = begin(engine)
            except UsageError as e:
                self._end(feed, error=e.renamed(self._names))
                return
            self._feeds[feed], self._of_request[begun.id] = begun, feed

        with self._lock:
            error = self._error
            if error is None:
                self._feeds[feed] = None
                self._calls.append(call)
        if error is not None:
            feed.end(error=error)
        self._wake()

    def cancel(self, feed: Feed) -> None:
        """End a request soon, or an order that the ranks have not begun."""

        def call(engine: EngineClient) -> None:
            begun = self._feeds.get(feed)
            if begun is not None:
                engine.cancel(begun)
            elif feed in self._feeds:
                feed.stats.finish = Finish.STOPPED
                self._end(feed)

        with self._lock:
            self._calls.append(call)
        self._wake()

    def ask(self, question: Callable[[EngineClient], T]) -> concurrent.futures.Future[T]:
        """The engine's answer to a question. The future raises errors of the input."""
        answer: concurrent.futures.Future[T] = concurrent.futures.Future()

        def call(engine: EngineClient) -> None:
            self._questions.discard(answer)
            if not answer.set_running_or_notify_cancel():
                return
            try:
                answer.set_result(question(engine))
            except UsageError as e:
                answer.set_exception(e.renamed(self._names))
            except GgpipeError as e:
                answer.set_exception(e.renamed(self._names))
                raise
            except Exception as e:
                answer.set_exception(e)

        with self._lock:
            error = self._error  # a later error is set by `_fail`
            if error is None:
                self._questions.add(answer)
                self._calls.append(call)
        if error is not None:
            answer.set_exception(error)
        self._wake()
        return answer

    @property
    def n_active(self) -> int:
        """Number of active requests, including waiting ones."""
        return len(self._feeds)

    @property
    def is_restarting(self) -> bool:
        """Whether ranks are being restarted while requests wait."""
        return self.loaded.has_ended and self._ranks is not None and self._ranks.is_loading

    @property
    def n_restarts(self) -> int:
        """Number of restarts."""
        return self._ranks.n_restarts if self._ranks is not None else 0

    def stop(self) -> None:
        """End all requests and ranks soon."""
        with self._lock:
            self._is_closing = True
            ranks = self._ranks
        if ranks is not None:
            ranks.stop()
        self._wake()

    def fail(self, error: GgpipeError) -> None:
        """End with this error soon. Only if the user started the ranks."""
        if self._head is not None:
            self._head.fail(lambda: error)
        self._wake()

    def close(self) -> None:
        """End all requests and ranks, and wait for them. A second call does nothing."""
        if os.getpid() != self._process:  # a fork, which does not have the thread
            return
        self.stop()
        self._closing.set()
        if threading.current_thread() is not self._thread:
            self._thread.join()

    def _wake(self) -> None:
        self._waker.wake()
        if self._head is not None:
            self._head.channel.inbox.call()

    # In the thread

    def _run(self) -> None:
        error: GgpipeError = RunError("the engine is closed")
        try:
            if self._first_rank is not None:
                self._first_rank(self._be_first)
                return
            n_ranks = ranks_to_start(self._settings.config, self._given.hostfile) or 1
            job = Job(self._settings, n_ranks, self._given.hostfile)
            user = UserContact(show=self._show, report=lambda _: None, waker=self._waker)
            with supervised(job, self._given.restart, user, self._begin) as ranks:
                self._serve(ranks.load())
        except GgpipeError as e:
            error = error if self._is_closing and self.loaded.has_ended else e.renamed(self._names)
        except BaseException as e:
            error = RunError(f"the engine broke: {e!r}")
            raise
        finally:
            self._fail(error)

    def _be_first(self, head: Head) -> int:
        from ggpipe.engine.session import LocalRanks  # not needed by a process that starts its ranks

        self._head, ranks = head, LocalRanks(head)
        self._begin(ranks)
        try:
            self._serve(ranks.load())
        except GgpipeError as e:
            self._fail(e.renamed(self._names))
            if isinstance(e, SilentRankError):  # it ends this process at once
                self._closing.wait(_LAST_WORDS_S)
            raise
        return 0

    def _begin(self, ranks: Supervisor | LocalRanks) -> None:
        with self._lock:
            self._ranks, self.ranks = ranks, ranks.ranks
        if self._is_closing:
            ranks.stop()

    def _serve(self, engine: EngineClient) -> None:
        for warning in engine.warnings:
            self._show(warning)
        self.loaded.end()
        while not self._is_closing:
            while self._calls:
                self._calls.popleft()(engine)
            events = engine.step()
            self.n_cells = engine.n_cells
            for event in events:
                if (feed := self._of_request.get(event.request)) is not None:
                    self._take(event, feed)

    def _take(self, event: RequestEvent, feed: Feed) -> None:
        match event, self._feeds[feed]:
            case RequestAccepted(answer_format=answer, warnings=warnings), ClientRequest() as request:
                self._show_all([Wording("warning: ", warning.renamed(self._names)) for warning in warnings])
                feed.accept(request.prompt, answer)
            case TokenReady(_, token), _:
                feed.add(token)
            case RequestEnded(rest=rest, not_saved=not_saved), ClientRequest(spec=spec):
                del self._of_request[event.request]
                self._show_all(not_saved)
                feed.embedding = event.embedding
                self._end(feed, rest, _failed(not_saved) if spec.pooling is not None else None)
            case PrefixDone(_, n_bytes, problems), _:
                del self._of_request[event.request]
                self._show_all(problems)
                feed.n_saved_bytes = n_bytes
                self._end(feed, error=_failed(problems))
            case RequestRefused(_, why), _:
                del self._of_request[event.request]
                self._end(feed, error=why.to_error().renamed(self._names))

    def _show_all(self, lines: Sequence[str | Wording]) -> None:
        for line in lines:
            self._show(line)

    def _end(self, feed: Feed, rest: str = "", error: GgpipeError | None = None) -> None:
        with self._lock:
            self._feeds.pop(feed, None)
        feed.end(rest, error)
        feed.on_end()

    def _fail(self, error: GgpipeError) -> None:
        with self._lock:
            self._error = error
            feeds, questions = list(self._feeds), list(self._questions)
            self._feeds.clear()
            self._questions.clear()
            self._calls.clear()
        for answer in questions:
            if answer.set_running_or_notify_cancel():
                answer.set_exception(error)
        for feed in (self.loaded, *feeds, self.ended):
            feed.end(error=error)
        self._waker.close()


def _failed(problems: Sequence[str]) -> GgpipeError | None:
    return RunError("; ".join(problems)) if problems else None


def _show(line: str | Wording) -> None:
    _LOG.warning("%s", Wording(line).renamed(NAMES))
