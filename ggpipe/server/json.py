"""JSON as it is sent."""

from __future__ import annotations

import math
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


def rate(n: int, seconds: float) -> float:
    """So many a second; 0 where that is no number."""
    found = n / seconds if seconds > 0 else 0.0
    return found if math.isfinite(found) else 0.0
