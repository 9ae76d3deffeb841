"""The head's side of all ranks: `Head` from the start, `LoadedHead` once every stage is loaded (`loading.load_all`)."""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import TracebackType

from ggpipe.config.engine import EngineConfig
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.draft_messages import MicroBatch
from ggpipe.core.events import CancelRuns
from ggpipe.core.messages import Run, RunRecord, RunResult, Span
from ggpipe.core.request import Limits
from ggpipe.engine.control_channel import ControlChannel, Received
from ggpipe.engine.drafters import Drafters
from ggpipe.engine.grammars import GrammarReady
from ggpipe.engine.inner_draft import InnerDraft
from ggpipe.engine.pipeline import Pipeline
from ggpipe.engine.stage_thread import Fetched, InputsReady, Notice, Passed, ResultReady, Saved, StageFailed
from ggpipe.errors import GgpipeError, RunError, SilentRankError, Terminated, Wording
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.vocab import Vocab
from ggpipe.stats.records import RankStats
from ggpipe.transport import codec, draft_codec
from ggpipe.transport.base import HEAD, Kind, Message, Transport
from ggpipe.transport.control import AskClock, AskUsage, Clock, PrefixSaved, Quit, Usage

_TICK_S = 0.1  # between two checks whether the user wants to stop
_PINGS = 9
_USAGE_S = 5.0
_FLUSH_S = 5.0


@dataclass(frozen=True, slots=True)
class DraftUpdate:
    """Draft tokens, and the draft's runs that ended since the last ones."""

    micro_batch: MicroBatch
    records: tuple[RunRecord, ...]


@dataclass(frozen=True, slots=True)
class PartSpan:
    """The time of a rank that does not send its runs on, as another part of its group does."""

    run: int
    span: Span


HeadEvent = RunResult | Fetched | DraftUpdate | PartSpan | Received | GrammarReady | None
"""What `LoadedHead.next` brings."""


class Head:
    """The control channel to all ranks, what is known of each, and whether the user wants an end.

    All methods but `stop`, `fail` and `terminate` belong to the main thread. As a context manager it has all ranks exit
    when it is left, with the exit code of the error that leaves it.
    """

    def __init__(self, transport: Transport, config: EngineConfig) -> None:
        """Nothing is loaded yet, and no other process is asked anything. Draft models without ranks get one each in
        this process."""
        self._inner: list[InnerDraft] = []
        self._process_ranks = range(1, transport.size)
        while not all(draft.layer_split for draft in config.drafts):
            inner = InnerDraft(transport, config)
            transport, config = inner.transport, inner.config
            self._inner.append(inner)
        self.transport = transport
        self.config = config
        n = transport.size
        self.ranks = [RankStats(rank=rank, model=config.model_of(rank, n)) for rank in range(n)]
        """All ranks in order; drafts inside this process come last, under the head's number."""
        for stats in self.ranks[n - len(self._inner) :]:
            stats.rank = HEAD
        self.channel: ControlChannel[Notice | GrammarReady] = ControlChannel(transport)
        self.stopping = False
        """The user wants an end of what is going on."""
        self._failure: Callable[[], GgpipeError] | None = None
        """Makes the error that ends this process."""
        self.is_open = True
        """Quit was not sent yet."""
        self._at_close = contextlib.ExitStack()

    def next(self, timeout_s: float = _TICK_S) -> Received | Message | Notice | GrammarReady | None:
        """The next message or notice; None after a tick, or after `timeout_s` seconds.

        Raises what another rank, or a stage of ours, failed with, and the error of `fail`.
        """
        if self._failure is not None:
            raise self._failure()
        event = self.channel.inbox.next(min(timeout_s, _TICK_S))
        match event:
            case StageFailed(error):
                raise error
            case Message(kind=Kind.CONTROL):
                return self.channel.read(event)
        return event

    @property
    def n_processes(self) -> int:
        """Number of ranks with a process of their own. The ranks after them run inside this process."""
        return len(self._process_ranks) + 1

    def stop(self) -> None:
        """End loading, or the current request, soon; what is generated is kept. From any thread or a signal handler."""
        self.stopping = True

    def fail(self, error: Callable[[], GgpipeError]) -> None:
        """Give up waiting for anything: `next` raises this error. From any thread or a signal handler."""
        self._failure = self._failure or error

    def terminate(self) -> None:
        """`fail` with Terminated."""
        self.fail(lambda: Terminated("terminated from outside"))

    def is_ending(self) -> bool:
        """The user wants an end, or this process is to end."""
        return self.stopping or self._failure is not None

    def measure_usage(self, next_event: Callable[[], object], attend: Callable[[HeadEvent], None]) -> None:
        """Fill in `cpu_s` and `resident_bytes` of all processes that answer within seconds. `next_event` brings events,
        of which other ones go to `attend`."""
        for rank in self._process_ranks:
            self.channel.send(rank, AskUsage())
        own = Usage(time.process_time(), machine.resident_bytes())
        others = self.channel.gather(Usage, self._process_ranks, next_event, attend, _USAGE_S)
        for rank, usage in {HEAD: own, **others}.items():
            self.ranks[rank].cpu_s, self.ranks[rank].resident_bytes = usage.cpu_s, usage.resident_bytes

    def align_clocks(self, next_event: Callable[[], object], attend: Callable[[HeadEvent], None]) -> None:
        """Fill in `clock_offset_s` of all ranks, from the quickest of some pings. One machine's ranks share a clock.
        Events as for `measure_usage`."""
        for rank in self._process_ranks:
            stats = self.ranks[rank]
            if stats.host == self.ranks[HEAD].host:
                continue
            best_s = math.inf
            for _ in range(_PINGS):
                sent = time.monotonic()
                self.channel.send(rank, AskClock())
                clock = self.channel.gather(Clock, [rank], next_event, attend)[rank]
                took_s = time.monotonic() - sent
                if took_s < best_s:
                    best_s, stats.clock_offset_s = took_s, sent + took_s / 2 - clock.now_s

    # Ending

    def at_close(self, free: Callable[[], None]) -> None:
        """Call this after Quit was sent: it frees what is loaded in this process."""
        self._at_close.callback(free)

    def close(self, exit_code: int = 0) -> None:
        """Have all other ranks exit with this code, and free what is loaded here. A second call does nothing."""
        if not self.is_open:
            return
        self.is_open = False
        self.channel.send_to_all(Quit(exit_code))
        self.transport.flush(_FLUSH_S)
        self._at_close.close()
        for inner in self._inner:
            inner.join()

    def __enter__(self) -> Head:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if not isinstance(error, SilentRankError):  # no rank can be waited for; the process ends as it is
            self.close(error.exit_code if isinstance(error, GgpipeError) else int(kind is not None))


