"""The head's lines: to the other ranks, to its own stages, to a draft inside its process."""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ggpipe.config import EngineConfig
from ggpipe.core.events import Limits
from ggpipe.core.layout import Layout
from ggpipe.core.messages import Begin, MicroBatch, Run, RunRecord, RunResult, Steering
from ggpipe.engine.model_file import ModelFile
from ggpipe.errors import RunError, Terminated
from ggpipe.runtime import startup
from ggpipe.runtime.drafter import DraftHead
from ggpipe.runtime.inbox import Inbox
from ggpipe.runtime.pipe import Pipe
from ggpipe.runtime.runner import Broke, Ended, Notice, Passed, Runner
from ggpipe.runtime.stats import RankStats
from ggpipe.transport import codec
from ggpipe.transport.base import Kind, Message, Transport

_TICK_S = 0.1  # how often a wait looks whether the user wants to stop


@dataclass(frozen=True, slots=True)
class FromDraft:
    """A notice of the draft's stage inside this process."""

    notice: Notice


@dataclass(frozen=True, slots=True)
class DraftNews:
    """Guesses, and the draft's runs that ended since the last ones."""

    batch: MicroBatch
    records: tuple[RunRecord, ...]


News = RunResult | DraftNews | dict[str, Any] | Notice | FromDraft | None
"""What `next` brings; a dict is a control message."""


