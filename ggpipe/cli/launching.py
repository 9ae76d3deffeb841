"""Runs a command on its ranks: starts them, or is one of those that the user has started."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from ggpipe.channel.client import StartedRanks
from ggpipe.channel.started import supervised
from ggpipe.channel.supervisor import Supervisor
from ggpipe.cli.messages import warn
from ggpipe.cli.ranks import USER, exit_code, handled_signals, run_this_rank
from ggpipe.cluster.model_file import check_model_file
from ggpipe.config.engine import EngineConfig
from ggpipe.core.layout import lay_out
from ggpipe.errors import GgpipeError, Setting, SettingError, Wording
from ggpipe.launch import environment
from ggpipe.launch.job import Job
from ggpipe.launch.rank_setup import RankSetup
from ggpipe.launch.slurm import allocated_hosts
from ggpipe.options.option import Options
from ggpipe.options.settings import LogSettings, RankSettings
from ggpipe.planning.n_ranks import ranks_to_start

if TYPE_CHECKING:
    from ggpipe.engine.head import Head

NO_RESTART = Wording(
    Setting("restart"),
    " has no effect here: ggpipe restarts only ranks that it has started itself, with ",
    Setting("layer_split"),
)

_ALWAYS_A_LAYER = 0.2
"""Share of the layers that is at least one layer, for all but toys."""
FrontEndMain = Callable[[StartedRanks], int]
"""What a command does with its ranks. Returns the exit code."""


def run_command(
    config: EngineConfig,
    options: Options,
    front_end: FrontEndMain,
    prepare: Callable[[], object] = lambda: None,
    ctrl_c_ends: bool = True,
    demo: Literal["tiny", "inflated"] | None = None,
) -> int:
    """Run a command on the ranks that the config names, and return the exit code.

    ggpipe starts the ranks unless the user has, and restarts them as often as the options allow. `front_end` runs in
    the process that the user has started or, under the user's own mpirun, in the first rank. `prepare` is called before
    ranks are started, to find the user's mistakes. `ctrl_c_ends`: return the exit code for Ctrl-C if that has stopped
    the front end early. `demo`: see `RankSetup`.

    Raises UsageError for a hostfile without shares, LaunchError if there is no mpirun or no such hostfile, and
    ModelError for model files that cannot be opened.
    """
    if not environment.is_rank() and not environment.is_served():
        prepare()
        n_ranks = ranks_to_start(config, options[RankSettings].hostfile)
        if n_ranks is not None:
            check_model_files(config, options[RankSettings].hostfile)
            _check_layers(config, n_ranks)
            settings = RankSetup(config=config, verbose=options[LogSettings].verbose, demo=demo)
            job = Job(settings, n_ranks, options[RankSettings].hostfile)
            return _run_jobs([job], options, lambda ranks: front_end(next(ranks)), ctrl_c_ends)
    if options[RankSettings].restart and options.is_given("restart") and environment.has_user():
        warn(NO_RESTART)

    def head(ranks: Head) -> int:
        from ggpipe.engine.session import LocalRanks

        return front_end(LocalRanks(ranks))

    return run_this_rank(config, head, options[LogSettings].verbose, ctrl_c_ends=ctrl_c_ends)


def check_model_files(config: EngineConfig, hostfile: Path | None) -> None:
    """Check that the model files can be opened, if all ranks are on this machine. Raises ModelError."""
    if hostfile is not None or allocated_hosts():
        return
    for model in (config.model, *(draft.model for draft in config.drafts)):
        check_model_file(model.path)


def _check_layers(config: EngineConfig, n_ranks: int) -> None:
    """Check that each of the target's ranks gets a layer, where shares are so small that one may get none.

    Without the model's file on this machine, the ranks check. Raises UsageError.
    """
    split = config.pipeline.layer_split
    if split is None or min(filter(None, split.shares)) >= _ALWAYS_A_LAYER or not config.model.path.exists():
        return
    from ggpipe.llama.gguf import ModelFile  # loads libllama

    lay_out(ModelFile.open(config.model.path).n_layer, n_ranks - config.n_draft_ranks, split)


def run_side_by_side(
    layouts: Sequence[tuple[EngineConfig, Options]],
    front_end: Callable[[Iterator[StartedRanks]], int],
) -> int:
    """Run a command on the ranks of several layouts, and return the exit code.

    `layouts`: the config and the options of each. `front_end` gets the ranks of each layout in turn, which are started
    when it asks for them. All of them stop when it returns. Raises the errors of `run_command`, and SettingError under
    the user's own mpirun.
    """
    if environment.is_rank():
        raise SettingError(
            "layouts", "names several, whose ranks ggpipe must start itself", "do not use mpirun or srun"
        )
    jobs = []
    for config, options in layouts:
        hostfile = options[RankSettings].hostfile
        settings = RankSetup(config=config, verbose=options[LogSettings].verbose)
        jobs.append(Job(settings, ranks_to_start(config, hostfile) or 1, hostfile))
    return _run_jobs(jobs, layouts[0][1], front_end)


def _run_jobs(
    jobs: Sequence[Job], options: Options, front_end: Callable[[Iterator[StartedRanks]], int], ctrl_c_ends: bool = True
) -> int:
    """Start the ranks of each job when `front_end` asks for them, and return the exit code."""
    supervisors: list[Supervisor] = []

    def stop() -> None:
        for supervisor in supervisors:
            supervisor.stop()

    def fail(error: Callable[[], GgpipeError]) -> None:
        for supervisor in supervisors:
            supervisor.fail(error)

    with contextlib.ExitStack() as stack:
        signals = stack.enter_context(handled_signals())

        def follow(supervisor: Supervisor) -> None:
            supervisors.append(supervisor)
            signals.follow(stop, fail, lambda: any(supervisor.stopping for supervisor in supervisors))

        def started() -> Iterator[StartedRanks]:
            for job in jobs:
                yield stack.enter_context(supervised(job, options[RankSettings].restart, USER, follow))

        return exit_code(front_end(started()), signals, ctrl_c_ends)
