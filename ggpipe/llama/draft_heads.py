"""The kinds of draft heads: what each reads of its target, and its stage."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from ggpipe.core.drafters.base import HeadNeeds
from ggpipe.llama import dflash, eagle3
from ggpipe.llama.completed import complete
from ggpipe.llama.eagle3 import HeadStage
from ggpipe.llama.gguf import ModelFile

STAGES: Mapping[str, type[HeadStage]] = {eagle3.ARCHITECTURE: HeadStage, dflash.ARCHITECTURE: dflash.BlockStage}
"""By architecture."""


def needs_of(model_file: ModelFile) -> HeadNeeds | None:
    """What this model reads of a target; None where it is no draft head. Raises ModelError for a damaged one, and for
    those that are not supported."""
    return eagle3.needs_of(model_file) or dflash.needs_of(model_file)


def open_draft(path: Path, target: Path) -> ModelFile:
    """A draft model's file. A draft head that lacks weights gets those of the target. Raises ModelError, also for heads
    that cannot take them from this target."""
    file = ModelFile.open(path)
    return complete(file, lambda: ModelFile.open(target)) if needs_of(file) is not None else file
