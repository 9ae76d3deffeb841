"""What all endpoints use."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import msgspec
from starlette.requests import Request

from ggpipe._version import __version__
from ggpipe.api.engine_thread import EngineThread
from ggpipe.apis.decode import decode
from ggpipe.options.chat import ChatSettings
from ggpipe.options.server import ServerConfig
from ggpipe.options.settings import EmbeddingSettings
from ggpipe.server.backend import Backend
from ggpipe.server.receiving import BodyReader
from ggpipe.server.saved_slots import SavedSlots

B = TypeVar("B", bound=msgspec.Struct)

BUILD = f"b0-ggpipe-{__version__}"
"""Which server this is, in llama-server's form: `b`, the number of llama.cpp's build (0: unknown), and a name."""


@dataclass(frozen=True, kw_only=True)
class Serving:
    """What is served, and to whom."""

    config: ServerConfig
    chat: ChatSettings
    embeddings: EmbeddingSettings
    model: str
    """Name of the model for clients."""
    path: str
    """Path of the model's file."""
    keys: tuple[str, ...]
    """API keys; empty: none is needed."""
    make_backend: Callable[[EngineThread], Backend]
    """Called in the event loop."""
    slot_save_path: Path | None = None
    verbose: bool = False
    """Replies of OpenAI's API have llama-server's own reply as `__verbose`, unless a request says otherwise."""


@dataclass(frozen=True, kw_only=True)
class Server(Serving):
    """A running server, as its endpoints see it."""

    backend: Backend
    bodies: BodyReader
    saved_slots: SavedSlots

    async def body(self, request: Request, kind: type[B]) -> B:
        """The body of a request. Raises ApiError while requests are refused, and BodyError for a wrong body."""
        self.backend.check()
        return decode(kind, await self.bodies.read(request))
