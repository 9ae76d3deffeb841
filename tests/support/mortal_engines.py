"""Ranks that write 0, 1, 2, … and die when they are to, and a supervisor that starts some after the others."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence

from ggpipe.channel.client import EngineClient
from ggpipe.channel.events import RequestAccepted, RequestEnded, Sendable, TokenReady
from ggpipe.channel.messages import (
    CancelRequest,
    ChatTokenized,
    EngineLoaded,
    FromHead,
    Measure,
    Measured,
    ModelInfo,
    SubmitRequest,
    Tokenize,
    TokenizeChat,
    Tokenized,
)
from ggpipe.channel.remote import RemoteRanks
from ggpipe.channel.supervisor import StartMethod, Supervisor
from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.prefixes import ErasePrefix, PrefixDone, RestorePrefix, SavePrefix
from ggpipe.core.request import Finish, Token
from ggpipe.errors import GgpipeError, RankError, RunError, Wording
from ggpipe.stats.records import RankStats
from ggpipe.text.chat.answer import answer_format
from ggpipe.text.chat.conversation import ChatPrompt
from support.requests import asked

GREEDY = SamplingConfig(temp=0)


class FakeRanks(RemoteRanks):
    """Started ranks, whose text is the number of each token; what loading them raises, or when they die of what.

    They die instead of the token with a number.
    """

    def __init__(
        self,
        name: str,
        load_error: GgpipeError | None = None,
        dies_at: int | None = None,
        error: GgpipeError | None = None,
        model: ModelInfo | None = None,
    ) -> None:
        self.name = name
        self.ranks: list[RankStats] = []
        self.stopping = self.is_dead = False
        self.is_open = True
        self.offset_s = 0.0
        self.failure: GgpipeError | None = None
        self._failure = None
        self._load_error = load_error
        self._dies_at = dies_at
        self._error = error or RankError("rank 1 (there) is gone")
        self._model = model or ModelInfo()
        self._numbers: dict[int, tuple[int, int]] = {}
        """By request: the number of its next token, and of tokens at most."""
        self._answers: list[FromHead] = []

    def fail(self, error: Callable[[], GgpipeError]) -> None:
        self.failure, self.is_dead = error(), True

    def loaded(self) -> EngineLoaded:
        if self.stopping:
            raise RunError("stopped while loading")
        if self._load_error is not None:
            raise self._load_error
        self.ranks[:] = [RankStats(rank=0, host=self.name, load_s=1.0)]
        return EngineLoaded(
            ranks=tuple(self.ranks), n_ctx=100, can_speculate=True,
            warnings=(Wording(f"warning of {self.name}"), Wording("another one")),
            sampling=SamplingConfig(), model=self._model,
        )  # fmt: skip

    def send(self, *messages: Sendable) -> None:
        for message in messages:
            self._answers += self._answered(message)

    def _answered(self, message: Sendable) -> Sequence[FromHead]:
        match message:
            case SubmitRequest(number, spec):
                self._numbers[number] = len(spec.resumed), spec.n_predict
                accepted = RequestAccepted(
                    request=number, prompt=(), answer_format=None, sampling=None, seed=7, speculation=spec.speculation,
                    arrived_s=0.0, ranks=tuple(self.ranks),
                )  # fmt: skip
                return [accepted]
            case CancelRequest(number) if number in self._numbers:
                del self._numbers[number]
                return [RequestEnded(request=number, finish=Finish.STOPPED, ended_s=0.0)]
            case SavePrefix(number) | RestorePrefix(number) | ErasePrefix(number):
                return [PrefixDone(number, 5)]
            case Tokenize(text):
                return [Tokenized(tuple(text))]
            case TokenizeChat(conversation):
                tokens = tuple(str(conversation.messages[-1]["content"]).encode())
                return [ChatTokenized(ChatPrompt(tokens, answer_format("", "")))]
            case Measure():
                return [Measured(tuple(self.ranks))]
        return []

    def receive(self) -> FromHead | None:
        if not self._answers and not self.is_dead:
            for number in tuple(self._numbers):
                self._count(number)
        if self.is_dead and not (self._answers and isinstance(self._answers[0], TokenReady)):
            raise self._error
        return self._answers.pop(0) if self._answers else None

    def _count(self, number: int) -> None:
        n, n_predict = self._numbers[number]
        if n == self._dies_at:
            self.is_dead = True
        elif n == n_predict:
            del self._numbers[number]
            self._answers.append(RequestEnded(request=number, finish=Finish.LENGTH, ended_s=0.0))
        else:
            self._numbers[number] = n + 1, n_predict
            self._answers.append(TokenReady(number, Token(n, f"{n} "), float(n)))


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
        self.supervisor = Supervisor(
            self._ways, n_restarts, lambda line: self.lines.append(str(line)), clock=lambda: self.now
        )

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

    def _ways(self, attend: Callable[[], None]) -> Sequence[StartMethod]:
        self.on_ways()
        attend()
        return [StartMethod(self._start, f"way {i}" if i else "") for i in range(self.n_ways)]

    @contextlib.contextmanager
    def engine(self) -> Iterator[EngineClient]:
        with self.supervisor:
            self.supervisor.start(StartMethod(self._start))
            yield self.supervisor.load()

    def text(self, engine: EngineClient, n: int = 6) -> str:
        return "".join(token.text for token in engine.stream(asked((1, 2), GREEDY, n)))
