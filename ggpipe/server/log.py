"""The log: a line per request and per other event, on stderr and in a file. Its failures never affect the server."""

from __future__ import annotations

import contextlib
import datetime
import io
import logging
import logging.handlers
import os
import sys
import time
import uuid
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, TextIO

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from ggpipe.errors import SettingError
from ggpipe.options.server import LogFormat, ServerConfig
from ggpipe.server.backend import Generation
from ggpipe.server.errors import CLIENT_LEFT
from ggpipe.server.json import dumps
from ggpipe.server.totals import Totals
from ggpipe.stats.records import RequestStats

_LOG = logging.getLogger("ggpipe.server")
_QUIET = ("/health", "/v1/health", "/metrics", "/live", "/")
_PAGE = "/page/"
"""Frequent requests are logged only if they were refused."""
_MOST_ID_CHARACTERS = 64
_OUTPUTS = "outputs"


def begin(config: ServerConfig) -> None:
    """Set up the log. Raises SettingError for a file that cannot be written."""
    handlers: list[logging.Handler] = []
    if not config.log_disable:
        handlers.append(_Stderr(sys.stderr))
        handlers[0].setFormatter(_Formatter(config.log_format, with_time=False))
    if config.log_file is not None:
        handlers.append(LogFile(config.log_file))
        handlers[-1].setFormatter(_Formatter(config.log_format, with_time=True))
    _LOG.handlers[:] = handlers
    _LOG.setLevel(logging.INFO)
    _LOG.propagate = False
    logging.getLogger("uvicorn").setLevel(logging.CRITICAL)


def say(line: str) -> None:
    """Log a line."""
    _LOG.info("%s", line)


def note_end(line: str) -> None:
    """Log why the server ends: only to the file, since the user sees the error anyway."""
    for handler in _LOG.handlers:
        if isinstance(handler, LogFile):
            handler.handle(_LOG.makeRecord(_LOG.name, logging.ERROR, "", 0, "%s", (line,), None))


class _Stderr(logging.StreamHandler[TextIO]):
    def handleError(self, record: logging.LogRecord) -> None:
        """Ignore it: stderr was closed."""


class _Formatter(logging.Formatter):
    """Lines as text, or as JSON objects."""

    def __init__(self, format: LogFormat, with_time: bool) -> None:
        super().__init__()
        self._is_json = format == "json"
        self._with_time = with_time

    def format(self, record: logging.LogRecord) -> str:
        at = datetime.datetime.fromtimestamp(record.created, datetime.UTC).isoformat(timespec="milliseconds")
        at = at.replace("+00:00", "Z")
        message = " ".join(record.getMessage().splitlines())
        if not self._is_json:
            return f"{at} {message}" if self._with_time else f"ggpipe: {message}"
        fields: Mapping[str, Any] | None = getattr(record, "fields", None)
        return dumps(
            {"time": at, "level": record.levelname.lower(), **({"message": message} if fields is None else fields)}
        ).decode()


class LogFile(logging.handlers.WatchedFileHandler):
    """The log file. It is reopened if it was moved away, so logrotate needs no signal. Lines that cannot be written are
    dropped, with one message on stderr."""

    def __init__(self, path: Path) -> None:
        """Raises SettingError."""
        self._fails = self._is_broken = False
        try:
            super().__init__(path)
        except OSError as e:
            raise SettingError("log_file", f"{path}: cannot write it: {e.strerror}") from e

    def _open(self) -> io.TextIOWrapper:
        raw = io.FileIO(self.baseFilename, "ab", opener=_opened)
        return io.TextIOWrapper(raw, "utf-8", "backslashreplace", write_through=True)

    def emit(self, record: logging.LogRecord) -> None:
        self._fails = False
        try:
            super().emit(record)
        except OSError:  # it cannot be reopened
            self.handleError(record)
        self._is_broken = self._fails

    def handleError(self, record: logging.LogRecord) -> None:
        self._fails = True
        if not self._is_broken:
            with contextlib.suppress(OSError):
                sys.stderr.write(f"ggpipe: {self.baseFilename}: lines are dropped: {sys.exception()}\n")


