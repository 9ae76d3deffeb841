"""Errors as answers: OpenAI's error object with llama-server's types, or Anthropic's."""

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
"""nginx's status for a client that disconnected; never sent."""

_HEADERS = {
    401: {"WWW-Authenticate": "Bearer"},
    408: {"Connection": "close"},  # the rest of the body is not read
    503: {"Retry-After": str(RETRY_AFTER_S)},
}
_NAMES = {**BODY_NAMES, "n_ctx": "--ctx-size", "slot_save_path": "--slot-save-path"}
"""Names of settings in clients' terms."""


class ApiError(Exception):
    """A request that gets an error instead of an answer."""

    def __init__(self, status: int, message: str, param: str | None = None) -> None:
        """`param`: the wrong field of the body, such as `messages[0].content`."""
        super().__init__(message)
        self._further: dict[str, Any] = {}
        """Further fields of the error object."""
        self._anthropic_message = message
        self.status = status
        self.message = message
        self.param = param

    @property
    def body(self) -> dict[str, Any]:
        """The error in OpenAI's API."""
        error = {"code": self.status, "message": self.message, "type": self._type(_TYPES, "server_error")}
        return {"error": {**error, "param": self.param, **self._further}}

    @property
    def anthropic_body(self) -> dict[str, Any]:
        """The error in Anthropic's API."""
        kind = self._type(_ANTHROPIC_TYPES, "api_error")
        return {"type": "error", "error": {"type": kind, "message": self._anthropic_message}}

    def _type(self, types: Mapping[int, str], of_server: str) -> str:
        return types.get(self.status, "invalid_request_error" if self.status < 500 else of_server)

    def response(self, path: str = "") -> JsonResponse:
        """The answer, in the form of the API at `path`. Says when to try again, if that may help."""
        headers = _HEADERS.get(self.status)
        body = self.anthropic_body if path.startswith(_ANTHROPIC_PATH) else self.body
        return JsonResponse(body, self.status, headers)

    @staticmethod
    def too_long(n_ctx: int, n_prompt: int | None = None) -> ApiError:
        """For a prompt that leaves no room for output. `n_prompt`: its tokens; None: they were not counted.

        Clients that shorten conversations recognize it by llama-server's type and by phrases of the messages.
        """
        length = f"{'too many' if n_prompt is None else n_prompt} tokens"
        error = ApiError(
            400,
            f"the request exceeds the available context size: the prompt has {length}, and this model's maximum "
            f"context length is {n_ctx} tokens; shorten it, or start the server with a larger `--ctx-size`",
        )
        error._anthropic_message = f"prompt is too long: {length} > {n_ctx} maximum (the server's context)"
        counted = {} if n_prompt is None else {"n_prompt_tokens": n_prompt}
        error._further = {"type": "exceed_context_size_error", **counted, "n_ctx": n_ctx}
        return error

    @staticmethod
    def of(error: GgpipeError) -> ApiError:
        """The answer to an error of the engine, with settings named as in bodies."""
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