class Hub:
    """What the head hears and says. All methods but `terminate` belong to the main thread."""

    def __init__(self, transport: Transport, config: EngineConfig) -> None:
        self.transport = transport
        self.config = config
        self.draft_inside = config.draft is not None and config.n_draft_ranks == 0
        n_target = transport.size - config.n_draft_ranks
        self.ranks = [RankStats(rank, rank >= n_target) for rank in range(transport.size)]
        if self.draft_inside:
            self.ranks.append(RankStats(0, True))
        self.pipe: Pipe | None = None
        self.draft_pipe: Pipe | None = None
        self.meaningless: tuple[int, ...] = ()
        """Tokens that only the draft's vocabulary has."""
        self._draft_head: DraftHead | None = None
        self._inbox: Inbox[Notice | FromDraft] = Inbox(transport)
        self._news: collections.deque[DraftNews] = collections.deque()
        self._terminate = False

    def open_pipe(self, layout: Layout, model_file: ModelFile) -> None:
        """Be the head of the target's pipeline; our own stage, if we have one, begins to load."""
        self.pipe = Pipe(self.transport, layout, 0, self._inbox.put)
        if layout.stages[0] == 0:
            load = startup.stage_loader(self.config, self.transport, model_file, layout.layers_of(0), False)
            deliver = self._deliver if self.transport.sends_from_any_thread else self._inbox.put
            runner = Runner(0, load, self._inbox.put, deliver, look_s=startup.look_s(self.config))
            self.pipe.runner = runner
            self._inbox.relieved = runner.relief_s

    def open_draft_pipe(self, layout: Layout, model_file: ModelFile | None) -> None:
        """Know the draft's pipeline. With a file it is in this process, and its stage begins to load."""
        self.draft_pipe = Pipe(self.transport, layout, layout.head, self._put_from_draft)
        if model_file is not None:
            load = startup.stage_loader(self.config, self.transport, model_file, layout.layers_of(0), True)
            self.draft_pipe.runner = Runner(0, load, self._put_from_draft, self._put_from_draft)

    def start_draft(self, limits: dict[str, int]) -> None:
        """All is loaded: the draft may be steered."""
        assert self.draft_pipe is not None
        if self.draft_inside:
            self._draft_head = DraftHead(self.draft_pipe, Limits(**limits), self._queue)
        else:
            self.tell(self.draft_pipe.layout.head, "draft", limits=limits)

    # Saying

    def tell(self, rank: int, kind: str, **fields: Any) -> None:
        """A control message to one rank."""
        self.transport.send(rank, Kind.CONTROL, codec.control_message(kind, **fields))

    def tell_all(self, kind: str, **fields: Any) -> None:
        """A control message to all other ranks."""
        for rank in range(1, self.transport.size):
            self.tell(rank, kind, **fields)

    def submit(self, run: Run) -> None:
        """Put a run into the target's pipeline."""
        assert self.pipe is not None
        self.pipe.submit(run)

    def cancel(self, runs: tuple[int, ...]) -> None:
        """Nobody needs these runs."""
        assert self.pipe is not None
        self.pipe.cancel(runs)

    def steer(self, message: Steering) -> None:
        """Tell the draft."""
        if isinstance(message, Begin):
            message = replace(message, banned=(*message.banned, *self.meaningless))
        if self._draft_head is not None:
            self._draft_head.handle(message)
        else:
            assert self.draft_pipe is not None
            self.transport.send(self.draft_pipe.layout.head, Kind.STEER, codec.steering_message(message))

    def _deliver(self, outcome: Passed | Ended) -> None:
        assert self.pipe is not None
        self.pipe.deliver(outcome)
        if isinstance(outcome, Passed):
            self._inbox.wake()  # from now on an answer may come

    def _put_from_draft(self, notice: Notice) -> None:
        self._inbox.put(FromDraft(notice))

    def _queue(self, batch: MicroBatch, records: Sequence[RunRecord]) -> None:
        self._news.append(DraftNews(batch, tuple(records)))

    # Hearing

    def terminate(self) -> None:
        """Give up waiting for anything. From any thread or a signal handler."""
        self._terminate = True

    def next(self, wake_at: float | None = None) -> News:
        """Wait for something to happen, at most a tick, and not beyond `wake_at` (`time.monotonic`).

        Raises what another rank, or a stage of ours, failed with.
        """
        if self._terminate:
            raise Terminated("terminated from outside, or because another rank is gone")
        if self._news:
            return self._news.popleft()
        wait_s = self._draft_head.wait_s() if self._draft_head is not None else None
        waits_s = [_TICK_S, *(w for w in (wait_s,) if w is not None)]
        if wake_at is not None:
            waits_s.append(max(wake_at - time.monotonic(), 0.0))
        event = self._inbox.next(min(waits_s))
        match event:
            case Message():
                return self._read(event)
            case Ended(result):
                return result
            case Passed():
                self._deliver(event)
                return None
            case Broke(error) | FromDraft(Broke(error)):
                raise error
            case FromDraft(Ended(result)) if self._draft_head is not None:
                self._draft_head.ended(result)
                return self._news.popleft() if self._news else None
            case None if self._draft_head is not None:
                self._draft_head.tick()
        return event

    def _read(self, message: Message) -> News:
        match message.kind:
            case Kind.RESULT:
                return codec.read_result(message.payload)
            case Kind.GUESS:
                return DraftNews(*codec.read_guesses(message.payload))
            case Kind.CONTROL:
                content = codec.read_control(message.payload)
                if content["kind"] == "failed":
                    raise startup.as_error(content)
                return content
        raise RunError(f"rank {message.source} sent the head a message that is not for it")

    def gather(
        self, kind: str, attend: Callable[[News], None], timeout_s: float | None = None
    ) -> dict[int, dict[str, Any]]:
        """One control message of this kind from every other rank; those that came, after a timeout.

        What else comes meanwhile goes to `attend`.
        """
        got: dict[int, dict[str, Any]] = {}
        deadline = None if timeout_s is None else time.monotonic() + timeout_s
        while len(got) < self.transport.size - 1 and (deadline is None or time.monotonic() < deadline):
            event = self.next()
            if isinstance(event, dict) and event["kind"] == kind:
                got[event["rank"]] = event
            else:
                attend(event)
        return got

    def close(self) -> None:
        """Let our own stages go."""
        for pipe in (self.pipe, self.draft_pipe):
            if pipe is not None and pipe.runner is not None:
                pipe.runner.close()
