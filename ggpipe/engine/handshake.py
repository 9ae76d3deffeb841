"""How ranks find out, before anything is loaded, that they fit together."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

from ggpipe._version import __version__
from ggpipe.cluster.memory import USABLE, Memory, memory_by_rank
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.config.engine import EngineConfig
from ggpipe.config.model import TARGET
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.base import HeadNeeds
from ggpipe.core.layout import Layout
from ggpipe.engine import wiring
from ggpipe.errors import IndivisibleModelError, LaunchError, MemoryNeededError, ModelError, Setting, Wording
from ggpipe.llama import machine, mtp
from ggpipe.llama.completed import does_not_fit
from ggpipe.llama.draft_heads import open_draft
from ggpipe.llama.eagle3 import head_misfit
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.model_shape import shape_of
from ggpipe.llama.stage import BoundaryTensors
from ggpipe.transport.base import Transport
from ggpipe.transport.loading_messages import Hello


def hello(transport: Transport, config: EngineConfig, model_file: ModelFile, model: int) -> Hello:
    """This rank's part of the handshake; `model`: id of the model whose file that is."""
    is_mtp = config.is_mtp(model)
    return Hello(
        host=transport.host,
        model=model,
        fingerprint=model_file.fingerprint,
        architecture=model_file.architecture,
        n_layer=1 if is_mtp else model_file.n_layer,
        work=shape_of(model_file).work,
        ggpipe=__version__,
        libllama=machine.libllama_version(),
        cpu_features=tuple(sorted(machine.cpu_features())),
        memory_bytes=machine.available_bytes(),
        n_threads=max(wiring.threads_of(config, transport, model)),
        n_cores=wiring.machine_cores(transport),
        kind=registry.MTP if is_mtp else registry.kind_of(model_file.architecture),
        head_needs=wiring.needs_of(config, model, model_file),
        target_fingerprint=ModelFile.open(config.model.path).fingerprint if is_mtp or model_file.borrowed else "",
    )


def compare(hellos: Sequence[Hello]) -> list[Wording]:
    """Do all ranks hold the same? Returns warnings. Raises ModelError or LaunchError where they cannot work together.

    `hellos`: one per rank, in order.
    """
    head = hellos[0]
    warnings: list[Wording] = []
    for rank, other in enumerate(hellos):
        where = f"rank {rank} ({other.host})"
        first_rank, first = next((i, hello) for i, hello in enumerate(hellos) if hello.model == other.model)
        if other.fingerprint != first.fingerprint:
            raise ModelError(
                f"{where} has another model than rank {first_rank} ({first.host}) as ",
                Setting("model" if other.model == TARGET else "draft.model"),
                ": copy it there again",
            )
        versions = (("ggpipe", other.ggpipe, head.ggpipe), ("libllama", other.libllama, head.libllama))
        for package, version, wanted in versions:
            if version != wanted:
                raise LaunchError(
                    f"{where} runs {package} {version}, rank 0 runs {wanted}: install the same everywhere"
                )
        if other.cpu_features != head.cpu_features:
            differ = sorted(set(other.cpu_features) ^ set(head.cpu_features))
            line = f"{where} uses other CPU features than rank 0 ({', '.join(differ)}): output may differ"
            warnings.append(Wording(line))
    return [*warnings, *_too_many_threads(hellos)]


def _too_many_threads(hellos: Sequence[Hello]) -> Iterator[Wording]:
    """A warning for each machine with more threads than cores, unless each rank has only one, as ranks must."""
    for host in dict.fromkeys(hello.host for hello in hellos):
        own = [hello for hello in hellos if hello.host == host]
        n_threads, n_cores = sum(hello.n_threads for hello in own), max(hello.n_cores for hello in own)
        if n_threads > max(n_cores, len(own)):
            ranks = "its rank has" if len(own) == 1 else f"its {len(own)} ranks have"
            yield Wording(
                f"{host} will be slow: {ranks} {n_threads} threads, and it has {n_cores} cores: lower ",
                Setting("threads"),
            )


def check_heads(
    hellos: Sequence[Hello],
    config: EngineConfig,
    model_file: ModelFile,
    layout: Layout,
    draft_layouts: Sequence[Layout],
) -> Layout | None:
    """Do draft heads, or MTP layers, fit the target? Returns where they are; None where there are none. Raises
    ModelError.

    `hellos`: as for `compare`. `draft_layouts`: of the config's draft models.
    """
    found: list[tuple[str, HeadNeeds, Layout]] = []
    for draft, draft_layout in zip(config.drafts, draft_layouts, strict=True):
        if (needs := hellos[draft_layout.head].head_needs) is not None:
            found.append((draft.model.path.name, needs, draft_layout))
    if not found:
        return None
    if len(found) > 1:
        if any(draft.is_mtp for draft in config.drafts):
            advice = f" mtp cannot be combined with an EAGLE-3 head ({found[0][0]}): use one of them"
            raise ModelError(Setting("spec_type"), advice)
        names = " and ".join(name for name, *_ in found)
        raise ModelError(Setting("draft.model"), f" names several draft heads ({names}): give one")
    name, needs, draft_layout = found[0]
    hello, first = hellos[draft_layout.head], hellos[0]
    if hello.kind == registry.MTP:
        mtp.check(model_file)
    if hello.target_fingerprint not in ("", first.fingerprint):
        raise ModelError(
            f"rank {draft_layout.head} ({hello.host}) has another model than rank 0 ({first.host}) as ",
            Setting("model"),
            ": copy it there again",
        )
    n_ranks = len(draft_layout.stage_ranks)
    if hello.kind == registry.MTP:
        if n_ranks > 1:
            raise ModelError(
                f"MTP layers run on one rank, and they have {n_ranks}: give them one share in ", Setting("layer_split")
            )
        return draft_layout
    problem: str | Wording = head_misfit(needs, model_file)
    if not problem and n_ranks > 1:
        problem = Wording(f"heads run on one rank, and it has {n_ranks}: give it one share in ", Setting("layer_split"))
    if problem:
        raise does_not_fit(name, problem)
    return draft_layout


