"""Settings of `ggpipe serve`: where it listens, whom it answers, and how long it waits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ggpipe.config.checks import check_choice, check_range
from ggpipe.errors import Setting, SettingError, Wording

_CLIENT_LIMIT_S = 60.0
_MOST_WAITING = 900  # fewer than wait for an engine at most
_MORE_CONNECTIONS = 1000
_ORIGIN = re.compile(r"\*|localhost|null|[a-z][a-z0-9+.-]*://[^\s/?#@,]+", re.IGNORECASE)
_PREFIX = re.compile(r"(/[\w.~-]+)*", re.ASCII)
ALL_ORIGINS, LOCAL_ORIGINS = "*", "localhost"
LogFormat = Literal["text", "json"]
ReasoningOutput = Literal["auto", "deepseek", "none"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """An HTTP server, with the names and defaults of llama-server."""

    host: str = "127.0.0.1"
    port: int = 8080
    """0: any that is free."""
    alias: str | None = None
    """What clients call the model; None: the name of its file."""
    api_key: str | None = None
    """Keys, separated by commas, one of which each request must have."""
    api_key_file: Path | None = None
    """More keys, one a line."""
    ssl_key_file: Path | None = None
    ssl_cert_file: Path | None = None
    cors_origins: tuple[str, ...] | None = None
    """Pages of other servers that may use this one, by their origin, as in https://example.org:8443; `localhost`: all
    of this machine; `*`: all. None: all where there are API keys, else those of this machine."""
    static_path: Path | None = None
    """Folder whose files are at `/`, instead of the page."""
    webui: bool = True
    """The page is at `/`."""
    api_prefix: str = ""
    """What all paths begin with, as in /llm."""
    jinja: bool = True
    """Chat templates are in the Jinja language: always so."""
    n_http_threads: int = -1
    """Not used: an event loop answers all clients."""
    timeout_s: float = 3600.0
    """How long a client may take to send a request, and how long running requests may go on when the server is to
    end."""
    sse_ping_interval_s: float = 30.0
    """Streams without news send a comment so often; -1: never."""
    n_slots: int = 4
    """Requests that are served at the same time."""
    n_waiting: int = 256
    """Requests that wait beyond those; further ones are refused."""
    n_branches: int = 1
    """Branches of draft tokens, as `SpeculationConfig.n_parallel`."""
    max_body_mib: int = 8
    """How large the body of a request may be."""
    log_file: Path | None = None
    """File that gets the log as well as stderr."""
    log_format: LogFormat = "text"
    log_disable: bool = False
    """Nothing is logged on stderr."""
    slots: bool = True
    """`GET /slots` is answered."""
    keep_slots: bool = False
    """All slots are saved when the server ends, and restored when it starts."""
    metrics: bool = False
    """`/metrics` is answered."""
    embeddings: bool = False
    """Not used: embeddings are answered beside texts."""
    reasoning_format: ReasoningOutput = "auto"
    """What the model thinks before it answers is `reasoning_content`, or with `none` a part of the content."""

    def __post_init__(self) -> None:
        check_range("port", self.port, 0, 65535)
        check_choice("log_format", self.log_format, get_args(LogFormat))
        check_choice("reasoning_format", self.reasoning_format, get_args(ReasoningOutput))
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise SettingError("timeout_s", f"must be a number of seconds above 0, got {self.timeout_s:g}")
        if self.sse_ping_interval_s != -1 and not 0 < self.sse_ping_interval_s < math.inf:
            raise SettingError(
                "sse_ping_interval_s",
                f"must be -1 (never) or a number of seconds above 0, got {self.sse_ping_interval_s:g}",
            )
        check_range("n_waiting", self.n_waiting, 0, _MOST_WAITING)
        check_range("max_body_mib", self.max_body_mib, 1, 1024)
        for origin in self.cors_origins or ():
            if origin and not _ORIGIN.fullmatch(origin):
                raise SettingError(
                    "cors_origins",
                    origin,
                    "write origins as in https://example.org:8443, without a path, or localhost, or *",
                )
        if self.static_path is not None and not self.webui:
            raise SettingError("static_path", "takes the place of the page", Wording("leave out ", Setting("webui")))
        if self.static_path is not None and not self.static_path.is_dir():
            raise SettingError("static_path", f"{self.static_path}: there is no such folder")
        if not _PREFIX.fullmatch(self.api_prefix):
            raise SettingError(
                "api_prefix", f"must be as in /llm or /a/b, without a slash at its end, got {self.api_prefix!r}"
            )
        if not self.jinja:
            raise SettingError("jinja", "cannot be off: all chat templates are read as Jinja")
        if (self.ssl_key_file is None) != (self.ssl_cert_file is None):
            raise SettingError(
                "ssl_key_file", Wording("and ", Setting("ssl_cert_file"), " belong together"), "give both, or none"
            )

    @property
    def client_limit_s(self) -> float:
        """How long a client may take none of its answer, and how long a connection stays without a request."""
        return min(self.timeout_s, _CLIENT_LIMIT_S)

    @property
    def n_connections(self) -> int:
        """Connections of clients, at most: more than requests that are served or wait."""
        return 2 * (self.n_slots + self.n_waiting) + _MORE_CONNECTIONS

    def origins(self, has_keys: bool) -> tuple[str, ...]:
        """As `cors_origins`."""
        if self.cors_origins is None:
            return (ALL_ORIGINS if has_keys else LOCAL_ORIGINS,)
        return tuple(filter(None, self.cors_origins))

    def keys(self) -> tuple[str, ...]:
        """All API keys; none: every request is answered. Raises SettingError for a file that cannot be read, or that
        has none."""
        keys = [key.strip() for key in (self.api_key or "").split(",")]
        if self.api_key_file is not None:
            try:
                lines = [line.strip() for line in self.api_key_file.read_text("utf-8").splitlines()]
            except (OSError, UnicodeError) as e:
                why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
                raise SettingError("api_key_file", f"{self.api_key_file}: cannot read the keys: {why}") from e
            keys += [line for line in lines if not line.startswith("#")]
        found = tuple(filter(None, keys))
        if not found and (self.api_key is not None or self.api_key_file is not None):
            raise SettingError("api_key" if self.api_key is not None else "api_key_file", "has no key")
        return found