def _opened(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK, 0o640)


class RequestLog:
    """Gives each request an id, counts its response, and logs it when it has ended."""

    def __init__(self, app: ASGIApp, model: str, totals: Totals, paths: Collection[str]) -> None:
        """`model`: name of the model. `paths`: counted separately; all others together."""
        self._app = app
        self._model = model
        self._totals = totals
        self._paths = frozenset(paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, id = time.monotonic(), CLIENT_LEFT, _id_of(scope)

        async def sending(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message.get("headers", ()), (b"x-request-id", id.encode())]
            await send(message)

        try:
            await self._app(scope, receive, sending)
        except Exception:
            status = 500
            raise
        finally:
            path = scope["path"]
            self._totals.responses.labels(path if path in self._paths else "other", status).inc()
            is_usual = path in _QUIET or path.startswith(_PAGE)
            if not is_usual or status not in (200, 304, 503):
                self._note(scope, id, status, time.monotonic() - began)

    def _note(self, scope: Scope, id: str, status: int, seconds: float) -> None:
        client = scope.get("client")
        fields: dict[str, Any] = {
            "event": "request", "id": id, "method": scope["method"], "path": scope["path"], "status": status,
            "seconds": round(seconds, 3), "client": client[0] if client else None,
        }  # fmt: skip
        line = f"{id} {scope['method']} {scope['path']} {status}, {seconds:.3f} s"
        outputs: Sequence[RequestStats] | None = scope.get("state", {}).get(_OUTPUTS)
        if outputs is not None:
            own = _figures(outputs)
            fields.update({"model": self._model, **own})
            line += f", {_in_words(own)}"
        _LOG.info("%s", line, extra={"fields": fields})


def note_outputs(scope: Scope, generations: Sequence[Generation]) -> None:
    """Have the log line of the request describe these outputs."""
    scope.setdefault("state", {})[_OUTPUTS] = [generation.stats for generation in generations]


def _figures(outputs: Sequence[RequestStats]) -> dict[str, Any]:
    """Sums of counts and means of times. None: not measured."""

    def mean(of: Callable[[RequestStats], float | None]) -> float | None:
        found = [value for stats in outputs if (value := of(stats)) is not None]
        return round(sum(found) / len(found), 4) if found else None

    return {
        "prompt_tokens": sum(stats.n_prompt for stats in outputs),
        "cached_tokens": sum(stats.counters.cached_tokens for stats in outputs),
        "tokens": sum(stats.n_generated for stats in outputs),
        "draft_tokens": sum(stats.counters.submitted_tokens for stats in outputs),
        "accepted_tokens": sum(stats.counters.accepted_tokens for stats in outputs),
        "queued_s": mean(lambda stats: stats.queue_s),
        "ttft_s": mean(lambda stats: stats.ttft_s),
        "tokens_per_s": mean(lambda stats: stats.decode_tps),
        "finish": ", ".join(sorted({stats.finish.value if stats.finish else "cut off" for stats in outputs})),
    }


def _in_words(own: Mapping[str, Any]) -> str:
    parts = [f"{own['prompt_tokens']} prompt tokens ({own['cached_tokens']} cached)", f"{own['tokens']} tokens"]
    if own["draft_tokens"]:
        parts[-1] += f" ({own['accepted_tokens']} of {own['draft_tokens']} draft tokens accepted)"
    for name, words, unit in (("queued_s", "waited", "s"), ("ttft_s", "first token", "s"), ("tokens_per_s", "", "t/s")):
        if own[name] is not None:
            parts.append(f"{words} {own[name]:.3g} {unit}".strip())
    return ", ".join([*parts, own["finish"]])


def _id_of(scope: Scope) -> str:
    """The `X-Request-Id` of the client or a proxy if it is a plain word, or else a new id."""
    given = next((value for name, value in scope["headers"] if name == b"x-request-id"), b"").decode("latin-1")
    is_plain = given.isascii() and given.replace("-", "").replace("_", "").isalnum()
    return given if is_plain and len(given) <= _MOST_ID_CHARACTERS else uuid.uuid4().hex[:16]
