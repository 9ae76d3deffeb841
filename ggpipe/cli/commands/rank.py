"""`ggpipe rank`: a rank that a front end has started."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Literal

from ggpipe.cli.ranks import run_profile, run_this_rank
from ggpipe.config.engine import EngineConfig
from ggpipe.errors import UsageError
from ggpipe.launch import environment
from ggpipe.launch.rank_setup import own_setup

if TYPE_CHECKING:
    from ggpipe.engine.head import Head
    from ggpipe.options.option import Options


def run(_: Options | None = None) -> int:
    """Serve the front end, or measure for it. Returns the exit code."""
    if not environment.is_served():
        raise UsageError("`ggpipe rank` is only for ranks that ggpipe starts itself: use `ggpipe generate`")
    settings = own_setup()
    if settings.profile is not None:
        run_profile(settings, 1, None)
        return 0
    config = settings.config if settings.demo is None else _with_bundled(settings.config, settings.demo)
    return run_this_rank(config, _no_head, settings.verbose)


def _with_bundled(config: EngineConfig, kind: Literal["tiny", "inflated"]) -> EngineConfig:
    from ggpipe.llama.bundled import BUNDLED_PAIR, inflated_pair

    pair = BUNDLED_PAIR if kind == "tiny" else inflated_pair()
    drafts = tuple(replace(draft, model=replace(draft.model, path=pair.draft)) for draft in config.drafts)
    return replace(config, model=replace(config.model, path=pair.target), drafts=drafts)


def _no_head(_: Head) -> int:
    raise AssertionError("the front end is another process")
