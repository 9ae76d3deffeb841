"""`ggpipe plan`: the split, the threads and the flags that a cluster should run a model with."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast, get_args

import typer

from ggpipe.cli.flags import (
    OUTPUT,
    RANKS,
    SPECULATION,
    ComputeFlags,
    DraftFlags,
    LogFlags,
    ModelFlags,
    OptionalModelFlags,
    RankFlags,
    option,
    takes_flags,
)
from ggpipe.cli.hosts import hosts_of
from ggpipe.cli.ranks import start_n_ranks
from ggpipe.cli.settings import context_config, engine_config, per_rank
from ggpipe.cli.simulate import TextFlags, shape_from, tokens_of
from ggpipe.config import Mode, PipelineConfig
from ggpipe.display.files import check_writable
from ggpipe.errors import LaunchError, UsageError
from ggpipe.runtime import launch

if TYPE_CHECKING:
    from ggpipe.cli.plan_page import Command
    from ggpipe.sim.shapes import ModelShape
    from ggpipe.sim.spec import ClusterSpec
    from ggpipe.transport.base import Transport

_N_CTX = 4096  # where neither the user nor a model file says


@dataclass(frozen=True, kw_only=True)
class PlanFlags:
    """What is planned, and where the plan goes."""

    # fmt: off
    mode: Annotated[str | None, option("--mode", panel=SPECULATION, metavar="MODE", help="Only this one: async, speculative or iterative. Default: the fastest.")] = None
    n_ranks: Annotated[int | None, option("-r", "--ranks", panel=RANKS, metavar="N", help="With so many ranks, the draft's included. Default: as many as are best.")] = None
    seconds: Annotated[float, option("--seconds", panel=OUTPUT, metavar="S", help="How long to measure, where no cluster file is given.")] = 6.0
    json: Annotated[Path | None, option("--json", panel=OUTPUT, metavar="FILE", help="Write the plan.")] = None
    # fmt: on

    def __post_init__(self) -> None:
        if self.mode is not None and self.mode not in get_args(Mode):
            raise UsageError(f"--mode {self.mode}: known modes are {', '.join(get_args(Mode))}")
        if self.n_ranks is not None and self.n_ranks < 1:
            raise UsageError(f"-r is a number of ranks, 1 or more; {self.n_ranks} is not")
        if not (math.isfinite(self.seconds) and self.seconds > 0):
            raise UsageError(f"--seconds is a time above 0, as in 6; {self.seconds:g} is not")
        if self.json is not None:
            check_writable(self.json)


@takes_flags(leave_out=("mpi_layer_split", "n_predict", "seed", "threads_batch_draft"))
def plan(
    model: OptionalModelFlags,
    text: TextFlags,
    compute: ComputeFlags,
    ranks: RankFlags,
    draft: DraftFlags,
    wanted: PlanFlags,
    log: LogFlags,
    cluster: Annotated[
        Path | None,
        typer.Argument(
            metavar="[CLUSTER]",
            help="A cluster file, a name of one that comes along, or a profile. Without it the machines of --hostfile, "
            "or this one, are measured first.",
            show_default=False,
        ),
    ] = None,
) -> int:
    """Find the fastest way to run a model on a cluster: which machine holds which layers, where the draft runs, flags.

    Memory comes from the model's header, speeds from short simulations. The last line is a command to paste.
    """
    tokens_of(text)  # mistakes show before anything is measured
    context_config(compute)
    threads = PipelineConfig(threads=per_rank("-t", compute.threads)).threads
    if len(threads) > 1:
        raise UsageError(f"-t {compute.threads}: plan takes one number for all ranks; it finds the rest itself")
    request = _Request(model, text, compute, ranks, draft, wanted)
    if cluster is not None:
        if ranks.hostfile is not None:
            raise UsageError("give a cluster file, or --hostfile to measure its machines: not both")
        from ggpipe.sim.cluster_file import read_cluster

        request.show(read_cluster(cluster), [])
        return 0
    if model.model is None:
        raise UsageError("name a model with -m, or a cluster file that describes one")
    return _measure(request, log.verbose)


@dataclass(frozen=True)
class _Request:
    model: OptionalModelFlags
    text: TextFlags
    compute: ComputeFlags
    ranks: RankFlags
    draft: DraftFlags
    wanted: PlanFlags

    def show(self, spec: ClusterSpec, hosts: list[str]) -> None:
        """Plan, and print. `hosts`: as the hostfile calls the machines of the cluster's ranks."""
        from ggpipe.cli.plan_page import print_plan, write_plan
        from ggpipe.display.simulation import Progress
        from ggpipe.sim.candidates import Needs
        from ggpipe.sim.planner import Wish, make_plan
        from ggpipe.sim.simulator import Sizes

        target, draft = self._shapes(spec)
        compute, threads = self.compute, int(self.compute.threads)
        n_ctx = compute.ctx_size or (0 if target.n_ctx else _N_CTX)
        needs = Needs(
            n_ctx,
            compute.ubatch_size,
            self.wanted.n_ranks,
            threads=threads if threads > 0 else None,
            draft_threads=self.draft.threads_draft if self.draft.threads_draft > 0 else None,
        )
        mode = cast("Mode | None", self.wanted.mode)
        sizes = Sizes(n_ctx, compute.batch_size, compute.ubatch_size)
        progress = Progress()
        try:
            made = make_plan(spec, target, draft, Wish(needs, tokens_of(self.text), sizes, mode), progress)
        finally:
            progress.stop()
        command = self._command(n_ctx, hosts)
        print_plan(spec, target, draft, tokens_of(self.text), made, command)
        if self.wanted.json is not None:
            write_plan(self.wanted.json, spec, made, command)

    def _shapes(self, spec: ClusterSpec) -> tuple[ModelShape, ModelShape | None]:
        target = shape_from(self.model.model, self.compute) or spec.target
        if target is None:
            raise UsageError("the cluster file describes no target model: name one with -m")
        draft = shape_from(self.draft.model_draft, self.compute)
        if draft is None and self.model.model is None:
            draft = spec.draft
        if draft is None and self.wanted.mode in ("speculative", "async"):
            raise UsageError(f"--mode {self.wanted.mode} guesses with a draft model: name one with -md")
        return target, draft

    def _command(self, n_ctx: int, hosts: list[str]) -> Command:
        from ggpipe.cli.plan_page import Command

        compute, default = self.compute, ComputeFlags()
        extras: list[str] = ["-c", str(n_ctx)] if n_ctx else []
        for flag, value, usual in (
            ("-b", compute.batch_size, default.batch_size),
            ("-ub", compute.ubatch_size, default.ubatch_size),
            ("-fa", compute.flash_attn, default.flash_attn),
            ("-ctk", compute.cache_type_k, default.cache_type_k),
            ("-ctv", compute.cache_type_v, default.cache_type_v),
        ):
            extras += [flag, str(value)] if value != usual else []
        return Command(
            self.model.model or Path("target.gguf"), self.draft.model_draft or Path("draft.gguf"), extras, hosts,
            self.ranks.hostfile,
        )  # fmt: skip


