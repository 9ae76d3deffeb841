"""ggpipe: one GGUF model over several CPU-only machines.

The public API is below; what is not named here may change. Each name is loaded when it is first used, so that importing
the package alone loads neither libllama nor MPI.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from ggpipe._version import __version__ as __version__

if TYPE_CHECKING:
    from ggpipe.api.answer import Answer as Answer
    from ggpipe.api.batch import Batch as Batch
    from ggpipe.api.download import download as download
    from ggpipe.api.engine import Engine as Engine
    from ggpipe.api.keywords import EngineOptions as EngineOptions
    from ggpipe.api.keywords import RequestOptions as RequestOptions
    from ggpipe.config.context import ContextConfig as ContextConfig
    from ggpipe.config.draft import DraftConfig as DraftConfig
    from ggpipe.config.engine import EngineConfig as EngineConfig
    from ggpipe.config.engine import PromptCacheConfig as PromptCacheConfig
    from ggpipe.config.layer_split import LayerSplit as LayerSplit
    from ggpipe.config.model import ModelConfig as ModelConfig
    from ggpipe.config.pipeline import PipelineConfig as PipelineConfig
    from ggpipe.config.sampling import SamplingConfig as SamplingConfig
    from ggpipe.config.speculation import SpeculationConfig as SpeculationConfig
    from ggpipe.core.request import Finish as Finish
    from ggpipe.core.request import Token as Token
    from ggpipe.core.request import TokenProb as TokenProb
    from ggpipe.core.request_spec import RequestSpec as RequestSpec
    from ggpipe.engine.head import Head as Head
    from ggpipe.engine.process import run_rank as run_rank
    from ggpipe.engine.session import Session as Session
    from ggpipe.errors import GgpipeError as GgpipeError
    from ggpipe.errors import LaunchError as LaunchError
    from ggpipe.errors import ModelError as ModelError
    from ggpipe.errors import QueueFull as QueueFull
    from ggpipe.errors import RankError as RankError
    from ggpipe.errors import RunError as RunError
    from ggpipe.errors import SettingError as SettingError
    from ggpipe.errors import UsageError as UsageError
    from ggpipe.stats.records import RequestStats as RequestStats


_HOMES = {
    "ggpipe.api.answer": ("Answer",),
    "ggpipe.api.batch": ("Batch",),
    "ggpipe.api.download": ("download",),
    "ggpipe.api.engine": ("Engine",),
    "ggpipe.api.keywords": ("EngineOptions", "RequestOptions"),
    "ggpipe.config.context": ("ContextConfig",),
    "ggpipe.config.draft": ("DraftConfig",),
    "ggpipe.config.engine": ("EngineConfig", "PromptCacheConfig"),
    "ggpipe.config.layer_split": ("LayerSplit",),
    "ggpipe.config.model": ("ModelConfig",),
    "ggpipe.config.pipeline": ("PipelineConfig",),
    "ggpipe.config.sampling": ("SamplingConfig",),
    "ggpipe.config.speculation": ("SpeculationConfig",),
    "ggpipe.core.request": ("Finish", "Token", "TokenProb"),
    "ggpipe.core.request_spec": ("RequestSpec",),
    "ggpipe.engine.head": ("Head",),
    "ggpipe.engine.process": ("run_rank",),
    "ggpipe.engine.session": ("Session",),
    "ggpipe.errors": (
        "GgpipeError", "LaunchError", "ModelError", "QueueFull", "RankError", "RunError", "SettingError", "UsageError",
    ),
    "ggpipe.stats.records": ("RequestStats",),
}  # fmt: skip
_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

__all__ = ["__version__", *_HOME_OF]


def __getattr__(name: str) -> Any:
    if name not in _HOME_OF:
        raise AttributeError(f"module 'ggpipe' has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME_OF[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
