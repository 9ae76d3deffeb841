"""Automatic splits: the ranks measure themselves, and the head plans a split for exactly these ranks."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import cast

import msgspec

from ggpipe._version import __version__
from ggpipe.cluster.from_profile import spec_from_profile
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.profile import Profile, RankProfile
from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import WINDOW
from ggpipe.config.engine import EngineConfig
from ggpipe.config.layer_split import LayerSplit, text_of
from ggpipe.config.model import TARGET
from ggpipe.core.layout import layer_range
from ggpipe.engine import wiring
from ggpipe.engine.control_channel import ControlChannel
from ggpipe.engine.process import run_alike
from ggpipe.errors import IndivisibleModelError, MemoryNeededError, RunError, Setting, Wording
from ggpipe.launch import sockets
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import most_parts
from ggpipe.llama.model_shape import shape_of
from ggpipe.planning import profile_cache
from ggpipe.planning.candidates import Constraints
from ggpipe.planning.plan import Plan
from ggpipe.planning.planner import PlanRequest, make_plan
from ggpipe.profiling.profile import kernels_of, profile_ranks
from ggpipe.sim.limits import Sizes
from ggpipe.sim.simulation_spec import SyntheticText
from ggpipe.transport.base import HEAD, Transport
from ggpipe.transport.control import RankFacts, StartProfile, UseSplit

_BUDGET_S = 1.5
_AGREEMENT, _N_PROMPT = 0.7, 128
_EFFORT = 0.25


Channel = ControlChannel[None]


def settle(
    transport: Transport, attend: Callable[[], None], config: EngineConfig, say: Callable[[str | Wording], None]
) -> EngineConfig:
    """Plan a split for exactly these ranks. All ranks call this, and get the same config. On the head, `say` gets a
    line for the user.

    A model that does not fit is divided in proportion to the machines' memory if its weights may be streamed.

    Raises on the head the error of any rank, or UsageError if the model does not fit; RankError on the other ranks.
    """
    channel: Channel = ControlChannel(transport, attend)
    with channel.failing_together():
        if transport.rank != HEAD:
            return _with_split(config, _follow(channel, config))
        profile = _measured(channel, config)
        try:
            if transport.size == 1:
                plan = _plan(config, profile, n_ranks=1, attend=attend)
                config = _with_threads(config, plan)
            else:
                plan = _plan(config, profile, in_order=True, attend=attend)
            split, line = _split(plan), _chosen(plan)
        except MemoryNeededError:
            if not _streams(config):
                raise
            split = _by_memory(config, profile.ranks)
            text = text_of((split.target, split.draft) if config.drafts else (split.target,))
            line = f"layer split {text}: in proportion to the machines' memory"
        channel.send_to_all(split)
    say(line)
    return _with_split(config, split)


def ranks_here(config: EngineConfig) -> int:
    """The best number of ranks on this machine: one per socket if they can form a group, otherwise one; and another for
    the draft if that is faster."""
    n_sockets = sockets.free_sockets(os.sched_getaffinity(0), sockets.SYSFS)
    may_group = n_sockets > 1 and config.model.numa is None and _may_group(config)
    if may_group and most_parts(ModelFile.open(config.model.path)) >= n_sockets:
        return n_sockets + bool(config.drafts)
    if not config.drafts or machine.cores() == 1:
        return 1
    profile = run_alike(config, lambda transport, attend, _: _measured(ControlChannel(transport, attend), config))
    try:
        return len(_plan(config, profile).ranks)
    except MemoryNeededError:
        if not _streams(config):
            raise
        return 1


def _follow(channel: Channel, config: EngineConfig) -> UseSplit:
    """Wait for the split that the head chose (called on every rank except the head)."""
    channel.send(HEAD, _facts(channel.transport, config))
    order = channel.receive().message
    if isinstance(order, StartProfile):
        profile_ranks(channel.transport, config, budget_s=_BUDGET_S, attend=channel.attend)
        order = channel.receive().message
    if not isinstance(order, UseSplit):
        raise RunError(f"the head sent {type(order).__name__} instead of UseSplit: use one ggpipe everywhere")
    return order


def _measured(channel: Channel, config: EngineConfig) -> Profile:
    """The profile of all ranks, from the cache or measured now, with the memory that is available now."""
    transport = channel.transport
    facts = [_facts(transport, config), *channel.gather(RankFacts, range(1, transport.size)).values()]
    lasting = [msgspec.structs.asdict(msgspec.structs.replace(own, memory_bytes=0)) for own in facts]
    key = profile_cache.key_of([msgspec.to_builtins(kernels_of(config)), *lasting])
    profile = profile_cache.find(key, transport.size, facts[HEAD].drafts)
    if profile is None:
        channel.send_to_all(StartProfile())
        profile = _profile(channel, config)
        profile_cache.keep(key, profile)
    ranks = (replace(rank, memory_bytes=facts[rank.rank].memory_bytes) for rank in profile.ranks)
    return replace(profile, ranks=tuple(ranks))


def _profile(channel: Channel, config: EngineConfig) -> Profile:
    """Measure all ranks, on the head. A model that cannot be divided is measured whole, on one rank."""

    def measure(layers: tuple[int, int] | None) -> Profile:
        profile = profile_ranks(channel.transport, config, layers, _BUDGET_S, channel.attend)
        return cast(Profile, profile)  # this is the head

    try:
        return measure(None)
    except IndivisibleModelError as e:
        model_file = ModelFile.open(config.model.path)
        if channel.transport.size > 1:
            raise IndivisibleModelError(
                f"'{model_file.architecture}' models cannot be divided between ranks; run it on one rank (without ",
                Setting("layer_split"),
                ")",
            ) from e
        return measure((0, model_file.n_layer))


def _facts(transport: Transport, config: EngineConfig) -> RankFacts:
    """The facts about this rank. Raises ModelError for a model that cannot be read."""
    return RankFacts(
        host=transport.host,
        target=ModelFile.open(config.model.path).fingerprint,
        drafts=tuple(ModelFile.open(draft.model.path).fingerprint for draft in config.drafts if not draft.is_mtp),
        threads=wiring.threads_of(config, transport, TARGET),
        ranks_on_host=transport.ranks_on_host,
        cpu=machine.cpu_name(),
        cores=wiring.machine_cores(transport),
        cpu_features=tuple(machine.cpu_features()),
        ggpipe=__version__,
        libllama=machine.libllama_version(),
        memory_bytes=machine.available_bytes(),
    )


def _plan(
    config: EngineConfig,
    profile: Profile,
    *,
    n_ranks: int | None = None,
    in_order: bool = False,
    attend: Callable[[], None] = lambda: None,
) -> Plan:
    spec = spec_from_profile(profile, "these ranks")
    context, threads = config.context, config.pipeline.threads
    has_flash_attn = context.flash_attn != "off"
    n_prefixes = config.n_prefixes(context)

    def shape(path: Path, own: ContextConfig) -> ModelShape:
        types = (own.cache_type_k, own.cache_type_v, has_flash_attn)
        return shape_of(ModelFile.open(path), *types, own.n_seq, n_prefixes, own.n_states)

    target = shape(config.model.path, context)
    draft, draft_threads, window = None, -1, WINDOW
    for own in config.drafts:
        draft = shape(own.model.path, own.context).with_window(own.window, config.n_requests)
        draft_threads, window = own.threads, own.window
    constraints = Constraints(
        n_ctx=context.n_ctx,
        n_ubatch=context.n_ubatch,
        n_ranks=n_ranks,
        in_order=in_order,
        threads=threads[0] if len(threads) == 1 and threads[0] > 0 else None,
        draft_threads=draft_threads if draft_threads > 0 else None,
        must_draft=draft is not None,
        groups=_may_group(config),
        streams=_streams(config),
    )
    sizes = Sizes(context.n_ctx, context.n_batch, context.n_ubatch, window=window)
    request = PlanRequest(
        constraints=constraints,
        tokens=SyntheticText(agreement=_AGREEMENT, n_prompt=_N_PROMPT),
        sizes=sizes,
        mode="iterative" if draft is None else "async",
        tunes=False,
        effort=_EFFORT,
    )
    return make_plan(spec, target, draft, request, lambda _done, _total: attend())


def _may_group(config: EngineConfig) -> bool:
    """Whether the settings allow groups, which `EngineConfig` rejects otherwise."""
    context = config.context
    return not (context.exact or context.flash_attn == "off" or config.model.loras)


def _streams(config: EngineConfig) -> bool:
    """Whether a model that does not fit is loaded all the same."""
    return config.model.streams or (config.may_stream and not config.pipeline.check_memory)


def _by_memory(config: EngineConfig, ranks: Sequence[RankProfile]) -> UseSplit:
    """Each rank's share of the layers is its share of the memory. The draft model has a rank of its own, the last one,
    only if that leaves no machine without layers."""
    hosts = [rank.host for rank in ranks]
    drafts_apart = bool(config.drafts) and hosts[-1] in hosts[:-1]
    if drafts_apart:
        ranks, hosts = ranks[:-1], hosts[:-1]
    memory = [rank.memory_bytes / hosts.count(rank.host) for rank in ranks]
    target = LayerSplit(tuple(round(own / sum(memory), 3) for own in memory)).filled
    return UseSplit(target, LayerSplit((1.0,)) if drafts_apart else None)


def _split(plan: Plan) -> UseSplit:
    target, draft = (*plan.placement.layer_splits, None)[:2]
    assert target is not None
    return UseSplit(target, draft, plan.placement.tensor_split)


def _with_split(config: EngineConfig, split: UseSplit) -> EngineConfig:
    drafts = tuple(replace(draft, layer_split=split.draft) for draft in config.drafts)
    pipeline = replace(config.pipeline, layer_split=split.target, tensor_split=split.tensor_split, auto=False)
    return replace(config, pipeline=pipeline, drafts=drafts)


def _with_threads(config: EngineConfig, plan: Plan) -> EngineConfig:
    """The config with the plan's threads where the user named none. On one rank, target and draft divide the cores."""
    pipeline, drafts, draft_threads = config.pipeline, config.drafts, plan.placement.draft_threads
    if pipeline.threads == (-1,):
        pipeline = replace(pipeline, threads=plan.placement.threads[:1])
    if draft_threads is not None:
        drafts = tuple(replace(own, threads=draft_threads) if own.threads == -1 else own for own in drafts)
    return replace(config, pipeline=pipeline, drafts=drafts)


def _chosen(plan: Plan) -> str:
    """A line for the user about the plan."""
    placement = plan.placement
    assert placement.layout is not None
    text = text_of(placement.layer_splits)
    n_target = len(placement.target_on)
    draft = ""
    if placement.draft_on:
        draft = f", the draft on rank {n_target}"
    elif placement.draft_threads is not None:
        draft = ", the draft inside the first rank"
    stages = dict.fromkeys(map(placement.layout.stage_of, range(n_target)))
    layers = [layer_range(stage.layers) for stage in stages]
    return f"layer split {text}: layers {', '.join(layers)}{draft}{_reason(plan)}"


def _reason(plan: Plan) -> str:
    """Why the plan has groups; empty if it has none."""
    if plan.alternative is None or not plan.placement.has_groups:
        return ""
    speed, slower = plan.best.tokens_per_s, plan.alternative[1].tokens_per_s
    divided = ":".join(f"{weight:g}" for weight in plan.placement.tensor_split)
    split = f", tensors divided {divided}" if divided else ""
    return f"{split}; {speed:.3g} t/s estimated, against {slower:.3g} without groups"
