"""Settings of a model file, and the ids of an engine's models."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ggpipe.config.checks import check_choice

LoadMode = Literal["mmap", "none", "mlock", "mmap+mlock", "dio"]
Numa = Literal["distribute", "isolate", "numactl"]
TARGET, FIRST_DRAFT = 0, 1
"""Ids of the target and of the first draft model. The ids of further draft models follow."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model file, and how its weights are loaded. Raises SettingError for an invalid setting."""

    path: Path
    """The GGUF file, or the first part of a split one."""
    load_mode: LoadMode = "mmap"
    repack: bool = True
    """ggml may convert weights to the layout that is fastest on this CPU."""
    numa: Numa | None = None
    override_kv: tuple[str, ...] = ()
    """Metadata to override: `KEY=TYPE:VALUE` with TYPE int, float, bool or str, as in llama.cpp's `--override-kv`."""
    loras: tuple[tuple[Path, float], ...] = ()
    """LoRA adapters and their scales."""

    def __post_init__(self) -> None:
        check_choice("load_mode", self.load_mode, get_args(LoadMode))
        if self.numa is not None:
            check_choice("numa", self.numa, get_args(Numa))
