"""Engines that write 0, 1, 2, … and break when they are to, and a supervisor that starts one after the other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from ggpipe.chat.answer import answer_format
from ggpipe.chat.conversation import ChatPrompt
from ggpipe.config import SamplingConfig
from ggpipe.core.request import Finish, Token
from ggpipe.errors import (
    GgpipeError,
    RankError,
    RunError,
)
from ggpipe.metrics.stats import RankStats
from ggpipe.prefixes import PrefixDone, PrefixOrder
from ggpipe.prompt import Conversation
from ggpipe.runtime.channel.client import ClientRequest, EngineClient
from ggpipe.runtime.channel.events import Accepted, Ended, Event, TokenReady
from ggpipe.runtime.channel.messages import ModelInfo
from ggpipe.runtime.channel.supervisor import Supervisor, Way
from support.requests import asked

GREEDY = SamplingConfig(temp=0)


class Counting(EngineClient):
    """Its text is the number of each token. It dies of an error instead of the token with a number."""

    def __init__(self, ranks: FakeRanks, dies_at: int | None, error: GgpipeError) -> None:
        super().__init__(ranks, ranks.ranks, 100, True, (f"warning of {ranks.name}", "another one"), model=ranks.model)
        self.is_dead = False
        self._dies_at = dies_at
        self._error = error
        self._stopped: set[int] = set()
        self._answers: list[Event] = []

    is_open = True

    def _alive(self) -> None:
        if self.is_dead:
            raise self._error

    def tokenize(self, text: str) -> tuple[int, ...]:
        self._alive()
        return tuple(map(ord, text))

    def detokenize(self, tokens: Sequence[int], special: bool = False) -> tuple[bytes, ...]:
        return tuple(chr(token).encode() for token in tokens)

    def tokenize_chat(self, conversation: Conversation) -> ChatPrompt:
        return ChatPrompt(self.tokenize(str(conversation.messages[-1]["content"])), answer_format("", ""))

    def measure(self) -> None:
        self._alive()

    def align_clocks(self) -> None:
        self._alive()

    def idle(self, seconds: float) -> None:
        self._alive()

    def _submit(self, request: ClientRequest) -> None:
        accepted = Accepted(
            request=request.id, prompt=(), answer=None, sampling=None, seed=7, speculation=request.spec.speculation,
            arrived_s=0.0, ranks=tuple(self.ranks),
        )  # fmt: skip
        self._answers.append(accepted)

    def _order(self, order: PrefixOrder) -> None:
        self._answers.append(PrefixDone(order.id, 5))

    def _cancel(self, number: int) -> None:
        self._stopped.add(number)

    def _step(self) -> list[Event]:
        self._alive()
        events, self._answers = self._answers, []
        for request in tuple(self._requests.values()):
            number = len(request.tokens)
            if number == self._dies_at:
                self.is_dead = True
            elif number == request.spec.n_predict or request.id in self._stopped:
                finish = Finish.STOPPED if request.id in self._stopped else Finish.LENGTH
                events.append(Ended(request=request.id, finish=finish, ended_s=0.0))
            else:
                events.append(TokenReady(request.id, Token(number, f"{number} "), float(number)))
        return events


@dataclass
class FakeRanks:
    """Started ranks; what loading them raises, or when their engine dies of what."""

    name: str
    load_error: GgpipeError | None = None
    dies_at: int | None = None
    error: GgpipeError = field(default_factory=lambda: RankError("rank 1 (there) is gone"))
    ranks: list[RankStats] = field(default_factory=list)
    stopping: bool = False
    is_loading: bool = False
    failure: GgpipeError | None = None
    engine: Counting | None = None
    model: ModelInfo | None = None

    def stop(self) -> None:
        self.stopping = True

    def fail(self, error: Callable[[], GgpipeError]) -> None:
        self.failure = error()
        if self.engine is not None:
            self.engine.is_dead = True

    def is_ending(self) -> bool:
        return self.stopping

    def load(self) -> EngineClient:
        if self.stopping:
            raise RunError("stopped while loading")
        if self.load_error is not None:
            raise self.load_error
        self.ranks[:] = [RankStats(rank=0, host=self.name, load_s=1.0)]
        self.engine = Counting(self, self.dies_at, self.error)
        return self.engine


class Rig:
    """A supervisor whose starts follow a list: ranks, or the error that starting them raises."""

    def __init__(self, *starts: FakeRanks | GgpipeError, n_restarts: int = 1) -> None:
        self.lines: list[str] = []
        self.started: list[str] = []
        self.ended: list[BaseException | None] = []
        self.now = 0.0
        self.n_ways = 1
        self.on_ways: Callable[[], None] = lambda: None
        self._starts = list(starts)
        self.supervisor = Supervisor(self._ways, n_restarts, self.lines.append, clock=lambda: self.now)

    @contextlib.contextmanager
    def _start(self, own: Supervisor) -> Iterator[FakeRanks]:
        start = self._starts.pop(0)
        if isinstance(start, GgpipeError):
            raise start
        assert not own.stopping
        start.ranks = own.ranks
        self.started.append(start.name)
        try:
            yield start
        except BaseException as e:
            self.ended.append(e)
            raise
        self.ended.append(None)

    def _ways(self, attend: Callable[[], None]) -> Sequence[Way]:
        self.on_ways()
        attend()
        return [Way(self._start, f"way {i}" if i else "") for i in range(self.n_ways)]

    @contextlib.contextmanager
    def engine(self) -> Iterator[EngineClient]:
        with self.supervisor:
            self.supervisor.start(Way(self._start))
            yield self.supervisor.load()

    def text(self, engine: EngineClient, n: int = 6) -> str:
        return "".join(token.text for token in engine.stream(asked((1, 2), GREEDY, n)))
