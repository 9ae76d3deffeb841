"""A worker's side of the control channel: its errors go to the head, and only Quit ends it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from support.commands import HANG_S, TARGET

from ggpipe.config.context import ContextConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.core.layout import Layout
from ggpipe.engine.control_channel import ControlChannel, Received
from ggpipe.engine.worker import Worker
from ggpipe.errors import ModelError, RankError
from ggpipe.transport.base import Kind
from ggpipe.transport.control import AskClock, AskUsage, Clock, Quit, Usage
from ggpipe.transport.loading_messages import ControlMessage, Hello, LoadLayers, StageLoaded
from ggpipe.transport.local import LocalWorld
from ggpipe.transport.profile_messages import EndProfile


class HeadOfOne:
    """The test's end of the channel to one worker."""

    def __init__(self, model: Path) -> None:
        here, there = LocalWorld(2).transports
        config = EngineConfig(
            model=ModelConfig(path=model), context=ContextConfig(n_ctx=256), pipeline=PipelineConfig(threads=(1,))
        )
        self.channel: ControlChannel[None] = ControlChannel(here)
        self.exit_codes: list[int] = []
        worker = Worker(there, config)
        self.thread = threading.Thread(target=lambda: self.exit_codes.append(worker.serve()), daemon=True)
        self.thread.start()

    def until(self, kind: type[ControlMessage]) -> ControlMessage:
        """The next message of this kind; the others are dropped."""
        while not isinstance(message := self.channel.receive().message, kind):
            pass
        return message

    def quit(self, exit_code: int) -> None:
        self.channel.send(1, Quit(exit_code))
        self.thread.join(HANG_S)
        assert not self.thread.is_alive()
        assert self.exit_codes == [exit_code]


@contextmanager
def loaded() -> Iterator[HeadOfOne]:
    """A worker that holds the last two layers of the bundled target."""
    head = HeadOfOne(TARGET)
    hello = head.until(Hello)
    assert isinstance(hello, Hello)
    head.channel.send(1, LoadLayers(Layout.of_ranks(((0, hello.n_layer - 2), (hello.n_layer - 2, hello.n_layer)))))
    assert isinstance(head.until(StageLoaded), StageLoaded)
    yield head
    head.quit(0)


def test_a_worker_leaves_before_it_has_loaded() -> None:
    head = HeadOfOne(TARGET)
    assert isinstance(head.channel.receive(), Received)
    head.quit(7)


def test_a_missing_model_is_the_heads_error(tmp_path: Path) -> None:
    head = HeadOfOne(tmp_path / "no.gguf")
    with pytest.raises(ModelError, match="copy it there, or add"):
        head.channel.receive()
    head.quit(2)


def test_a_load_for_a_worker_that_failed_is_not_obeyed(tmp_path: Path) -> None:
    head = HeadOfOne(tmp_path / "no.gguf")
    with pytest.raises(ModelError):
        head.channel.receive()
    head.channel.send(1, LoadLayers(Layout.of_ranks(((0, 1), (1, 2)))))
    head.quit(2)


def test_another_order_than_load_is_refused() -> None:
    head = HeadOfOne(TARGET)
    head.until(Hello)
    head.channel.send(1, EndProfile())
    with pytest.raises(RankError, match="sent EndProfile instead of Load: use one ggpipe everywhere"):
        head.channel.receive()
    head.quit(1)


@pytest.mark.parametrize("payload", [b"", b'{"kind": "load"}', b"\x03\x80"])
def test_messages_of_another_ggpipe_are_refused(payload: bytes) -> None:
    head = HeadOfOne(TARGET)
    head.until(Hello)
    head.channel.transport.send(1, Kind.CONTROL, payload)
    with pytest.raises(RankError, match="use one ggpipe everywhere"):
        head.channel.receive()
    head.quit(1)


def test_a_loaded_worker_answers_and_outlives_what_it_cannot_read() -> None:
    with loaded() as head:
        head.channel.send(1, AskClock())
        assert isinstance(head.channel.receive().message, Clock)
        head.channel.transport.send(1, Kind.CONTROL, b"{}")
        with pytest.raises(RankError, match="a control message of format 123 arrived"):
            head.channel.receive()
        head.channel.send(1, AskUsage())
        usage = head.channel.receive().message
        assert isinstance(usage, Usage)
        assert usage.resident_bytes > 0
