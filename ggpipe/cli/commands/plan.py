"""`ggpipe plan`: the best split, threads and flags for a model on a cluster."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from ggpipe.cli.messages import spellings
from ggpipe.cli.ranks import run_profile
from ggpipe.cli.simulated import drafts_of, mtp_of, shapes_of, text_of
from ggpipe.cluster.from_profile import spec_from_profile
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.cluster.toml import read_cluster
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import WINDOW
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.display.files import check_writable
from ggpipe.display.progress import SimulationProgress
from ggpipe.display.tables.plan import GenerateCommand, print_plan, write_plan
from ggpipe.errors import LaunchError, Setting, SettingError, UsageError, Wording
from ggpipe.launch.environment import has_user
from ggpipe.launch.job import slots_of
from ggpipe.launch.rank_setup import ProfileWork, RankSetup
from ggpipe.options.engine_config import check_draft, draft_threads, draft_window, engine_config
from ggpipe.options.hub import HubSettings
from ggpipe.options.option import Options
from ggpipe.options.settings import (
    ClusterSettings,
    LogSettings,
    LoraSettings,
    ModelSettings,
    PlanSettings,
    RankSettings,
    SimulatedDrafters,
    SimulatedText,
)
from ggpipe.planning.candidates import Constraints
from ggpipe.planning.drafters import DrafterCandidate, DrafterPlan, plan_drafters
from ggpipe.planning.evaluate import tokens_of_users
from ggpipe.planning.planner import PlanRequest
from ggpipe.planning.run_lengths import LongerRuns, longer_runs
from ggpipe.sim.arrivals import Traffic
from ggpipe.sim.limits import Sizes

_PLANNED = ("draft", "eagle3", "dflash")
"""Kinds of drafters that --drafters may name."""
_N_CTX = 4096  # if neither the user nor a model file gives a context size


def run(options: Options) -> int:
    """Plan with a cluster file, or with measurements of the ranks. Returns the exit code."""
    request = _Request(options)
    cluster, hostfile = options[ClusterSettings].path, options[RankSettings].hostfile
    if cluster is not None:
        if hostfile is not None:
            raise UsageError(
                "give either a cluster file, or machines to measure with ", Setting("hostfile"), ", not both"
            )
        request.show(read_cluster(cluster), [])
        return 0
    if options[ModelSettings].target is None:
        raise UsageError("name a model with ", Setting("model"), ", or a cluster file that describes one")
    return _measure(request)


class _Request:
    """What to plan."""

    def __init__(self, options: Options) -> None:
        """Raises UsageError for mistakes, before any measurement."""
        self.options = options
        self.settings, self.models, self.context = options[PlanSettings], options[ModelSettings], options[ContextConfig]
        self.drafters = options[SimulatedDrafters]
        n_drafts = max(len(self.drafters.drafters or ()), len(self.models.drafts))
        self.text = text_of(options[SimulatedText], self.drafters, n_drafts)
        if any(drafter.kind not in _PLANNED for drafter in self.drafters.drafters or ()):
            raise SettingError("drafters", f"of a plan are {', '.join(_PLANNED)}", "omit the others")
        threads = options[PipelineConfig].threads
        if len(threads) > 1:
            raise SettingError(
                "threads", f"must be a single number for all ranks, got {len(threads)}", "plan chooses the rest"
            )
        self._threads, self._draft_threads = threads[0], draft_threads(options)
        self._draft_window = draft_window(options)
        if self.settings.users is not None:
            Traffic(users=self.settings.users)
        check_writable(self.settings.json)

    def show(self, spec: ClusterSpec, hosts: list[str]) -> None:
        """Plan, and print the plan. `hosts`: machines of the cluster's ranks, as named in the hostfile."""
        target, candidates = self._models(spec)
        if self.context.exact or not self.context.uses_fast_kernels:
            target = target.never_long()
        n_ctx = self.context.n_ctx or (0 if target.n_ctx else _N_CTX)
        users = self.settings.users
        if users is not None and (needed := tokens_of_users(users, self.text)) > (n_ctx or target.n_ctx):
            raise UsageError(
                f"{users} users need {needed} tokens, more than the context of {n_ctx or target.n_ctx}: raise ",
                *(Setting("n_ctx"), ", or lower ", Setting("users"), " or ", Setting("prompt_tokens")),
            )
        loras = self.options[LoraSettings]
        constraints = Constraints(
            n_ctx=n_ctx,
            n_ubatch=self.context.n_ubatch,
            n_ranks=self.settings.n_ranks,
            threads=self._threads if self._threads > 0 else None,
            draft_threads=self._draft_threads if self._draft_threads > 0 else None,
            groups=not (self.context.exact or self.context.flash_attn == "off" or loras.plain or loras.scaled),
            halves=True,
            streams=not self.context.exact,  # as `EngineConfig.may_stream` for the flags of the plan's command
        )
        sizes = Sizes(n_ctx, self.context.n_batch, self.context.n_ubatch, window=self._draft_window)
        request = PlanRequest(
            constraints=constraints, tokens=self.text, sizes=sizes, mode=self.settings.mode, users=users
        )
        with SimulationProgress() as progress:
            made = plan_drafters(spec, target, candidates, request, progress)
        longer = None
        if not self.options.is_given("n_ubatch"):
            longer = longer_runs(target, [own.shape for own in made.used], request, made.plan)
        if longer is not None:
            both = zip(made.plan.ranks, longer.memory, strict=True)
            ranks = tuple(replace(rank, memory=memory) for rank, memory in both)
            made = replace(made, plan=replace(made.plan, ranks=ranks))
        command = self._command(n_ctx, hosts, made, longer)
        print_plan(spec, target, candidates, self.text, made, command, longer)
        if self.settings.json is not None:
            write_plan(self.settings.json, spec, made, command)

    def _models(self, spec: ClusterSpec) -> tuple[ModelShape, list[DrafterCandidate]]:
        """The target, and the drafters to choose from."""
        own, files = shapes_of(self.options)
        target = own or spec.target
        if target is None:
            raise UsageError("the cluster file does not describe a target model: name one with ", Setting("model"))
        named = self.drafters.drafters
        if named is not None and files and len(named) != len(files):
            raise SettingError(
                "drafters", f"has {len(named)} values for {len(files)} draft models", "give one per draft model"
            )
        shapes = drafts_of(self.drafters, files, spec.draft if own is None else None, target)
        if not shapes and (mtp := mtp_of(self.options, target)) is not None:
            return target, [DrafterCandidate(shape=mtp, flags=("--spec-type", "mtp,ngram"))]
        if not shapes and self.settings.mode in ("speculative", "async"):
            check_draft(self.options, Wording(Setting("mode"), f" {self.settings.mode}"))
        shares = [drafter.share for drafter in named or ()] or [None] * len(shapes)
        hub, paths = self.options[HubSettings].draft_repos, self.models.drafts
        names = [("-md", str(path)) for path in paths[: len(paths) - len(hub)]] + [("-hfd", name) for name in hub]
        flags = dict(zip(map(id, files), names, strict=False))
        window, users = self._draft_window, self.settings.users or 1
        return target, [
            DrafterCandidate(
                shape=shape.with_window(window, users),
                agreement=share,
                flags=flags.get(id(shape), ("-md", "draft.gguf")),
            )
            for shape, share in zip(shapes, shares, strict=True)
        ]

    def _command(self, n_ctx: int, hosts: list[str], made: DrafterPlan, longer: LongerRuns | None) -> GenerateCommand:
        context, default = self.context, ContextConfig()
        if longer is not None:
            context = replace(context, n_ubatch=longer.n_ubatch)
        extras: list[str] = ["-c", str(n_ctx)] if n_ctx else []
        extras += ["--exact"] if context.exact else []
        if context.fast_kernels is not None:
            extras.append("--fast-kernels" if context.fast_kernels else "--no-fast-kernels")
        for field in ("n_batch", "n_ubatch", "flash_attn", "cache_type_k", "cache_type_v"):
            if getattr(context, field) != getattr(default, field):
                extras += [spellings()[field].partition("/")[0], str(getattr(context, field))]
        if made.used and self._draft_window != WINDOW:
            extras += [spellings()["draft.window"].partition("/")[0], str(self._draft_window)]
        hub = self.options[HubSettings]
        extras += ["-hff", hub.file] if hub.file is not None else []
        return GenerateCommand(
            model=hub.repo or self.models.target or Path("target.gguf"),
            drafters=[word for drafter in made.used for word in drafter.flags],
            extras=extras,
            hosts=hosts,
            hostfile=self.options[RankSettings].hostfile,
        )


def _measure(request: _Request) -> int:
    """Profile the ranks, and use the profile to plan on the first one."""
    options, settings, hostfile = request.options, request.settings, request.options[RankSettings].hostfile
    hosts = slots_of(hostfile) if has_user() else []
    config = engine_config(options)
    if settings.mode == "iterative":
        config = replace(config, drafts=())

    def check(n_ranks: int) -> None:
        if settings.n_ranks is not None and settings.n_ranks > n_ranks:
            raise LaunchError(
                Setting("n_ranks"), f" is {settings.n_ranks}, but {n_ranks} ranks were started: lower it, or omit it"
            )

    n_ranks = len(hosts) or settings.n_ranks or 1
    work = ProfileWork(None, settings.seconds)
    of_ranks = RankSetup(config=config, verbose=options[LogSettings].verbose, profile=work)
    measured = run_profile(of_ranks, n_ranks, hostfile, check)
    if measured is not None:  # the ranks have exited: they need not wait for the plan
        names = list(dict.fromkeys(rank.host for rank in measured.ranks))
        request.show(spec_from_profile(measured, ", ".join(names)), hosts)
    return 0