def check_memory(
    hellos: Sequence[Hello],
    config: EngineConfig,
    model_file: ModelFile,
    layout: Layout,
    draft_layouts: Sequence[Layout],
    counts_weights: bool = True,
) -> None:
    """Does each machine have the memory that its ranks need? Raises MemoryNeededError.

    `hellos`: as for `compare`. `draft_layouts`: of the config's draft models. A draft model counts where this rank has
    its file as well. `counts_weights`: otherwise only what cannot be read from the file again.
    """
    needed_bytes: dict[str, float] = {}
    for rank, memory in needs_by_rank(config, model_file, layout, draft_layouts).items():
        host = hellos[rank].host
        needed_bytes[host] = needed_bytes.get(host, 0.0) + memory.total - (0 if counts_weights else memory.weights)
    for host, needed in needed_bytes.items():
        available = min(hello.memory_bytes for hello in hellos if hello.host == host) * USABLE
        if needed > available:
            raise MemoryNeededError(
                f"{host} needs {needed / 1e9:.1f} GB for its ranks and has {available / 1e9:.1f} "
                "GB available: add machines or memory, or lower ",
                Setting("n_ctx"),
                " or ",
                Setting("n_ubatch"),
            )


def stream_memory(
    hellos: Sequence[Hello],
    config: EngineConfig,
    model_file: ModelFile,
    layout: Layout,
    draft_layouts: Sequence[Layout],
) -> dict[int, float]:
    """Memory in GB for the weights of each rank of the target that streams them. The arguments are those of
    `check_memory`.

    If the user gives no number, a machine's ranks share the memory that nothing else needs, in proportion to their
    weights. With the load mode `auto`, ranks of machines with enough memory are left out.
    """
    needs, given = needs_by_rank(config, model_file, layout, draft_layouts), config.model.stream_memory_gb
    shares: dict[int, float] = {}
    for host in {hello.host for hello in hellos}:
        here = {rank: memory for rank, memory in needs.items() if hellos[rank].host == host}
        weights = {rank: memory.weights for rank, memory in here.items() if hellos[rank].model == TARGET}
        others = sum(memory.total for memory in here.values()) - sum(weights.values())
        available = min(hello.memory_bytes for hello in hellos if hello.host == host) * USABLE
        share = max(available - others, 1.0) / max(sum(weights.values()), 1.0)
        if share < 1 or config.model.streams:
            shares.update({rank: n * share / 1e9 if given is None else given for rank, n in weights.items()})
    return shares


def needs_by_rank(
    config: EngineConfig, model_file: ModelFile, layout: Layout, draft_layouts: Sequence[Layout | None]
) -> dict[int, Memory]:
    """Memory of each rank. The arguments are those of `check_memory`; a draft model without a layout is on the head."""
    context = config.context
    types = (context.cache_type_k, context.cache_type_v, context.flash_attn != "off")
    n_prefixes = config.n_prefixes(context)
    drafts: list[tuple[ModelShape, Layout | None]] = []
    for draft, draft_layout in zip(config.drafts, draft_layouts, strict=True):
        with contextlib.suppress(ModelError):
            draft_file = open_draft(draft.model.path, config.model.path)
            shape = shape_of(draft_file, *types, draft.context.n_seq, n_prefixes)
            shape = replace(shape, most_ctx=wiring.draft_n_ctx(draft, draft_file, config.n_requests))
            if draft.is_mtp:
                shape = mtp.shape_of_mtp(draft_file, shape, *types[:2])
            drafts.append((shape, draft_layout))
    target = shape_of(model_file, *types, context.n_seq, n_prefixes, context.n_states)
    tensor_split = config.pipeline.tensor_split
    return memory_by_rank(target, layout, drafts, context.n_ctx, context.n_ubatch, tensor_split)


def check_cuts(cuts: list[BoundaryTensors], architecture: str) -> None:
    """Does each stage get what it needs? `cuts` in pipeline order. Raises IndivisibleModelError."""
    for before, after in itertools.pairwise(cuts):
        if after.wanted - before.produced:
            raise IndivisibleModelError(
                f"'{architecture}' models cannot be cut between ranks (a layer needs more than the layer "
                "before it); run it on one rank (without ",
                Setting("layer_split"),
                ")",
            )
