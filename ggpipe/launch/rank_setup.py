"""The settings of ranks, which the front end passes to them in an environment variable."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import msgspec

from ggpipe.config.engine import EngineConfig
from ggpipe.errors import LaunchError

VARIABLE = "GGPIPE_RANK_SETUP"


@dataclass(frozen=True)
class ProfileWork:
    """What to measure, instead of serving requests."""

    layers: tuple[int, int] | None = None
    """The first layer, and the one after the last. None: some of them."""
    seconds: float = 15.0


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """All settings of a rank; they are the same for all ranks."""

    config: EngineConfig
    verbose: bool = False
    """Show libllama's log messages."""
    profile: ProfileWork | None = None
    demo: Literal["tiny", "inflated"] | None = None
    """Use the bundled models, which each machine finds or makes in its own folders."""

    @property
    def environment(self) -> dict[str, str]:
        """The variable for a rank to read."""
        return {VARIABLE: base64.b64encode(msgspec.msgpack.encode(self, enc_hook=_encoded)).decode()}


def own_setup() -> RankSetup:
    """The settings that the front end has passed to this rank. Raises LaunchError if they come from another version."""
    try:
        data = base64.b64decode(os.environ[VARIABLE], validate=True)
        return msgspec.msgpack.decode(data, type=RankSetup, dec_hook=_decoded)
    except (KeyError, ValueError, msgspec.MsgspecError) as e:
        raise LaunchError(
            f"a rank cannot read its settings ({e}): install the same version of ggpipe on all machines"
        ) from e


def _encoded(value: object) -> bytes:
    if isinstance(value, Path):
        return os.fsencode(value)  # may not be UTF-8
    raise TypeError(type(value).__name__)


def _decoded(kind: type, value: Any) -> Path:
    if kind is Path and isinstance(value, bytes):
        return Path(os.fsdecode(value))
    raise TypeError(kind.__name__)
