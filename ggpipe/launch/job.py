"""What is started as ranks, and started again where machines are away."""

from __future__ import annotations

import contextlib
import itertools
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplits
from ggpipe.errors import LaunchError
from ggpipe.launch.hostfile import hosts_of, is_readable, write_hostfile
from ggpipe.launch.mpirun import find_mpirun, is_open_mpi
from ggpipe.launch.placement import Placement, listed
from ggpipe.launch.rank_setup import RankSetup
from ggpipe.launch.reach import unreachable
from ggpipe.launch.slurm import allocated_hosts


@dataclass(frozen=True)
class Job:
    """Ranks to start."""

    settings: RankSetup
    n_ranks: int
    hostfile: Path | None
    """The user's."""
    hosts: tuple[str, ...] = ()
    """The machine of each rank; empty: as `slots` has them."""
    line: str = ""
    """For the user: how it differs from what was asked for."""

    @property
    def slots(self) -> list[str]:
        """The machine of each rank that there is room for; empty: this machine. Raises LaunchError."""
        return slots_of(self.hostfile) if self.n_ranks > 1 or self.hostfile is not None else []

    @contextlib.contextmanager
    def hosts_in_file(self) -> Iterator[Path | None]:
        """The hostfile for mpirun: the user's where this mpirun reads its form, else one of our own, which is there as
        long as the context. Raises LaunchError."""
        hosts = self.hosts or self.slots
        if not hosts:
            yield None
            return
        for_hydra = not is_open_mpi(find_mpirun())
        if not self.hosts and self.hostfile is not None and is_readable(self.hostfile, for_hydra):
            yield self.hostfile
            return
        with contextlib.ExitStack() as stack:
            try:
                own = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="ggpipe-")), "hosts")
                write_hostfile(own, hosts, for_hydra)
            except OSError as e:
                raise LaunchError(f"there is no room for a hostfile ({e}); make room, or set TMPDIR to another") from e
            yield own


def slots_of(hostfile: Path | None) -> list[str]:
    """The machine of each rank that there is room for: those of a hostfile, else those of the Slurm job that this
    process is in; empty: this machine. Raises LaunchError for a hostfile that cannot be read."""
    return allocated_hosts() if hostfile is None else hosts_of(hostfile)


def jobs_again(first: Job, attend: Callable[[], None]) -> list[Job]:
    """A job on the machines that can be reached now, and others for the case that they refuse it.

    `attend` is called while machines are looked for, and may raise. Raises LaunchError when none can be reached.
    """
    slots, config = first.slots, first.settings.config
    pipeline, drafts = config.pipeline, config.drafts
    splits: LayerSplits | None = None
    if pipeline.layer_split is not None:
        splits = (pipeline.layer_split, *(draft.layer_split for draft in drafts if draft.layer_split is not None))
    before = Placement.on(slots, splits, pipeline.threads, pipeline.threads_batch, pipeline.tensor_split)
    away = unreachable(slots, attend)
    if not away.intersection(before.hosts):
        return [first]
    now = before.without(away, slots[len(before.hosts) :])
    lost = [host for host in dict.fromkeys(before.hosts) if host in away]
    line = f"{listed(lost)} cannot be reached: {now.changes_since(before)}"
    settings = replace(first.settings, config=_placed(config, now))
    jobs = [Job(settings, len(now.hosts), first.hostfile, now.hosts, line)]
    kept = tuple(draft for draft in settings.config.drafts if draft.layer_split is not None)
    left_out = [draft.model.path.name for draft in drafts if draft.model not in [own.model for own in kept]]
    if now.splits is not None and left_out:
        without = replace(settings, config=replace(settings.config, drafts=kept))
        what = listed(left_out) if kept else "the draft model" if len(drafts) == 1 else "the draft models"
        jobs.append(replace(jobs[0], settings=without, line=f"going on without {what}"))
    return jobs


def _placed(config: EngineConfig, placement: Placement) -> EngineConfig:
    """The config for other ranks. Their machines may have too little memory, which they check."""
    drafts, split = config.drafts, None
    if placement.splits is not None:
        split, *others = placement.splits
        pairs = itertools.zip_longest(drafts, others[: len(drafts)])
        drafts = tuple(replace(draft, layer_split=own) for draft, own in pairs)
    pipeline = replace(
        config.pipeline,
        layer_split=split,
        threads=placement.threads,
        threads_batch=placement.threads_batch,
        tensor_split=placement.tensor_split,
        check_memory=True,
    )
    return replace(config, pipeline=pipeline, drafts=tuple(sorted(drafts, key=lambda own: own.layer_split is None)))