class LoadedHead:
    """Everything is loaded: runs go in, results and draft tokens come out. Belongs to the main thread."""

    def __init__(
        self,
        head: Head,
        pipeline: Pipeline,
        drafters: Drafters,
        model_file: ModelFile,
        vocab: Vocab,
        limits: Limits,
        warnings: tuple[Wording, ...],
        *,
        exact_in_company: bool,
        restored: tuple[int, ...] | None,
        n_ranks: int,
    ) -> None:
        """`limits`: those of the target. `exact_in_company`: that of all the target's stages. `restored`: see
        `PrefixCache`. `n_ranks`: those that hold layers of the target.
        """
        self.head = head
        self.model_file = model_file
        self.vocab = vocab
        self.limits = limits
        self.warnings = warnings
        self.exact_in_company = exact_in_company
        self.restored = restored
        self.n_ranks = n_ranks
        self.drafters = drafters
        self._pipeline = pipeline

    @property
    def can_speculate(self) -> bool:
        """There is a draft model, and the target can take its tokens back."""
        return self.drafters.has_model

    def possible(self, speculation: SpeculationConfig, forces: bool = False) -> SpeculationConfig:
        """That, or what is nearest to it here. `forces`: as for `Drafters.chosen`."""
        if not self.drafters.chosen(speculation, forces):
            speculation = replace(speculation, mode="iterative")
        is_alone = self.head.config.context.exact and not self.exact_in_company  # branches are company
        if is_alone or not self.limits.rolls_back:
            speculation = speculation.as_chain
        return speculation

    # Sending

    def submit(self, run: Run) -> None:
        """Put a run into the target's pipeline."""
        self._pipeline.submit(run)

    def cancel(self, cancelled: CancelRuns) -> None:
        """Cancel these runs and drop these rows, because their results are not needed any more."""
        self._pipeline.cancel(cancelled)

    def fetch(self, request: int, run: int, row: int) -> None:
        """Have the last rank send a whole row that it kept, for a request."""
        self._pipeline.fetch(request, run, row)

    # Receiving

    def next(self, wake_at: float | None = None) -> HeadEvent:
        """Wait for something to happen, at most a tick, and not beyond `wake_at` (`time.monotonic`).

        Raises what another rank, or a stage of ours, failed with.
        """
        wait_s = _TICK_S if wake_at is None else max(wake_at - time.monotonic(), 0.0)
        match self.head.next(wait_s):
            case Received() as received:
                return received
            case Message(_, Kind.STATES, payload):  # for a draft head inside this process
                self._pipeline.send_inputs(payload)
            case Message() as message:
                return self._read(message)
            case ResultReady(result):
                return result
            case Fetched() as fetched:
                return fetched
            case GrammarReady() as ready:
                return ready
            case Saved(request, problem, n_bytes):
                return Received(HEAD, PrefixSaved(request, problem, n_bytes))
            case Passed() | InputsReady() as outcome:
                self._pipeline.deliver(outcome)
        return None

    @staticmethod
    def _read(message: Message) -> RunResult | Fetched | DraftUpdate | PartSpan:
        match message.kind:
            case Kind.RESULT:
                return codec.read_result(message.payload)
            case Kind.FETCHED:
                return Fetched(*codec.read_fetched(message.payload))
            case Kind.MICRO_BATCH:
                return DraftUpdate(*draft_codec.read_micro_batch(message.payload))
            case Kind.PART_SPAN:
                return PartSpan(*codec.read_part_span(message.payload))
        raise RunError(f"rank {message.source} sent {message.kind.name} to the head: use one ggpipe everywhere")

    def close(self) -> None:
        """Free our own stage and the vocabulary."""
        self._pipeline.close()
        self.vocab.close()
