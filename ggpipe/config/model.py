"""Settings of a model file, and the ids of an engine's models."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from ggpipe.config.checks import check_choice
from ggpipe.errors import SettingError

LoadMode = Literal["auto", "mmap", "none", "mlock", "mmap+mlock", "dio", "stream"]
Numa = Literal["distribute", "isolate", "numactl"]
TARGET, FIRST_DRAFT = 0, 1
"""Ids of the target and of the first draft model. The ids of further draft models follow."""


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """A model file, and how its weights are loaded. Raises SettingError for an invalid setting."""

    path: Path
    """The GGUF file, or the first part of a split one."""
    load_mode: LoadMode = "auto"
    """`auto` is `mmap`, or `stream` where the weights do not fit into memory."""
    stream_memory_gb: float | None = None
    """Memory for the weights of each rank that streams them; None: all that its machine has available."""
    repack: bool = True
    """ggml may convert weights to the layout that is fastest on this CPU, unless they are streamed."""
    numa: Numa | None = None
    override_kv: tuple[str, ...] = ()
    """Metadata to override: `KEY=TYPE:VALUE` with TYPE int, float, bool or str, as in llama.cpp's `--override-kv`."""
    loras: tuple[tuple[Path, float], ...] = ()
    """LoRA adapters and their scales."""

    @property
    def maps(self) -> bool:
        """Whether the file is mapped into memory."""
        return self.load_mode in ("auto", "mmap", "mmap+mlock", "stream")

    @property
    def streams(self) -> bool:
        """Whether weights that do not fit into memory are read from the file when they are needed."""
        return self.load_mode == "stream"

    @property
    def repacks(self) -> bool:
        """Whether ggml may convert weights."""
        return self.repack and not self.streams

    def __post_init__(self) -> None:
        check_choice("load_mode", self.load_mode, get_args(LoadMode))
        if self.stream_memory_gb is not None and not 0 < self.stream_memory_gb < math.inf:
            raise SettingError("stream_memory_gb", f"must be a number above 0, got {self.stream_memory_gb:g}")
        if self.numa is not None:
            check_choice("numa", self.numa, get_args(Numa))
