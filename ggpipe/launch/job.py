"""What is started as ranks, and started again where machines are away."""

from __future__ import annotations

import contextlib
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ggpipe.config.engine import EngineConfig
from ggpipe.core.layout import Shares, Split
from ggpipe.errors import LaunchError
from ggpipe.launch.hostfile import hosts_of, is_readable, write_hostfile
from ggpipe.launch.mpirun import find_mpirun, is_open_mpi
from ggpipe.launch.placement import Placement, listed
from ggpipe.launch.reach import unreachable
from ggpipe.launch.slurm import allocated_hosts


@dataclass(frozen=True)
class Job:
    """Ranks to start."""

    arguments: Sequence[str]
    """Of ggpipe, the same for all ranks."""
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


def jobs_again(
    first: Job,
    config: EngineConfig,
    arguments: Callable[[Mapping[str, object]], list[str]],
    attend: Callable[[], None],
) -> list[Job]:
    """A job on the machines that can be reached now, and others for the case that they refuse it.

    `arguments` makes a command line of the user's with some options changed. `attend` is called while machines are
    looked for, and may raise. Raises LaunchError when none can be reached.
    """
    slots, pipeline, drafts = first.slots, config.pipeline, config.drafts
    split: Split | None = None
    if pipeline.shares is not None:
        parts = (Shares(draft.shares, draft.group_sizes) for draft in drafts if draft.shares)
        split = Split(Shares(pipeline.shares, pipeline.group_sizes), tuple(parts))
    before = Placement.on(slots, split, pipeline.threads, pipeline.threads_batch, pipeline.tensor_split)
    away = unreachable(slots, attend)
    if not away.intersection(before.hosts):
        return [first]
    now = before.without(away, slots[len(before.hosts) :])
    changes: dict[str, object] = {
        "shares": now.split_text,
        "threads": ",".join(map(str, now.threads)),
        "threads_batch": ",".join(map(str, now.threads_batch)),
        "check_memory": True,
    }
    if len(drafts) > 1:
        changes["draft.model"] = [draft.model.path for draft in drafts]  # in the order of the shares
    if pipeline.tensor_split:
        changes["tensor_split"] = ",".join(map(repr, now.tensor_split)) or None
    lost = [host for host in dict.fromkeys(before.hosts) if host in away]
    line = f"{listed(lost)} cannot be reached: {now.changes_since(before)}"
    jobs = [Job(arguments(changes), len(now.hosts), first.hostfile, now.hosts, line)]
    if now.split is not None:
        kept = [(draft, own) for draft, own in zip(drafts, now.split.drafts, strict=False) if own.shares]
        left_out = [draft.model.path.name for draft in drafts if draft not in (draft for draft, _ in kept)]
        if left_out:
            changes["shares"] = str(Split(now.split.target, tuple(own for _, own in kept)))
            changes["draft.model"] = [draft.model.path for draft, _ in kept] or None
            changes |= {} if kept else {"mode": None, "spec_type": None}
            what = listed(left_out) if kept else "the draft model" if len(drafts) == 1 else "the draft models"
            jobs.append(replace(jobs[0], arguments=arguments(changes), line=f"going on without {what}"))
    return jobs
