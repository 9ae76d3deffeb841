"""The ranks to start, and those to start instead if machines cannot be reached."""

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
    """The user's hostfile."""
    hosts: tuple[str, ...] = ()
    """Machine of each rank. Empty: see `slots`."""
    line: str = ""
    """For the user: how the job differs from the one requested."""

    @property
    def slots(self) -> list[str]:
        """Machine of each available slot. Empty: this machine only. Raises LaunchError."""
        return slots_of(self.hostfile) if self.n_ranks > 1 or self.hostfile is not None else []

    @property
    def first_hosts(self) -> list[str]:
        """The machines of the ranks, each once. Raises LaunchError."""
        return list(dict.fromkeys(self.hosts or self.slots[: self.n_ranks]))

    @contextlib.contextmanager
    def hosts_in_file(self) -> Iterator[Path | None]:
        """The hostfile for mpirun: the user's if this mpirun can read it, or else a temporary one. Raises
        LaunchError."""
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
                raise LaunchError(
                    f"cannot write a temporary hostfile ({e}): free some space, or set TMPDIR to another folder"
                ) from e
            yield own


def slots_of(hostfile: Path | None) -> list[str]:
    """Machine of each available slot, according to a hostfile or to the Slurm job of this process. Empty: this machine
    only. Raises LaunchError for a hostfile that cannot be read."""
    return allocated_hosts() if hostfile is None else hosts_of(hostfile)


def jobs_again(first: Job, attend: Callable[[], None]) -> list[Job]:
    """A job on the machines that can be reached now, and alternatives in case the machines refuse it.

    `attend` is called during the search, and may raise. Raises LaunchError if no machine can be reached.
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
        jobs.append(replace(jobs[0], settings=without, line=f"continuing without {what}"))
    if config.may_stream and not pipeline.check_memory:
        streaming = replace(settings.config, model=replace(config.model, load_mode="stream"))
        line = "continuing with weights that are read from the file when they are needed, which is slow"
        jobs.append(replace(jobs[0], settings=replace(settings, config=streaming), line=line))
    return jobs


def _placed(config: EngineConfig, placement: Placement) -> EngineConfig:
    """The config for other ranks, which check whether their machines have enough memory."""
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
