"""What all endpoints share."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import msgspec
from starlette.requests import Request

from ggpipe.apis.decode import decode
from ggpipe.options.chat import ChatSettings
from ggpipe.options.server import ServerConfig
from ggpipe.options.settings import EmbeddingSettings
from ggpipe.server.backend import Backend
from ggpipe.server.receiving import BodyReader
from ggpipe.server.saved_slots import SavedSlots

B = TypeVar("B", bound=msgspec.Struct)


@dataclass(frozen=True, kw_only=True)
class Server:
    """See the module's text."""

    backend: Backend
    bodies: BodyReader
    config: ServerConfig
    chat: ChatSettings
    embeddings: EmbeddingSettings
    model: str
    """What clients call it."""
    path: str
    """Its file."""
    saved_slots: SavedSlots

    async def body(self, request: Request, kind: type[B]) -> B:
        """Raises ApiError while no requests are taken, and for a body that is none of this kind."""
        self.backend.check()
        return decode(kind, await self.bodies.read(request))
