"""JSON for clients."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_ENCODER = msgspec.json.Encoder()


def dumps(value: Any) -> bytes:
    """JSON of Python's types and msgspec's structs. Infinity and NaN become null."""
    return _ENCODER.encode(value)


class JsonResponse(Response):
    """A JSON response."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)
