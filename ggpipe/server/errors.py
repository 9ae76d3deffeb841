"""What clients get instead of an answer: OpenAI's error object, with llama-server's types, or Anthropic's."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ggpipe.apis.bodies import BODY_NAMES
from ggpipe.errors import BodyError, GgpipeError, PromptTooLong, QueueFull, SettingError, UsageError
from ggpipe.server.json import JsonResponse

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    501: "not_supported_error",
    503: "unavailable_error",
}
_ANTHROPIC_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    408: "timeout_error",
    413: "request_too_large",
    503: "overloaded_error",
}
_ANTHROPIC_PATH = "/v1/messages"
RETRY_AFTER_S = 5
CLIENT_LEFT = 499
"""As nginx notes it; nobody reads this answer."""

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},  # the rest of the body is not waited for
    503: {"Retry-After": str(RETRY_AFTER_S)},
}
_NAMES = {**BODY_NAMES, "n_ctx": "--ctx-size", "slot_save_path": "--slot-save-path"}
"""What clients read instead of a setting's name."""


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
        error = {"code": self.status, "message": self.message, "type": self._type(_TYPES, "server_error")}
        return {"error": {**error, "param": self.param}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """As JSON of Anthropic's API."""
        kind = self._type(_ANTHROPIC_TYPES, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self.message}}

    def _type(self, types: Mapping[int, str], of_server: str) -> str:
        return types.get(self.status, "invalid_request_error" if self.status < 500 else of_server)

    def response(self, path: str = "") -> JsonResponse:
        """As an answer in the form of the API at `path`. One that may be taken later says when."""
        headers = _HEADERS.get(self.status)
        body = self.anthropic_body if path.startswith(_ANTHROPIC_PATH) else self.body
        return JsonResponse(body, self.status, headers)

    @staticmethod
    def too_long(n_ctx: int, n_prompt: int | None = None) -> ApiError:
        """A prompt that leaves no room for an answer. `n_prompt`: its tokens, None where they were not counted."""
        return _TooLong(n_ctx, n_prompt)

    @staticmethod
    def of(error: GgpipeError) -> ApiError:
        """An error of the engine, in the words of bodies."""
        if isinstance(error, BodyError):
            return ApiError(400, str(error), error.param)
        if isinstance(error, PromptTooLong):
            return ApiError.too_long(error.n_ctx, error.n_prompt)
        error = error.renamed(_NAMES)
        message = str(error)
        if isinstance(error, QueueFull):
            return ApiError(503, message)
        if isinstance(error, UsageError):
            return ApiError(400, message, error.field if isinstance(error, SettingError) else None)
        return ApiError(503, message)


class _TooLong(ApiError):
    """Clients that shorten their conversations know it by llama-server's type and by words of these messages."""

    def __init__(self, n_ctx: int, n_prompt: int | None) -> None:
        self._numbers = {} if n_prompt is None else {"n_prompt_tokens": n_prompt}
        self._numbers["n_ctx"] = n_ctx
        self._length = f"{'too many' if n_prompt is None else n_prompt} tokens"
        super().__init__(
            400,
            f"the request exceeds the available context size: the prompt has {self._length}, and this model's maximum "
            f"context length is {n_ctx} tokens; shorten it, or start the server with a larger `--ctx-size`",
        )

    @property
    def body(self) -> dict[str, Any]:
        error = {**super().body["error"], "type": "exceed_context_size_error", **self._numbers}
        return {"error": error}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        message = f"prompt is too long: {self._length} > {self._numbers['n_ctx']} maximum (the server's context)"
        return {"type": "error", "error": {"type": "invalid_request_error", "message": message}}
