"""Every rank but the head: one stage, fed by the rank before it; on the first draft rank the draft's head as well."""

from __future__ import annotations

import gc
import time
from collections.abc import Sequence
from typing import Any

from ggpipe.config import EngineConfig
from ggpipe.core.events import Limits
from ggpipe.core.layout import Layout
from ggpipe.core.messages import MicroBatch, RunRecord
from ggpipe.engine import machine
from ggpipe.engine.model_file import ModelFile
from ggpipe.engine.vocab import Vocab
from ggpipe.errors import GgpipeError
from ggpipe.runtime import startup
from ggpipe.runtime.drafter import DraftHead
from ggpipe.runtime.inbox import Inbox
from ggpipe.runtime.pipe import Pipe
from ggpipe.runtime.runner import Broke, Ended, Loaded, Loading, Notice, Passed, Runner
from ggpipe.transport import codec
from ggpipe.transport.base import Kind, Message, Transport

_HEAD = 0


class Worker:
    """Serves until the head says quit."""

    def __init__(self, transport: Transport, config: EngineConfig) -> None:
        self._transport = transport
        self._config = config
        self._inbox: Inbox[Notice] = Inbox(transport)
        self._model_file: ModelFile | None = None
        self._draft = startup.is_draft(config, transport)
        self._pipe: Pipe | None = None
        self._draft_head: DraftHead | None = None
        self._done = False
        self.exit_code = 0

    def serve(self) -> int:
        """Returns the exit code that the head gave."""
        try:
            model = self._config.draft.model if self._draft and self._config.draft else self._config.model
            self._model_file = ModelFile.open(model.path)
            self._tell("hello", **startup.hello(self._transport, self._model_file, self._draft))
        except GgpipeError as e:
            self._fail(e)
        while not self._done:
            try:
                wait_s = self._draft_head.wait_s() if self._draft_head else None
                event = self._inbox.next(3600 if wait_s is None else wait_s)
                if isinstance(event, Message):
                    self._on_message(event)
                elif event is not None:
                    self._on_notice(event)
                elif self._draft_head is not None:
                    self._draft_head.tick()
            except GgpipeError as e:
                self._fail(e)
        if self._pipe is not None and self._pipe.runner is not None:
            self._pipe.runner.close()
        return self.exit_code

    def _on_message(self, message: Message) -> None:
        match message.kind:
            case Kind.CANCEL if self._pipe is not None and self._pipe.runner is not None:
                self._pipe.runner.cancel(codec.read_ids(message.payload))
            case Kind.CONTROL:
                self._on_control(codec.read_control(message.payload))
            case Kind.STEER if self._draft_head is not None:
                self._draft_head.handle(codec.read_steering(message.payload))
            case Kind.RESULT if self._draft_head is not None:
                self._draft_head.ended(codec.read_result(message.payload))

    def _on_control(self, content: dict[str, Any]) -> None:
        match content["kind"]:
            case "load":
                self._load(Layout(tuple((a, b) for a, b in content["layers"]), content["head"]))
            case "draft":
                assert self._pipe is not None
                self._draft_head = DraftHead(self._pipe, Limits(**content["limits"]), self._send_guesses)
            case "clock":
                self._tell("clock", rank=self._transport.rank, now=time.monotonic())
            case "stats":
                cpu_s, resident_bytes = time.process_time(), machine.resident_bytes()
                self._tell("stats", rank=self._transport.rank, cpu_s=cpu_s, resident_bytes=resident_bytes)
            case "quit":
                self.exit_code = content["code"]
                self._done = True

    def _load(self, layout: Layout) -> None:
        assert self._model_file is not None
        rank = self._transport.rank
        self._pipe = Pipe(self._transport, layout, rank, self._ended)
        heads = self._draft and rank == layout.head
        if heads:
            assert self._config.draft is not None
            vocab = Vocab(self._model_file, self._config.draft.model)
            self._tell("vocab", **vocab.outline())
            vocab.close()
        if rank not in layout.stages:  # the draft's head, when it only coordinates
            return
        load = startup.stage_loader(
            self._config, self._transport, self._model_file, layout.layers_of(rank), self._draft
        )
        deliver = self._pipe.deliver if self._transport.sends_from_any_thread else self._inbox.put
        pump = self._inbox.pump if self._transport.must_poll and not heads else None
        look_s = startup.look_s(self._config)
        runner = Runner(rank, load, self._inbox.put, deliver, pump, look_s)
        self._pipe.runner = runner
        self._inbox.take_run = self._take_run
        self._inbox.relieved = runner.relief_s

    def _on_notice(self, notice: Notice) -> None:
        match notice:
            case Loading(done, total):
                self._tell("loading", rank=self._transport.rank, done=done, all=total)
            case Loaded(stage, load_s):
                gc.freeze()  # what is there now stays: the collector need not look at it again
                self._tell(
                    "loaded",
                    rank=self._transport.rank,
                    load_s=load_s,
                    threads=startup.threads_of(self._config, self._transport, self._draft),
                    resident_bytes=machine.resident_bytes(),
                    wanted=stage.cut.wanted,
                    produced=stage.cut.produced,
                    n_ctx=stage.n_ctx,
                )
            case Ended(result) if self._draft_head is not None:
                self._draft_head.ended(result)
            case Passed() | Ended():
                assert self._pipe is not None
                self._pipe.deliver(notice)
            case Broke(error):
                self._fail(error)

    def _take_run(self, message: Message) -> None:
        assert self._pipe is not None
        assert self._pipe.runner is not None
        self._pipe.runner.submit_message(message.payload)

    def _ended(self, outcome: Ended) -> None:
        """A run is through, in the last stage; called in the stage's thread where the transport allows."""
        assert self._pipe is not None
        head = self._pipe.layout.head
        if head == self._transport.rank:
            self._inbox.put(outcome)
        else:
            self._transport.send(head, Kind.RESULT, codec.result_message(outcome.result))

    def _send_guesses(self, batch: MicroBatch, records: Sequence[RunRecord]) -> None:
        self._transport.send(_HEAD, Kind.GUESS, codec.guess_message(batch, records))

    def _tell(self, kind: str, **fields: Any) -> None:
        self._transport.send(_HEAD, Kind.CONTROL, codec.control_message(kind, **fields))

    def _fail(self, error: GgpipeError) -> None:
        self._tell("failed", **startup.failure(self._transport, error))
