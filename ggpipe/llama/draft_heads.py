"""The kinds of draft heads: what each reads of its target, and its stage."""

from __future__ import annotations

from collections.abc import Mapping

from ggpipe.core.drafters.base import HeadNeeds
from ggpipe.llama import dflash, eagle3
from ggpipe.llama.eagle3 import HeadStage
from ggpipe.llama.gguf import ModelFile

STAGES: Mapping[str, type[HeadStage]] = {eagle3.ARCHITECTURE: HeadStage, dflash.ARCHITECTURE: dflash.BlockStage}
"""By architecture."""


def needs_of(model_file: ModelFile) -> HeadNeeds | None:
    """What this model reads of a target; None where it is no draft head. Raises ModelError for a damaged one, and for
    those that are not supported."""
    return eagle3.needs_of(model_file) or dflash.needs_of(model_file)
