"""ggpipe: one GGUF model over several CPU-only machines.

The public API is below; what is not named here may change. Each name is loaded when it is first used, so that importing
the package alone loads neither libllama nor MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ggpipe.api.answer import Answer as Answer
    from ggpipe.api.batch import Batch as Batch
    from ggpipe.api.engine import Engine as Engine
    from ggpipe.api.keywords import EngineOptions as EngineOptions
    from ggpipe.api.keywords import RequestOptions as RequestOptions
    from ggpipe.config import ContextConfig as ContextConfig
    from ggpipe.config import DraftConfig as DraftConfig
    from ggpipe.config import EngineConfig as EngineConfig
    from ggpipe.config import ModelConfig as ModelConfig
    from ggpipe.config import PipelineConfig as PipelineConfig
    from ggpipe.config import PromptCacheConfig as PromptCacheConfig
    from ggpipe.config import SamplingConfig as SamplingConfig
    from ggpipe.config import SpeculationConfig as SpeculationConfig
    from ggpipe.core.request import Finish as Finish
    from ggpipe.core.request import Token as Token
    from ggpipe.core.request import TokenProb as TokenProb
    from ggpipe.errors import GgpipeError as GgpipeError
    from ggpipe.errors import LaunchError as LaunchError
    from ggpipe.errors import ModelError as ModelError
    from ggpipe.errors import QueueFull as QueueFull
    from ggpipe.errors import RankError as RankError
    from ggpipe.errors import RunError as RunError
    from ggpipe.errors import SettingError as SettingError
    from ggpipe.errors import UsageError as UsageError
    from ggpipe.metrics.stats import RequestStats as RequestStats
    from ggpipe.request import RequestSpec as RequestSpec
    from ggpipe.runtime.head import Head as Head
    from ggpipe.runtime.process import run_rank as run_rank
    from ggpipe.runtime.session import Session as Session

__version__ = "0.1.0"

_HOMES = {
    "ggpipe.api.answer": ("Answer",),
    "ggpipe.api.batch": ("Batch",),
    "ggpipe.api.engine": ("Engine",),
    "ggpipe.api.keywords": ("EngineOptions", "RequestOptions"),
    "ggpipe.config": (
        "ContextConfig", "DraftConfig", "EngineConfig", "ModelConfig", "PipelineConfig", "PromptCacheConfig",
        "SamplingConfig", "SpeculationConfig",
    ),
    "ggpipe.core.request": ("Finish", "Token", "TokenProb"),
    "ggpipe.errors": (
        "GgpipeError", "LaunchError", "ModelError", "QueueFull", "RankError", "RunError", "SettingError", "UsageError",
    ),
    "ggpipe.metrics.stats": ("RequestStats",),
    "ggpipe.request": ("RequestSpec",),
    "ggpipe.runtime.head": ("Head",),
    "ggpipe.runtime.process": ("run_rank",),
    "ggpipe.runtime.session": ("Session",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ggpipe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
