"""JSON as it is sent."""

from __future__ import annotations

from typing import Any

import msgspec
from starlette.responses import Response

_ENCODER = msgspec.json.Encoder()


def dumps(value: Any) -> bytes:
    """Of Python's own types and msgspec's structs; numbers that JSON does not have become null."""
    return _ENCODER.encode(value)


class JsonResponse(Response):
    """An answer in JSON."""

    media_type = "application/json"

    def render(self, content: Any) -> bytes:
        return dumps(content)
