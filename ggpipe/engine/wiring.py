"""What a rank is built from: its threads, files, group and stage, each made of the config and the transport."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import replace

from ggpipe.config.draft import DraftConfig, draft_cells
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import TARGET
from ggpipe.core import overtaking
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.base import HeadNeeds
from ggpipe.core.layout import part_shares
from ggpipe.llama import draft_heads, machine, mtp
from ggpipe.llama.eagle3 import TargetStates
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import Membership
from ggpipe.llama.layers import OnProgress
from ggpipe.llama.libllama import native
from ggpipe.llama.model_header import ModelHeader
from ggpipe.llama.model_shape import shape_of
from ggpipe.llama.prompt_cache import PrefixFiles, PromptCache
from ggpipe.llama.stage import Stage
from ggpipe.transport.base import Transport
from ggpipe.transport.loading_messages import StageContext


def threads_of(config: EngineConfig, transport: Transport, model: int) -> tuple[int, int]:
    """This rank's threads for single tokens and for batches of the model of this id."""
    own_cores = max(int(machine.cores() / transport.ranks_on_cores), 1)
    single, batch = config.pipeline.threads_of(transport.rank, own_cores)
    if isinstance(part := config.part_of(model), DraftConfig):
        if part.threads > 0:
            single = batch = part.threads
        if part.threads_batch > 0:
            batch = part.threads_batch
    return single, batch


def machine_cores(transport: Transport) -> int:
    """Physical cores of this rank's machine that its ranks may run on: this rank's, and those of ranks bound to
    others."""
    return round(machine.cores() * transport.ranks_on_host / transport.ranks_on_cores)


def poll_s(config: EngineConfig) -> tuple[float, float]:
    """Seconds between two polls for messages while a rank computes, at least and at most.

    With speculation a cancel or a correction may be among them, which are worth an early poll.
    """
    return (0.2e-3, 0.4e-3) if config.drafts else (1e-3, 10e-3)


def prompt_cache(config: EngineConfig, transport: Transport) -> PromptCache | None:
    """This rank's file, if there is to be one. Raises SettingError where it can be seen that it cannot be used."""
    if config.prompt_cache is None:
        return None
    return PromptCache(config.prompt_cache.path, transport.rank, read_only=config.prompt_cache.saves == "nothing")


def prefix_files(config: EngineConfig, transport: Transport, model: int) -> PrefixFiles | None:
    """This rank's saved prefixes, if there are to be any; drafts have none. Raises SettingError."""
    if config.slot_save_path is None or model != TARGET:
        return None
    return PrefixFiles(config.slot_save_path, transport.rank)


def membership(config: EngineConfig, transport: Transport, ranks: Sequence[int]) -> Membership | None:
    """This rank's in the group of these ranks; None where it is alone."""
    if len(ranks) == 1:
        return None
    pipeline = config.pipeline
    over_messages = functools.partial(native.mpi_sum, halves=pipeline.tensor_wire == "f16")

    def connect() -> native.GroupSum:
        return transport.join_group(ranks, native.shared_sum, over_messages)

    shares = part_shares(len(ranks), pipeline.tensor_split)
    return Membership(ranks.index(transport.rank), shares, connect)


def stage_loader(
    config: EngineConfig,
    transport: Transport,
    model_file: ModelFile,
    layers: tuple[int, int],
    model: int,
    files: Sequence[PromptCache | PrefixFiles | None] = (),
    group: Membership | None = None,
    warmup: bool = False,
    inputs: Sequence[int] = (),
    stream_memory_gb: float | None = None,
) -> Callable[[OnProgress], Stage]:
    """A function that makes this rank's stage of the model of this id, given a callback for its progress, and describes
    it to those of `files` that there are. `group`: that of the ranks that hold these layers together, if there are
    several. `warmup`, `inputs`: see `Stage`. `stream_memory_gb`: for weights that are streamed; None: as in the config.
    """
    threads, part = threads_of(config, transport, model), config.part_of(model)
    weights, context = part.model, part.context
    if isinstance(part, DraftConfig):
        context = replace(context, n_ctx=draft_n_ctx(part, model_file, config.n_requests))
    if stream_memory_gb is not None:
        weights = replace(weights, load_mode="stream", stream_memory_gb=stream_memory_gb)
    is_only, may_pause = layers == (0, model_file.n_layer), model == TARGET and config.n_requests > 1
    shares_cores = model != TARGET and transport.ranks_on_host > config.n_draft_ranks

    def load(progress: OnProgress) -> Stage:
        if shares_cores:
            machine.yield_to_others()
        n_prefixes = config.n_prefixes(context)
        saves_states = n_prefixes > 0 and any(one is not None for one in files)
        stage = Stage(
            model_file,
            layers,
            weights,
            context,
            threads,
            progress,
            n_prefixes,
            saves_states,
            group.join() if group is not None else None,
            warmup,
            inputs,
            pauses=may_pause and overtaking.pays(is_only, shape_of(model_file).sparsity),
        )
        for one in files:
            if one is not None:
                one.describe(stage, model_file, part.model, context)
        return stage

    return load


def draft_n_ctx(draft: DraftConfig, model_file: ModelFile, n_requests: int) -> int:
    """Size of a draft model's context. Recurrent and hybrid models cannot forget a part of a text, so they see all."""
    header = ModelHeader(model_file)
    n_ctx = draft.context.n_ctx or header.number("context_length")
    if draft.is_mtp or header.is_recurrent or not registry.has_window(registry.kind_of(model_file.architecture)):
        return n_ctx
    return draft_cells(n_ctx, draft.window, n_requests)


def needs_of(config: EngineConfig, model: int, model_file: ModelFile) -> HeadNeeds | None:
    """What the model of this id reads of the target. None where it reads nothing: it is no draft head."""
    return mtp.needs_of(model_file) if config.is_mtp(model) else draft_heads.needs_of(model_file)


def head_loader(
    config: EngineConfig,
    transport: Transport,
    model_file: ModelFile,
    model: int,
    target_states: TargetStates,
    warmup: bool = False,
) -> Callable[[OnProgress], Stage]:
    """As `stage_loader`, for a draft head or MTP layers, which read `target_states`."""
    part = config.part_of(model)
    stage = mtp.MtpStage if config.is_mtp(model) else draft_heads.STAGES[model_file.architecture]

    def load(progress: OnProgress) -> Stage:
        if transport.ranks_on_host > config.n_draft_ranks:
            machine.yield_to_others()
        threads, n_prefixes = threads_of(config, transport, model), config.n_prefixes(part.context)
        return stage(model_file, part.model, part.context, threads, target_states, progress, n_prefixes, warmup)

    return load


def context_of(stage: Stage) -> StageContext:
    """What other ranks need to know about a loaded stage's context."""
    return StageContext(
        n_ctx=stage.n_ctx,
        n_batch=stage.n_batch,
        exact_in_company=stage.exact_in_company,
        n_prefixes=stage.n_prefixes,
        n_branches=stage.n_branches,
        partial_prefixes=stage.partial_prefixes,
        rolls_back=stage.rolls_back,
        most_taken_back=stage.most_taken_back,
        can_pause=stage.pauses is not None,
    )
