"""How many ranks a front end has to start."""

from __future__ import annotations

from pathlib import Path

from ggpipe.config.engine import EngineConfig
from ggpipe.errors import Setting, SettingError, Wording
from ggpipe.launch.job import slots_of


def ranks_to_start(config: EngineConfig, hostfile: Path | None) -> int | None:
    """The number of ranks to start; None: one rank, without MPI.

    Raises SettingError for a hostfile without shares, and what `EngineConfig.check_ranks` raises.
    """
    n_target = config.pipeline.n_ranks
    n_ranks = (n_target or 0) + config.n_draft_ranks
    if config.pipeline.auto:
        from ggpipe.planning.auto import ranks_here  # loads libllama

        n_ranks = len(slots_of(hostfile)) or ranks_here(config)
    if hostfile is not None and n_target is None and not config.pipeline.auto:
        raise SettingError(
            "hostfile",
            Wording("needs ", Setting("layer_split"), ": the number of ranks to start and the share of each"),
        )
    config.check_ranks(n_ranks or 1)
    return None if hostfile is None and n_ranks <= 1 else n_ranks
