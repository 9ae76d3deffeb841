"""`--mpi-layer-split auto`: ranks measure themselves, the first one plans for exactly these and tells the others."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from typing import Any

import ggpipe
from ggpipe.config import EngineConfig
from ggpipe.core.layout import parse_shares, shares_text
from ggpipe.display.wording import layer_range
from ggpipe.engine import machine
from ggpipe.engine.model_file import ModelFile
from ggpipe.errors import GgpipeError, ModelError, RankError
from ggpipe.runtime import startup
from ggpipe.runtime.line import Line
from ggpipe.runtime.profiling import profile_ranks
from ggpipe.runtime.rank import run_alike
from ggpipe.sim import profile_cache
from ggpipe.sim.candidates import Needs
from ggpipe.sim.model_shape import shape_of
from ggpipe.sim.planner import Plan, Wish, make_plan
from ggpipe.sim.profile import Kernels, Profile
from ggpipe.sim.profiled import spec_from_profile
from ggpipe.sim.setup import MadeUp
from ggpipe.sim.simulator import Sizes
from ggpipe.transport.base import Transport

_HEAD = 0
_BUDGET_S = 1.5
_ACCEPTANCE, _N_PROMPT = 0.7, 128
_EFFORT = 0.25


def settle(transport: Transport, attend: Callable[[], None], config: EngineConfig) -> EngineConfig:
    """The config with shares for exactly these ranks. All ranks call it, each gets the same shares.

    Raises on the first rank what any rank met, UsageError when the model does not fit, and RankError on the others.
    """
    line = Line(transport, attend)
    if transport.rank != _HEAD:
        return _follow(line, config)
    try:
        profile = _measured(line, config)
        if transport.size == 1:
            plan = _plan(config, profile, n_ranks=1)
            config = _with_threads(config, plan)
        else:
            plan = _plan(config, profile, in_order=True)
        text = _shares_text(plan)
    except BaseException:
        line.tell_all("quit")
        raise
    line.tell_all("split", shares=text)
    print(f"ggpipe: {_chosen(plan, text)}", file=sys.stderr)
    return _with_shares(config, text)


def ranks_here(config: EngineConfig) -> int:
    """How many ranks are best on this machine alone: one, or one more for the draft."""
    if config.draft is None or machine.cores() == 1:
        return 1
    found: list[int] = []

    def work(transport: Transport, attend: Callable[[], None]) -> int:
        found.append(len(_plan(config, _measured(Line(transport, attend), config)).ranks))
        return 0

    run_alike(config, work)
    return found[0]


def _follow(line: Line, config: EngineConfig) -> EngineConfig:
    try:
        line.tell(_HEAD, "facts", **_facts(line.transport, config))
        order = line.told()
        if order["kind"] == "measure":
            profile_ranks(line.transport, config, budget_s=_BUDGET_S, attend=line.attend)
            order = line.told()
    except RankError:
        raise
    except GgpipeError as e:
        line.tell(_HEAD, "failed", **startup.failure(line.transport, e))
        line.wait_for_quit()
    return _with_shares(config, order["shares"])


def _measured(line: Line, config: EngineConfig) -> Profile:
    """What all ranks can do: as it is known from before, or measured now. Their free memory is what it is now."""
    transport = line.transport
    facts = [_facts(transport, config), *line.gather("facts", range(1, transport.size))]
    kernels = Kernels(
        config.context.cache_type_k, config.context.cache_type_v, config.context.flash_attn, config.context.exact,
        config.model.repack,
    )  # fmt: skip
    fresh = ("kind", "memory_bytes")
    key = profile_cache.key_of(
        [asdict(kernels), *({name: own[name] for name in own if name not in fresh} for own in facts)]
    )
    profile = profile_cache.find(key, transport.size, facts[0]["draft"])
    if profile is None:
        line.tell_all("measure")
        profile = _profile(line, config)
        profile_cache.keep(key, profile)
    memory = [own["memory_bytes"] for own in facts]
    return replace(profile, ranks=tuple(replace(rank, memory_bytes=memory[rank.rank]) for rank in profile.ranks))


def _profile(line: Line, config: EngineConfig) -> Profile:
    """The first rank's part of measuring. A model that cannot be cut is measured whole, on one rank."""

    def measure(layers: tuple[int, int] | None) -> Profile:
        profile = profile_ranks(line.transport, config, layers, _BUDGET_S, line.attend)
        assert profile is not None
        return profile

    try:
        return measure(None)
    except ModelError as e:
        if "cannot be cut" not in str(e):
            raise
        model_file = ModelFile.open(config.model.path)
        if line.transport.size > 1:
            raise ModelError(
                f"'{model_file.architecture}' models cannot be cut between ranks; run it on one rank (without "
                "--mpi-layer-split)"
            ) from e
        return measure((0, model_file.n_layer))


