"""What clients get instead of an answer: OpenAI's error object, with llama-server's types."""

from __future__ import annotations

import re
from typing import Any

from ggpipe.errors import GgpipeError, QueueFull, SettingError, UsageError
from ggpipe.server.json import JsonResponse

_TYPES = {
    400: "invalid_request_error",
    401: "authentication_error",
    404: "not_found_error",
    405: "invalid_request_error",
    408: "invalid_request_error",
    413: "invalid_request_error",
    431: "invalid_request_error",
    500: "server_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
RETRY_AFTER_S = 5

BODY_NAMES = {"temp": "temperature", "n_ctx": "--ctx-size"}
"""What bodies of requests call a setting, where it has another name than in the library's messages."""


class ApiError(Exception):
    """A request that is not answered."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        """`param`: the field of the body that is wrong, `messages[0].content`."""
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """As JSON."""
        error = {"code": self.status, "message": self.message, "type": _TYPES.get(self.status, "server_error")}
        return {"error": {**error, "param": self.param}}

    def response(self) -> JsonResponse:
        """As an answer. One that may be taken later says when."""
        headers = {"Retry-After": str(RETRY_AFTER_S)} if self.status == 503 else None
        if self.status == 401:
            headers = {"WWW-Authenticate": "Bearer"}
        return JsonResponse(self.body, self.status, headers)

    @staticmethod
    def of(error: GgpipeError) -> ApiError:
        """An error of the engine, in the words of bodies."""
        message = re.sub(r"`([\w.]+)`", lambda found: f"`{BODY_NAMES.get(found[1], found[1])}`", str(error))
        if isinstance(error, QueueFull):
            return ApiError(503, message)
        if isinstance(error, UsageError):
            field = error.field if isinstance(error, SettingError) else ""
            return ApiError(400, message, BODY_NAMES.get(field, field) or None)
        return ApiError(503, message)
