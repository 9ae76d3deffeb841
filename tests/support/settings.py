"""Settings of ranks that are never started."""

from __future__ import annotations

from pathlib import Path

from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import ModelConfig
from ggpipe.launch.rank_setup import RankSetup

SETTINGS = RankSetup(config=EngineConfig(ModelConfig(path=Path("none"))))
