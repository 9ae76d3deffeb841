"""Settings of `ggpipe serve`: addresses, keys, endpoints and limits."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from ggpipe.config.checks import check_range
from ggpipe.errors import Setting, SettingError, Wording
from ggpipe.options.text_file import read_text

_CLIENT_LIMIT_S = 60.0
_MOST_WAITING = 900  # fewer than an engine's own queue can hold
_MORE_CONNECTIONS = 1000
_ORIGIN = re.compile(r"\*|localhost|null|[a-z][a-z0-9+.-]*://[^\s/?#@,]+", re.IGNORECASE)
_PREFIX = re.compile(r"(/[\w.~-]+)*", re.ASCII)
ALL_ORIGINS, LOCAL_ORIGINS = "*", "localhost"
LogFormat = Literal["text", "json"]
ReasoningOutput = Literal["auto", "deepseek", "deepseek-legacy", "none"]


@dataclass(frozen=True, kw_only=True)
class ServerConfig:
    """Settings of the HTTP server, with llama-server's names and defaults."""

    host: str = "127.0.0.1"
    """Addresses to listen on, separated by commas."""
    port: int = 8080
    """0: any free port."""
    alias: str | None = None
    """Names of the model in the API, separated by commas; the first in alphabetical order is its id. None: the name of
    its file."""
    tags: str | None = None
    """Words about the model, separated by commas, which the API returns."""
    api_key: str | None = None
    """API keys, separated by commas. Each request needs one of them."""
    api_key_file: Path | None = None
    """File with more keys, one per line."""
    ssl_key_file: Path | None = None
    ssl_cert_file: Path | None = None
    cors_origins: tuple[str, ...] | None = None
    """Origins whose web pages may use this server, such as https://example.org:8443; `localhost`: all of this machine;
    `*`: any. None: any if there are API keys, otherwise those of this machine."""
    static_path: Path | None = None
    """Folder of files to serve at `/` instead of the chat page."""
    webui: bool = True
    """Serve the chat page at `/`."""
    api_prefix: str = ""
    """Prefix of all paths, such as /llm."""
    timeout_s: float = 3600.0
    """How long a client may take to send a request, and how long running requests may continue when the server is
    stopped."""
    sse_ping_interval_s: float = 30.0
    """Idle time after which a stream sends a comment; -1: never."""
    n_slots: int = 4
    """Maximum number of requests served at once."""
    n_waiting: int = 256
    """Maximum length of the queue; further requests are refused."""
    n_branches: int = 1
    """Same as `SpeculationConfig.n_parallel`."""
    max_body_mib: int = 8
    """Maximum size of a request body."""
    log_file: Path | None = None
    """File to which to write the log, in addition to stderr."""
    log_format: LogFormat = "text"
    log_disable: bool = False
    """Log nothing to stderr."""
    slots: bool = True
    """Serve `GET /slots`."""
    keep_slots: bool = False
    """Save all slots when the server stops, and restore them when it starts."""
    metrics: bool = False
    """Serve `/metrics`."""
    reasoning_format: ReasoningOutput = "auto"
    """Whether reasoning is returned as `reasoning_content` or, with `none`, as part of the content."""

    def __post_init__(self) -> None:
        check_range("port", self.port, 0, 65535)
        if not self.hosts:
            raise SettingError("host", f"needs an address, got {self.host!r}")
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise SettingError("timeout_s", f"must be a positive number of seconds, got {self.timeout_s:g}")
        if self.sse_ping_interval_s != -1 and not 0 < self.sse_ping_interval_s < math.inf:
            raise SettingError(
                "sse_ping_interval_s",
                f"must be -1 (never) or a positive number of seconds, got {self.sse_ping_interval_s:g}",
            )
        check_range("n_waiting", self.n_waiting, 0, _MOST_WAITING)
        check_range("max_body_mib", self.max_body_mib, 1, 1024)
        for origin in self.cors_origins or ():
            if origin and not _ORIGIN.fullmatch(origin):
                raise SettingError(
                    "cors_origins",
                    origin,
                    "write origins without a path, such as https://example.org:8443, or localhost, or *",
                )
        if self.static_path is not None and not self.webui:
            raise SettingError("static_path", "replaces the chat page", Wording("omit ", Setting("webui")))
        if self.static_path is not None and not self.static_path.is_dir():
            raise SettingError("static_path", f"{self.static_path}: no such folder")
        if not _PREFIX.fullmatch(self.api_prefix):
            raise SettingError(
                "api_prefix", f"must look like /llm or /a/b, without a slash at the end, got {self.api_prefix!r}"
            )
        if (self.ssl_key_file is None) != (self.ssl_cert_file is None):
            raise SettingError(
                "ssl_key_file", Wording("and ", Setting("ssl_cert_file"), " belong together"), "give both, or neither"
            )

    @property
    def hosts(self) -> tuple[str, ...]:
        """The addresses to listen on."""
        return words_of(self.host)

    @property
    def aliases(self) -> tuple[str, ...]:
        """The model's names in alphabetical order, as in llama-server; empty: the name of its file."""
        return tuple(sorted(set(words_of(self.alias))))

    @property
    def client_limit_s(self) -> float:
        """How long a client may read nothing of its reply, and how long a connection may be without a request."""
        return min(self.timeout_s, _CLIENT_LIMIT_S)

    @property
    def n_connections(self) -> int:
        """Maximum number of connections: more than there can be requests."""
        return 2 * (self.n_slots + self.n_waiting) + _MORE_CONNECTIONS

    def origins(self, has_keys: bool) -> tuple[str, ...]:
        """The origins to allow, see `cors_origins`."""
        if self.cors_origins is None:
            return (ALL_ORIGINS if has_keys else LOCAL_ORIGINS,)
        return tuple(filter(None, self.cors_origins))

    def keys(self) -> tuple[str, ...]:
        """All API keys. If there are none, no request needs one. Raises SettingError for a file that has
        none, or cannot be read."""
        keys = [key.strip() for key in (self.api_key or "").split(",")]
        if self.api_key_file is not None:
            lines = read_text("api_key_file", self.api_key_file).splitlines()
            keys += [line.strip() for line in lines if not line.strip().startswith("#")]
        found = tuple(filter(None, keys))
        if not found and (self.api_key is not None or self.api_key_file is not None):
            raise SettingError("api_key" if self.api_key is not None else "api_key_file", "contains no key")
        return found


def words_of(text: str | None) -> tuple[str, ...]:
    """The words of a list with commas."""
    return tuple(filter(None, map(str.strip, (text or "").split(","))))
