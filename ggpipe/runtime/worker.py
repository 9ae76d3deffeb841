"""Every rank but the head: one stage, fed by the rank before it."""

from __future__ import annotations

import gc
import time
from typing import Any

from ggpipe.config import EngineConfig
from ggpipe.core.layout import Layout
from ggpipe.engine import machine
from ggpipe.engine.model_file import ModelFile
from ggpipe.errors import GgpipeError
from ggpipe.runtime import startup
from ggpipe.runtime.inbox import Inbox
from ggpipe.runtime.runner import Broke, Ended, Loaded, Loading, Notice, Outcome, Passed, Runner
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
        self._runner: Runner | None = None
        self._next: int | None = None
        self._done = False
        self.exit_code = 0

    def serve(self) -> int:
        """Returns the exit code that the head gave."""
        try:
            self._model_file = ModelFile.open(self._config.model.path)
            self._tell("hello", **startup.hello(self._transport, self._model_file))
        except GgpipeError as e:
            self._fail(e)
        while not self._done:
            try:
                event = self._inbox.next(timeout_s=3600)
                if isinstance(event, Message):
                    self._on_message(event)
                elif event is not None:
                    self._on_notice(event)
            except GgpipeError as e:
                self._fail(e)
        if self._runner is not None:
            self._runner.close()
        return self.exit_code

    def _on_message(self, message: Message) -> None:
        if message.kind is Kind.CANCEL and self._runner is not None:
            self._runner.cancel(codec.read_ids(message.payload))
        elif message.kind is Kind.CONTROL:
            self._on_control(codec.read_control(message.payload))

    def _on_control(self, content: dict[str, Any]) -> None:
        match content["kind"]:
            case "load":
                assert self._model_file is not None
                layout = Layout(tuple((a, b) for a, b in content["layers"]))
                self._next = layout.next_of(self._transport.rank)
                layers = layout.layers[self._transport.rank]
                load = startup.stage_loader(self._config, self._transport, self._model_file, layers)
                deliver = self._deliver if self._transport.sends_from_any_thread else self._inbox.put
                pump = self._inbox.pump if self._transport.must_poll else None
                self._runner = Runner(self._transport.rank, load, self._inbox.put, deliver, pump)
                self._inbox.take_run = self._take_run
                self._inbox.relieved = self._runner.relief_s
            case "stats":
                cpu_s, resident_bytes = time.process_time(), machine.resident_bytes()
                self._tell("stats", rank=self._transport.rank, cpu_s=cpu_s, resident_bytes=resident_bytes)
            case "quit":
                self.exit_code = content["code"]
                self._done = True

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
                    threads=startup.threads_of(self._config, self._transport),
                    resident_bytes=machine.resident_bytes(),
                    wanted=stage.cut.wanted,
                    produced=stage.cut.produced,
                    n_ctx=stage.n_ctx,
                )
            case Passed() | Ended():
                self._deliver(notice)
            case Broke(error):
                self._fail(error)

    def _take_run(self, message: Message) -> None:
        assert self._runner is not None
        self._runner.submit_message(message.payload)

    def _deliver(self, outcome: Outcome) -> None:
        """Send on what came of a run; from the stage's thread where the transport allows."""
        if isinstance(outcome, Ended):
            self._transport.send(_HEAD, Kind.RESULT, codec.result_message(outcome.result))
        else:
            assert self._next is not None
            self._transport.send(self._next, Kind.RUN, outcome.message)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._transport.send(_HEAD, Kind.CONTROL, codec.control_message(kind, **fields))

    def _fail(self, error: GgpipeError) -> None:
        self._tell("failed", **startup.failure(self._transport, error))