def _measure(request: _Request, verbose: bool) -> int:
    """Profile the ranks, on which this command line runs as well, and plan from that on the first one."""
    hostfile, wanted = request.ranks.hostfile, request.wanted
    hosts = hosts_of(hostfile) if hostfile is not None and (launch.rank_in_environment() or 0) == 0 else []
    if launch.rank_in_environment() is None and (hosts or (wanted.n_ranks or 1) > 1):
        return start_n_ranks(len(hosts) or wanted.n_ranks or 1, hostfile)

    from ggpipe.engine import libllama
    from ggpipe.runtime.profiling import profile_ranks
    from ggpipe.runtime.rank import run_alike
    from ggpipe.sim.profiled import spec_from_profile

    assert request.model.model is not None
    draft = request.draft if wanted.mode != "iterative" else DraftFlags()
    config = engine_config(cast(ModelFlags, request.model), request.compute, draft=draft)

    def work(transport: Transport, attend: Callable[[], None]) -> int:
        if wanted.n_ranks is not None and wanted.n_ranks > transport.size:
            raise LaunchError(f"-r {wanted.n_ranks}: {transport.size} ranks were started, give no more")
        measured = profile_ranks(transport, config, None, wanted.seconds, attend, _say)
        if measured is not None:
            names = list(dict.fromkeys(rank.host for rank in measured.ranks))
            request.show(spec_from_profile(measured, ", ".join(names)), hosts)
        return 0

    libllama.set_log_level(2 if verbose else 5)
    return run_alike(config, work)


def _say(line: str) -> None:
    print(f"ggpipe: {line}", file=sys.stderr)
