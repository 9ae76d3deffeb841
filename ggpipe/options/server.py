"""Settings of `ggpipe serve`: where it listens, whom it answers, and how long it waits."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ggpipe.checks import check_choice, check_range
from ggpipe.errors import SettingError, UsageError

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
    timeout_s: float = 3600.0
    """How long a client may take to send a request or to take a part of its answer, and how long running requests may
    go on when the server is to end."""
    sse_ping_interval_s: float = 30.0
    """Streams without news send a comment so often; -1: never."""
    n_slots: int = 4
    """Requests that are served at the same time."""
    n_waiting: int = 256
    """Requests that wait beyond those; further ones are refused."""
    n_branches: int = 1
    """Branches of draft tokens, as `SpeculationConfig.n_parallel`."""
    max_body_mib: int = 32
    """How large the body of a request may be."""
    metrics: bool = False
    """`/metrics` is answered."""
    reasoning_format: ReasoningOutput = "auto"
    """What the model thinks before it answers is `reasoning_content`, or with `none` a part of the content."""

    def __post_init__(self) -> None:
        check_range("port", self.port, 0, 65535)
        check_choice("reasoning_format", self.reasoning_format, get_args(ReasoningOutput))
        if not (math.isfinite(self.timeout_s) and self.timeout_s > 0):
            raise SettingError(f"`timeout_s` must be a number of seconds above 0, got {self.timeout_s:g}")
        if self.sse_ping_interval_s != -1 and not 0 < self.sse_ping_interval_s < math.inf:
            raise SettingError(
                f"`sse_ping_interval_s` must be -1 (never) or a number of seconds above 0, "
                f"got {self.sse_ping_interval_s:g}"
            )
        if self.n_waiting < 0:
            raise SettingError(f"`n_waiting` must be 0 or more, got {self.n_waiting}")
        check_range("max_body_mib", self.max_body_mib, 1, 1024)
        if (self.ssl_key_file is None) != (self.ssl_cert_file is None):
            raise UsageError("`ssl_key_file` and `ssl_cert_file` belong together: give both, or none")

    def keys(self) -> tuple[str, ...]:
        """All API keys; none: every request is answered. Raises SettingError for a file that cannot be read, or that
        has none."""
        keys = [key.strip() for key in (self.api_key or "").split(",")]
        if self.api_key_file is not None:
            try:
                lines = [line.strip() for line in self.api_key_file.read_text("utf-8").splitlines()]
            except (OSError, UnicodeError) as e:
                why = e.strerror if isinstance(e, OSError) else "it is not UTF-8"
                raise SettingError(f"`api_key_file` {self.api_key_file}: cannot read the keys: {why}") from e
            keys += [line for line in lines if not line.startswith("#")]
        found = tuple(filter(None, keys))
        if not found and (self.api_key is not None or self.api_key_file is not None):
            raise SettingError(f"`{'api_key' if self.api_key is not None else 'api_key_file'}` has no key")
        return found