def _facts(transport: Transport, config: EngineConfig) -> dict[str, Any]:
    """What this rank's speed depends on. Raises ModelError for a model that cannot be read."""
    draft = config.draft
    return {
        "rank": transport.rank,
        "host": transport.host,
        "model": ModelFile.open(config.model.path).fingerprint,
        "draft": ModelFile.open(draft.model.path).fingerprint if draft is not None else None,
        "threads": list(startup.threads_of(config, transport, False)),
        "ranks_on_host": transport.ranks_on_host,
        "cpu": [machine.cpu_name(), machine.cores(), *machine.cpu_features()],
        "versions": [ggpipe.__version__, machine.libllama_version()],
        "memory_bytes": machine.available_bytes(),
    }


def _plan(config: EngineConfig, profile: Profile, *, n_ranks: int | None = None, in_order: bool = False) -> Plan:
    spec = spec_from_profile(profile, "these ranks")
    context, threads = config.context, config.pipeline.threads
    has_flash_attn = context.flash_attn != "off"
    target = shape_of(ModelFile.open(config.model.path), context.cache_type_k, context.cache_type_v, has_flash_attn)
    draft, draft_threads = None, -1
    if config.draft is not None:
        own = config.draft.context
        draft = shape_of(ModelFile.open(config.draft.model.path), own.cache_type_k, own.cache_type_v, has_flash_attn)
        draft_threads = config.draft.threads
    needs = Needs(
        context.n_ctx,
        context.n_ubatch,
        n_ranks,
        in_order,
        threads=threads[0] if len(threads) == 1 and threads[0] > 0 else None,
        draft_threads=draft_threads if draft_threads > 0 else None,
        must_draft=draft is not None,
    )
    sizes = Sizes(context.n_ctx, context.n_batch, context.n_ubatch)
    wish = Wish(
        needs, MadeUp(_ACCEPTANCE, _N_PROMPT), sizes, "iterative" if draft is None else "async", tunes=False,
        effort=_EFFORT,
    )  # fmt: skip
    return make_plan(spec, target, draft, wish)


def _shares_text(plan: Plan) -> str:
    placement = plan.placement
    assert placement.layout is not None
    return shares_text(placement.layout, placement.draft_layout)


def _with_shares(config: EngineConfig, text: str) -> EngineConfig:
    shares, draft_shares = parse_shares(text)
    draft = config.draft
    if draft is not None:
        draft = replace(draft, shares=draft_shares)
    return replace(config, pipeline=replace(config.pipeline, shares=shares, auto=False), draft=draft)


def _with_threads(config: EngineConfig, plan: Plan) -> EngineConfig:
    """On one rank, the threads of the plan where the user names none: target and draft divide the cores."""
    pipeline, draft = config.pipeline, config.draft
    if pipeline.threads == (-1,):
        pipeline = replace(pipeline, threads=plan.placement.threads[:1])
    if draft is not None and draft.threads == -1 and plan.placement.draft_threads is not None:
        draft = replace(draft, threads=plan.placement.draft_threads)
    return replace(config, pipeline=pipeline, draft=draft)


def _chosen(plan: Plan, text: str) -> str:
    """One line for the user."""
    placement = plan.placement
    n_target = len(placement.target_on)
    draft = ""
    if placement.draft_on:
        draft = f", the draft on rank {n_target}"
    elif placement.draft_threads is not None:
        draft = ", the draft inside the first rank"
    layers = [layer_range(rank.layers) for rank in plan.ranks[:n_target]]
    return f"--mpi-layer-split {text}: layers {', '.join(layers)}{draft}"
