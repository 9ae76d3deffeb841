"""One request at a time, on an engine: what the commands use.

with Head(transport, config) as head:
    session = Session.load(head)
    for token in session.generate(session.vocab.tokenize("Once upon"), SamplingConfig(temp=0)):
        print(token.text, end="")
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator

from ggpipe.config import SamplingConfig, SpeculationConfig
from ggpipe.errors import UsageError
from ggpipe.metrics.stats import RequestStats
from ggpipe.runtime.engine import ActiveRequest, Engine, RequestEnded, Token, TokenReady
from ggpipe.runtime.head import Head
from ggpipe.runtime.loading import load_all


class Session:
    """See the module's text. All methods belong to the main thread."""

    def __init__(self, head: Head, engine: Engine, warnings: tuple[str, ...] = ()) -> None:
        """`head`: the one that the engine was loaded with; it says when the user wants an end."""
        self.engine = engine
        self.ranks = engine.ranks
        self.vocab = engine.vocab
        self.n_ctx = engine.n_ctx
        self.can_speculate = engine.can_speculate
        self.warnings = warnings
        self.rest = ""
        """Of the last request: text of a character whose last bytes never came, mostly none."""
        self._head = head
        self._active: ActiveRequest | None = None

    @classmethod
    def load(cls, head: Head, on_progress: Callable[[], None] = lambda: None) -> Session:
        """Agree with all ranks, then load everywhere; `head.ranks` shows the progress, `on_progress` is called at each.

        Raises the first error that any rank met, and RunError when the user stops it.
        """
        loaded = load_all(head, on_progress)
        engine = Engine(loaded)
        head.at_close(engine.close)
        return cls(head, engine, loaded.warnings)

    def check_prompt(self, prompt: tuple[int, ...]) -> None:
        """Raises UsageError for a prompt that is empty or that leaves no room for an answer."""
        self.engine.check_prompt(prompt)

    def generate(
        self,
        prompt: tuple[int, ...],
        sampling: SamplingConfig,
        n_predict: int = -1,
        stats: RequestStats | None = None,
        speculation: SpeculationConfig | None = None,
    ) -> Generator[Token, None, None]:
        """Continue a prompt, see `Engine.submit`. `Head.stop` ends it early.

        An iterator that is closed, or dropped, ends its request. Raises UsageError for a bad prompt or while another
        request is active, RunError when a rank breaks.
        """
        if self._active is not None:
            raise UsageError("a session serves one request at a time: exhaust the last iterator, or close it")
        active = self._active = self.engine.submit(prompt, sampling, n_predict, speculation, stats)
        try:
            while active.is_active:
                yield from self._step()
                if self._head.stopping:
                    self.engine.cancel(active)
            yield from self._step()
        except GeneratorExit:
            self._abandon(active)
            raise
        finally:
            if active.is_active:
                active.stats.ended = time.monotonic()
            self._active = None
            self._head.stopping = False  # only now: one that came while loading ends the first request

    def _step(self) -> Iterator[Token]:
        for event in self.engine.step():
            match event:
                case TokenReady(_, token):
                    yield token
                case RequestEnded(_, rest):
                    self.rest = rest

    def _abandon(self, active: ActiveRequest) -> None:
        """The caller wants no more of it: the next request must find nothing in the way."""
        if self._head.is_open:
            self.engine.cancel(active)
            while active.is_active:
                self.engine.step()

    def stop(self) -> None:
        """End the current request soon, keeping what is generated. From any thread or a signal handler."""
        self._head.stop()

    # Between requests

    def idle(self, seconds: float) -> None:
        """Stay ready without a request. Raises when a rank breaks."""
        self.engine.idle(seconds)

    def measure(self) -> None:
        """Ask every rank what it has resident and what CPU time it took; fills `ranks`."""
        self.engine.measure_usage()

    def align_clocks(self) -> None:
        """Fill in `clock_offset_s` of all ranks, from the quickest of some pings. One machine's ranks share a clock."""
        self.engine.align_clocks()
