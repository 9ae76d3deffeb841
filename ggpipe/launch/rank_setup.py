"""What the front end tells the ranks that it starts: all of their settings, in an environment variable."""

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
    """Measure these ranks, instead of loading models to serve requests."""

    layers: tuple[int, int] | None = None
    """The first layer, and the one after the last; None: some of them."""
    seconds: float = 15.0


@dataclass(frozen=True, kw_only=True)
class RankSetup:
    """All that a rank needs to know before it is connected with the others; the same for all ranks."""

    config: EngineConfig
    verbose: bool = False
    """libllama's messages are shown."""
    profile: ProfileWork | None = None
    demo: Literal["tiny", "inflated"] | None = None
    """The models are the bundled pair, which each machine finds, or makes, where it has it."""

    @property
    def environment(self) -> dict[str, str]:
        """The variable that a rank reads."""
        return {VARIABLE: base64.b64encode(msgspec.msgpack.encode(self, enc_hook=_encoded)).decode()}


def own_setup() -> RankSetup:
    """This rank's, which the front end has given. Raises LaunchError for what another version of ggpipe wrote."""
    try:
        data = base64.b64decode(os.environ[VARIABLE], validate=True)
        return msgspec.msgpack.decode(data, type=RankSetup, dec_hook=_decoded)
    except (KeyError, ValueError, msgspec.MsgspecError) as e:
        raise LaunchError(f"a rank cannot read its settings ({e}): install the same ggpipe everywhere") from e


def _encoded(value: object) -> bytes:
    if isinstance(value, Path):
        return os.fsencode(value)  # which need not be UTF-8
    raise NotImplementedError(type(value).__name__)


def _decoded(kind: type, value: Any) -> Path:
    if kind is Path and isinstance(value, bytes):
        return Path(os.fsdecode(value))
    raise NotImplementedError(kind.__name__)
