"""A channel between a front end and a head in this process."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from ggpipe.channel import messages
from ggpipe.channel.front_end import FrontEnd
from ggpipe.channel.link import ChannelLink
from ggpipe.channel.messages import FromFrontEnd, FromHead
from ggpipe.channel.remote import RemoteRanks
from ggpipe.config.context import ContextConfig
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.engine.head import Head
from ggpipe.engine.served import serve
from ggpipe.errors import RunError
from ggpipe.transport.local import LocalWorld
from support.commands import HANG_S, TARGET

CONTEXT = ContextConfig(n_ctx=4096, n_seq=4)
CONFIG = EngineConfig(ModelConfig(path=TARGET), CONTEXT, PipelineConfig(threads=(1,)), n_requests=4)


@dataclass
class Connected:
    """Both ends of a channel."""

    front_end: ChannelLink[FromHead]
    head: ChannelLink[FromFrontEnd]
    lines: list[str] = field(default_factory=list)

    def ranks(self, **settings: Any) -> RemoteRanks:
        """The front end's side, once the head is ready."""
        return RemoteRanks(self.front_end, lambda line: self.lines.append(str(line)), **settings)


@contextlib.contextmanager
def channel() -> Iterator[Connected]:
    """A channel over a socket."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        one = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    ends = Connected(ChannelLink(one, messages.from_head), ChannelLink(other, messages.from_front_end))
    yield ends
    ends.front_end.close()
    ends.head.close()


@contextlib.contextmanager
def served(connected: Connected, config: EngineConfig = CONFIG) -> Iterator[RemoteRanks]:
    """Ranks with one in this process, whose head is served in a thread."""
    failures: list[BaseException] = []

    def run() -> None:
        front_end = FrontEnd(connected.head, "rank 0 (here)")
        try:
            with Head(LocalWorld(1).transports[0], config) as head:
                front_end.follow(head.stop, head.channel.inbox.call, lambda: None)
                serve(front_end, head)
        except RunError as e:
            front_end.report(e)
        except BaseException as e:
            failures.append(e)
        front_end.close()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        with contextlib.closing(connected.ranks()) as ranks:
            yield ranks
    finally:
        connected.front_end.close()
        thread.join(HANG_S)
        assert not thread.is_alive()
        assert failures == []
