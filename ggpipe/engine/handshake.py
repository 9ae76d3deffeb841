"""How ranks find out, before anything is loaded, that they fit together."""

from __future__ import annotations

import contextlib
import functools
import itertools
from collections.abc import Callable, Sequence

from ggpipe._version import __version__
from ggpipe.cluster.memory import USABLE, memory_by_rank
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.config.engine import TARGET, DraftConfig, EngineConfig
from ggpipe.core.layout import Layout, part_shares
from ggpipe.errors import IndivisibleModelError, LaunchError, MemoryNeededError, ModelError
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.group import Membership
from ggpipe.llama.layers import Progress
from ggpipe.llama.libllama import native
from ggpipe.llama.model_shape import shape_of
from ggpipe.llama.prompt_cache import PrefixFiles, PromptCache
from ggpipe.llama.stage import Cut, Stage
from ggpipe.transport.base import Transport
from ggpipe.transport.control import Hello


def hello(transport: Transport, model_file: ModelFile, model: int) -> Hello:
    """This rank's part of the handshake; `model`: id of the model whose file that is."""
    return Hello(
        host=transport.host,
        model=model,
        fingerprint=model_file.fingerprint,
        architecture=model_file.architecture,
        n_layer=model_file.n_layer,
        sparsity=shape_of(model_file).sparsity,
        ggpipe=__version__,
        libllama=machine.libllama_version(),
        cpu_features=tuple(sorted(machine.cpu_features())),
        memory_bytes=machine.available_bytes(),
    )


def compare(hellos: Sequence[Hello]) -> list[str]:
    """Do all ranks hold the same? Returns warnings. Raises ModelError or LaunchError where they cannot work together.

    `hellos`: one for each rank, in order.
    """
    head, warnings = hellos[0], []
    for rank, other in enumerate(hellos):
        where = f"rank {rank} ({other.host})"
        first_rank, first = next((i, hello) for i, hello in enumerate(hellos) if hello.model == other.model)
        if other.fingerprint != first.fingerprint:
            raise ModelError(
                f"{where} has another model than rank {first_rank} ({first.host}) as "
                f"{'`model`' if other.model == TARGET else '`draft.model`'}: copy it there again"
            )
        versions = (("ggpipe", other.ggpipe, head.ggpipe), ("libllama", other.libllama, head.libllama))
        for package, version, wanted in versions:
            if version != wanted:
                raise LaunchError(
                    f"{where} runs {package} {version}, rank 0 runs {wanted}: install the same everywhere"
                )
        if other.cpu_features != head.cpu_features:
            differ = sorted(set(other.cpu_features) ^ set(head.cpu_features))
            warnings.append(f"{where} uses other CPU features than rank 0 ({', '.join(differ)}): texts may differ")
    return warnings


def check_memory(
    hellos: Sequence[Hello],
    config: EngineConfig,
    model_file: ModelFile,
    layout: Layout,
    draft_layouts: Sequence[Layout],
) -> None:
    """Does each machine have the memory that its ranks need? Raises MemoryNeededError.

    `hellos`: as for `compare`. `draft_layouts`: of the config's draft models. A draft model counts where this rank has
    its file as well.
    """
    context = config.context
    types = (context.cache_type_k, context.cache_type_v, context.flash_attn != "off")
    n_prefixes = config.n_prefixes(context)
    drafts: list[tuple[ModelShape, Layout | None]] = []
    for draft, draft_layout in zip(config.drafts, draft_layouts, strict=True):
        with contextlib.suppress(ModelError):
            shape = shape_of(ModelFile.open(draft.model.path), *types, draft.context.n_seq, n_prefixes)
            drafts.append((shape, draft_layout))
    target = shape_of(model_file, *types, context.n_seq, n_prefixes)
    tensor_split = config.pipeline.tensor_split
    needs = memory_by_rank(target, layout, drafts, context.n_ctx, context.n_ubatch, tensor_split)
    needed_bytes: dict[str, float] = {}
    for rank, memory in needs.items():
        host = hellos[rank].host
        needed_bytes[host] = needed_bytes.get(host, 0.0) + memory.total
    for host, needed in needed_bytes.items():
        available = min(hello.memory_bytes for hello in hellos if hello.host == host) * USABLE
        if needed > available:
            raise MemoryNeededError(
                f"{host} needs {needed / 1e9:.1f} GB for its ranks and has {available / 1e9:.1f} GB available: "
                "add machines or memory, or lower `n_ctx` or `n_ubatch`"
            )


def check_cuts(cuts: list[Cut], architecture: str) -> None:
    """Does each stage get what it needs? `cuts` in pipeline order. Raises IndivisibleModelError."""
    for before, after in itertools.pairwise(cuts):
        if after.wanted - before.produced:
            raise IndivisibleModelError(
                f"'{architecture}' models cannot be cut between ranks (a layer needs more than the layer before it); "
                "run it on one rank (without `shares`)"
            )


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
) -> Callable[[Progress], Stage]:
    """A function that makes this rank's stage of the model of this id, given a callback for its progress, and describes
    it to those of `files` that there are. `group`: that of the ranks that hold these layers together, if there are
    several. `warmup`: as of `Stage`."""
    threads, part = threads_of(config, transport, model), config.part_of(model)
    shares_cores = model != TARGET and transport.ranks_on_host > config.n_draft_ranks

    def load(progress: Progress) -> Stage:
        if shares_cores:
            machine.yield_to_others()
        n_prefixes = config.n_prefixes(part.context)
        saves_states = n_prefixes > 0 and any(one is not None for one in files)
        stage = Stage(
            model_file,
            layers,
            part.model,
            part.context,
            threads,
            progress,
            n_prefixes,
            saves_states,
            group.join() if group is not None else None,
            warmup,
        )
        for one in files:
            if one is not None:
                one.describe(stage, model_file, part.model, part.context)
        return stage

    return load
