"""`ggpipe simulate`: `generate` on a virtual cluster."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import get_args

from ggpipe.cli.messages import show
from ggpipe.cli.simulated import drafts_of, shapes_of, text_of, traffic_of
from ggpipe.cluster.receipt import read as read_receipt
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.cluster.toml import read_cluster
from ggpipe.config.context import ContextConfig
from ggpipe.config.pipeline import PipelineConfig
from ggpipe.config.speculation import Mode, SpeculationConfig
from ggpipe.core.drafters import registry
from ggpipe.display.figures.canvas import check_plottable
from ggpipe.display.figures.trace import write_trace
from ggpipe.display.files import check_writable
from ggpipe.display.progress import SimulationProgress
from ggpipe.display.tables.receipt import print_comparison, write_comparison
from ggpipe.display.tables.simulation import (
    plot_simulation,
    print_simulation,
    write_csv,
    write_requests_csv,
    write_results,
)
from ggpipe.errors import Setting, SettingError, UsageError, Wording
from ggpipe.options.engine_config import (
    check_draft,
    draft_threads,
    draft_window,
    given_mode,
    speculation_config,
)
from ggpipe.options.option import Options
from ggpipe.options.settings import (
    ClusterSettings,
    RankSettings,
    SimulatedDrafters,
    SimulatedText,
    SimulatedTraffic,
    SimulateSettings,
)
from ggpipe.sim.against_receipt import compare
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import TRAFFIC_NAMES, SimulationSpec
from ggpipe.sim.sweep import Combination, parse_axis, sweep
from ggpipe.sim.virtual_cluster import VirtualPlacement, placement_of, threads_of, with_drafts, with_splits

_N_TEXT = 256


def run(options: Options) -> int:
    """Simulate, print and write the results, and return the exit code."""
    settings = options[SimulateSettings]
    if settings.against is not None:
        return _against(settings.against, options)
    axes = [parse_axis(text) for text in settings.sweep]
    traffic = traffic_of(options[SimulatedTraffic], options[SimulatedText].seed)
    is_shared = traffic is not None or any(axis.name in TRAFFIC_NAMES for axis in axes)
    _check_files(settings, options[SimulatedTraffic].requests_csv, len(axes), is_shared)
    spec = replace(_spec(options), traffic=traffic)
    if not any(axis.name == "group" for axis in axes):
        _check_tensor_split(spec.placement)
    modes = _modes(spec, options)
    with SimulationProgress() as progress:
        found = sweep(spec, axes, modes, progress)
    print_simulation(spec, found, modes)
    _write(settings, spec, found, modes)
    if (path := options[SimulatedTraffic].requests_csv) is not None:
        write_requests_csv(path, found[0])
    return 0


def _against(path: Path, options: Options) -> int:
    """Compare the simulator with a receipt. Returns the exit code."""
    if others := [name for name in options.given if name not in ("against", "json")]:
        raise SettingError(
            others[0], Wording("does not go with ", Setting("against")), "a receipt has its own settings"
        )
    json = options[SimulateSettings].json
    check_writable(json)
    receipt = read_receipt(path)
    with SimulationProgress() as progress:
        found = compare(receipt, progress)
    print_comparison(receipt, found)
    if json is not None:
        write_comparison(json, receipt, found)
    return 0


def _check_files(settings: SimulateSettings, requests_csv: Path | None, n_axes: int, is_shared: bool) -> None:
    check_writable(settings.csv, settings.json, settings.plot, settings.trace, requests_csv)
    if settings.plot is not None:
        check_plottable(settings.plot)
        if n_axes > 2:
            raise SettingError(
                "plot",
                f"can show one or two swept names, not {n_axes}",
                Wording("write a ", Setting("csv"), " instead"),
            )
        if is_shared and not n_axes:
            raise SettingError(
                "plot", "needs a single request, or a sweep", Wording("add ", Setting("sweep"), " users=1..8")
            )
    if settings.trace is not None and is_shared:
        raise SettingError("trace", "needs a single request", "omit it, or simulate one request")
    if n_axes:
        for name, path in (("requests_csv", requests_csv), ("trace", settings.trace)):
            if path is not None:
                raise SettingError(name, "needs a single simulation", Wording("omit ", Setting("sweep")))


def _spec(options: Options) -> SimulationSpec:
    path = options[ClusterSettings].path
    assert path is not None
    cluster, given, context = read_cluster(path), options[RankSettings].layer_split, options[ContextConfig]
    if given == "auto":
        raise SettingError("layer_split", "auto cannot be simulated", "give shares, or use `ggpipe plan`")
    if given is not None:
        cluster = with_splits(cluster, given)
    given_target, files = shapes_of(options)
    target, drafters = given_target or cluster.target, options[SimulatedDrafters]
    if target is None:
        raise UsageError(f"{path} does not describe a target model: name one with ", Setting("model"))
    drafts = drafts_of(drafters, files, cluster.draft, target)
    cluster = with_drafts(cluster, len(drafts))
    placement = placement_of(cluster, target, drafts)
    pipeline = options[PipelineConfig]
    placement = _with_threads(cluster, placement, pipeline, draft_threads(options))
    placement = replace(placement, tensor_split=pipeline.tensor_split, tensor_wire=pipeline.tensor_wire)
    sizes = Sizes(context.n_ctx, context.n_batch, context.n_ubatch, window=draft_window(options))
    text = options[SimulatedText]
    n_predict = text.n_predict if text.n_predict > 0 or text.recording is not None else _N_TEXT
    return SimulationSpec(
        cluster=cluster,
        placement=placement,
        target=target,
        drafts=drafts,
        speculation=_speculation(options),
        tokens=text_of(text, drafters, len(drafts)),
        n_predict=n_predict,
        sizes=sizes,
    )


def _speculation(options: Options) -> SpeculationConfig:
    """How to draft, and with which drafters."""
    speculation, kinds = speculation_config(options), options[SimulatedDrafters].kinds
    if kinds is None:
        return speculation
    if speculation.drafters is not None:
        raise SettingError("spec_type", Wording("and ", Setting("drafters"), " both name drafters"), "omit one of them")
    return replace(speculation, drafters=kinds)


def _with_threads(
    cluster: ClusterSpec, placement: VirtualPlacement, given: PipelineConfig, draft: int
) -> VirtualPlacement:
    """The placement with the threads that were given; -1: as in the cluster file, or all cores."""
    n_ranks, n_target = len(placement.node_of), len(placement.target_on)
    if len(given.threads) not in (1, n_ranks):
        raise SettingError(
            "threads", f"has {len(given.threads)} values for {n_ranks} ranks", "give one value, or one per rank"
        )
    own = [given.threads_of(rank, threads_of(cluster, placement, rank))[0] for rank in range(n_ranks)]
    if draft > 0:
        own[n_target:] = [draft] * (n_ranks - n_target)
    return replace(placement, threads=tuple(own), draft_threads=draft if draft > 0 else None)


def _check_tensor_split(placement: VirtualPlacement) -> None:
    """Raises SettingError for proportions that do not apply to any group."""
    n = len(placement.tensor_split)
    if n and n not in placement.group_sizes:
        raise SettingError(
            "tensor_split", f"has {n} values, but no group has {n} ranks", "give one value per rank of a group"
        )


def _modes(spec: SimulationSpec, options: Options) -> list[Mode]:
    """The modes to simulate. Sweeps, plots and traces show details of the last one."""
    mode = given_mode(options)
    kinds = [draft.drafter for draft in spec.drafts]
    if registry.MTP in (spec.speculation.drafters or ()) and registry.MTP not in kinds:
        raise SettingError("spec_type", "mtp is not simulated this way", Wording("use ", Setting("drafters"), " mtp"))
    if lacking := [name for name in spec.speculation.drafters or () if name in registry.HEADS and name not in kinds]:
        advice = Wording("name one with ", Setting("draft.model"), ", or use ", Setting("drafters"), f" {lacking[0]}")
        raise SettingError("spec_type", f"{lacking[0]} needs {registry.model_of(lacking[0])}", advice)
    if not registry.chosen(spec.speculation.drafters, kinds):
        if mode in ("speculative", "async"):
            check_draft(options, Wording(Setting("mode"), f" {mode}"))
        show(Wording("simulating only iterative, without a draft model: name one with ", Setting("draft.model")))
        return ["iterative"]
    return [mode] if mode else list(get_args(Mode))


def _write(
    settings: SimulateSettings, spec: SimulationSpec, found: Sequence[Combination], modes: Sequence[Mode]
) -> None:
    if settings.csv is not None:
        write_csv(settings.csv, found)
    if settings.json is not None:
        write_results(settings.json, spec, found)
    if settings.plot is not None:
        plot_simulation(settings.plot, spec, found, modes)
    if settings.trace is not None:
        request = found[0].by_mode[modes[-1]].requests[0]
        write_trace(settings.trace, request, request.ranks)
