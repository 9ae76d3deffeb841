"""How the head gets all ranks to agree and to load."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from ggpipe.config.context import ContextConfig
from ggpipe.config.draft import window_in
from ggpipe.config.model import TARGET
from ggpipe.core.draft_messages import VocabOutline
from ggpipe.core.drafters import registry
from ggpipe.core.drafters.base import DraftPipeline
from ggpipe.core.kv.radix_tree import agreeing
from ggpipe.core.layout import Layout, RankPlace, crowding, lay_out
from ggpipe.core.messages import Restored
from ggpipe.core.request import Limits
from ggpipe.core.row_work import RowWork
from ggpipe.engine import handshake, vocabularies, wiring
from ggpipe.engine.control_channel import Received
from ggpipe.engine.drafters import Drafters
from ggpipe.engine.head import Head, LoadedHead
from ggpipe.engine.pipeline import Pipeline
from ggpipe.engine.stage_thread import Loaded, Loading, Passed, RunNotice, StageThread
from ggpipe.errors import Interrupted, MemoryNeededError, Setting, Wording
from ggpipe.llama import machine
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.prompt_cache import PromptCache
from ggpipe.llama.sequence_memory import COMPRESSED
from ggpipe.llama.stage import BoundaryTensors
from ggpipe.llama.vocab import Vocab
from ggpipe.transport.base import HEAD
from ggpipe.transport.loading_messages import (
    DraftVocab,
    Hello,
    LoadLayers,
    StageContext,
    StageLoaded,
    StageLoading,
    StartDraft,
)


def load_all(head: Head, on_progress: Callable[[], None]) -> LoadedHead:
    """Agree with all ranks, then load everywhere; `head.ranks` shows how far each is, `on_progress` when it changed.

    Raises the first error that any rank met, and RunError when the user stops it.
    """
    config, ranks = head.config, head.ranks
    agreed = _agree(head)
    layout, draft_layouts = agreed.layout, agreed.draft_layouts
    for rank, hello in enumerate(agreed.hellos):
        part = (layout, *draft_layouts)[hello.model]
        ranks[rank].host, ranks[rank].layers = hello.host, part.layers_of(rank)
        ranks[rank].drafter = hello.kind if hello.model != TARGET else ""
        if rank != HEAD:
            inputs = agreed.inputs if hello.model == TARGET else ()
            # A head inside this process is known to no other one.
            inputs_to = agreed.inputs_to if agreed.inputs_to < head.n_processes else HEAD
            memory_gb = agreed.stream_memory_gb.get(rank)
            head.channel.send(rank, LoadLayers(part, agreed.warmup, inputs, inputs_to, memory_gb))
    with contextlib.ExitStack() as loaded:  # closed again when loading fails
        pipeline = loaded.enter_context(contextlib.closing(_target_pipeline(head, layout, agreed)))
        vocab = loaded.enter_context(contextlib.closing(Vocab(agreed.model_file, config.model)))
        outlines: dict[int, VocabOutline] = {}  # of draft models, by the rank that leads each
        progress = _Progress(head, sum(len(part.stage_ranks) for part in (layout, *draft_layouts)))
        while not progress.done or len(outlines) < len(draft_layouts):
            event = head.next()
            _go_on(head)
            match event:
                case Received(rank, DraftVocab(outline)):
                    outlines[rank] = outline
                case _:
                    progress.take(event)
            on_progress()
        handshake.check_cuts(progress.cuts_of(layout), agreed.model_file.architecture)
        ranks[HEAD].resident_bytes = machine.resident_bytes()
        n_requests, context = config.n_requests, progress.context_of(layout)
        is_alone = config.context.exact and not context.exact_in_company
        has_own_cells = agreed.model_file.architecture in COMPRESSED  # so copies of states change no bit
        if is_alone:
            if n_requests > 1:
                agreed.warnings.append(_in_turn(config.context))
            n_requests = 1
            if not has_own_cells:
                context = msgspec.structs.replace(context, n_prefixes=0)
        if config.prompt_cache is not None and context.n_prefixes == 0:
            why = (
                Wording(Setting("exact"), " needs ", Setting("flash_attn"), " for it")
                if config.context.exact
                else Wording("lower ", Setting("n_seq"), " by 2 for it")
            )
            agreed.warnings.append(Wording(Setting("prompt_cache"), " is not used: ", why))
        restored = progress.restored_of(layout, context, agreed.warnings)
        takes_back = vocab.rolls_back or context.n_branches > 0
        if is_alone and not vocab.rolls_back:
            takes_back = takes_back and has_own_cells
        if draft_layouts and not takes_back:
            agreed.warnings.append(
                Wording(Setting("model"), " cannot take draft tokens back: running without speculation")
            )
        kinds = [agreed.hellos[draft_layout.head].kind for draft_layout in draft_layouts]
        started: dict[int, Layout] = {}  # by drafter
        for drafter, (draft, draft_layout) in enumerate(zip(config.drafts, draft_layouts, strict=True)):
            outline, hello = outlines[draft_layout.head], agreed.hellos[draft_layout.head]
            handshake.check_cuts(progress.cuts_of(draft_layout), hello.architecture)
            file = draft.model.path.name if len(draft_layouts) > 1 else ""
            agreed_tokens, tokenizer = vocabularies.compare(
                vocab, agreed.model_file, outline, kinds[drafter], file, agreed.warnings
            )
            if not outline.rolls_back:
                agreed.warnings.append(
                    Wording(
                        Setting("draft.model"),
                        f" {draft.model.path.name} cannot roll back its KV state: running without it",
                    )
                )
            elif takes_back:
                draft_context = progress.context_of(draft_layout)
                limits = _limits(draft.context, draft_layout, draft_context, n_requests, hello.work)
                draft_restored = progress.restored_of(draft_layout, draft_context, agreed.warnings)
                loaded_draft = DraftPipeline(
                    limits=limits,
                    vocabularies=agreed_tokens,
                    restored=draft_restored,
                    horizon=hello.head_needs.horizon if hello.head_needs is not None else None,
                    window=window_in(draft_context.n_ctx, context.n_ctx, draft.window, n_requests)
                    if registry.has_window(kinds[drafter])
                    else 0,
                )
                head.channel.send(draft_layout.head, StartDraft(drafter, kinds[drafter], loaded_draft, tokenizer))
                started[drafter] = draft_layout
        limits = _limits(config.context, layout, context, n_requests, agreed.hellos[HEAD].work)
        places = [RankPlace(hello.host, hello.n_cores, hello.n_threads) for hello in agreed.hellos]
        crowded = crowding(layout, started.values(), places)
        late = crowded > 0 and not any(registry.reads_states(kinds[drafter]) for drafter in started)
        limits = replace(
            limits,
            prefill_slowdown=config.prefill_slowdown,
            crowding=crowded,
            drafts_late=late,
            sharing=registry.sharing({drafter: kinds[drafter] for drafter in started}),
        )
        if is_alone and not has_own_cells:
            limits = replace(limits, n_seq=n_requests)  # branches, of several drafters as well, are company
        loaded.pop_all()
        warnings = tuple(agreed.warnings)
        return LoadedHead(
            head,
            pipeline,
            Drafters(head.transport, kinds, started, takes_back),
            agreed.model_file,
            vocab,
            limits,
            warnings,
            exact_in_company=context.exact_in_company,
            restored=restored,
            n_ranks=len(layout.stage_ranks),
        )


@dataclass(frozen=True, kw_only=True)
class _Agreed:
    """All ranks fit together, and each has its layers."""

    model_file: ModelFile
    hellos: list[Hello]
    """Messages of all ranks, in order."""
    layout: Layout
    draft_layouts: list[Layout]
    """Layouts of the config's draft models."""
    prompt_cache: PromptCache | None
    """The head's."""
    warmup: bool
    """See `Stage`."""
    inputs: tuple[int, ...]
    """Layers of the target whose inputs a draft head or its MTP layers read."""
    inputs_to: int
    """The rank of that head."""
    stream_memory_gb: dict[int, float]
    """Of the ranks that stream weights."""
    warnings: list[Wording]


def _agree(head: Head) -> _Agreed:
    config, transport = head.config, head.transport
    model_file = ModelFile.open(config.model.path)
    prompt_cache = wiring.prompt_cache(config, transport)
    others = head.channel.gather(Hello, range(1, transport.size), head.next, lambda _: _go_on(head))
    hellos = [handshake.hello(transport, config, model_file, TARGET), *others.values()]
    warnings = handshake.compare(hellos)
    n_target = transport.size - config.n_draft_ranks
    heads = config.draft_heads(transport.size)
    draft_layouts = [
        lay_out(hellos[first].n_layer, draft.n_ranks, draft.layer_split, first)
        for first, draft in zip(heads, config.drafts, strict=True)
    ]
    layout = lay_out(model_file.n_layer, n_target, config.pipeline.layer_split, HEAD)
    head_layout = handshake.check_heads(hellos, config, model_file, layout, draft_layouts)
    needs = hellos[head_layout.head].head_needs if head_layout is not None else None
    warmup = config.warmup
    check = functools.partial(handshake.check_memory, hellos, config, model_file, layout, draft_layouts)
    if config.context.n_ctx or config.model.streams:  # the user's own choice
        check(counts_weights=False)
    stream_memory_gb: dict[int, float] = {}
    if config.model.streams:
        stream_memory_gb = handshake.stream_memory(hellos, config, model_file, layout, draft_layouts)
    try:
        check(counts_weights=not config.model.streams)
    except MemoryNeededError as e:
        if config.pipeline.check_memory:
            raise
        if config.may_stream and _holds(functools.partial(check, counts_weights=False)):
            stream_memory_gb = handshake.stream_memory(hellos, config, model_file, layout, draft_layouts)
            warnings.append(
                Wording(
                    "weights that do not fit into memory are read from the file when they are needed, which is slow: ",
                    e,
                )
            )
        else:
            left_out = (Setting("warmup"), " is left out, so that ") if warmup else ()
            warnings.append(Wording(*left_out, "memory may run out later: ", e))
            warmup = False
    return _Agreed(
        model_file=model_file,
        hellos=hellos,
        layout=layout,
        draft_layouts=draft_layouts,
        prompt_cache=prompt_cache,
        warmup=warmup,
        inputs=needs.layers if needs is not None else (),
        inputs_to=head_layout.head if head_layout is not None else HEAD,
        stream_memory_gb=stream_memory_gb,
        warnings=warnings,
    )


def _holds(check: Callable[[], None]) -> bool:
    try:
        check()
    except MemoryNeededError:
        return False
    return True


def _go_on(head: Head) -> None:
    """Raises Interrupted when the user stops the loading."""
    if head.stopping:
        raise Interrupted("stopped while loading")


def _target_pipeline(head: Head, layout: Layout, agreed: _Agreed) -> Pipeline:
    """The target's pipeline; our own stage begins to load, if we hold layers."""
    inbox, transport = head.channel.inbox, head.transport

    def start(deliver: Callable[[RunNotice], None]) -> StageThread:
        def deliver_here(outcome: RunNotice) -> None:
            deliver(outcome)
            if isinstance(outcome, Passed):
                inbox.wake()  # from now on an answer may come

        cache, stage = agreed.prompt_cache, layout.stage_of(HEAD)
        group = wiring.membership(head.config, transport, stage.ranks)
        files = wiring.prefix_files(head.config, transport, TARGET)
        load = wiring.stage_loader(
            head.config,
            transport,
            agreed.model_file,
            stage.layers,
            TARGET,
            (cache, files),
            group,
            agreed.warmup,
            agreed.inputs,
            agreed.stream_memory_gb.get(HEAD),
        )
        send = deliver_here if transport.sends_from_any_thread else inbox.put
        poll_s = wiring.poll_s(head.config)
        thread = StageThread(
            HEAD, load, inbox.put, send, poll_s=poll_s, prompt_cache=cache, group=group, prefix_files=files
        )  # fmt: skip
        inbox.relieved = thread.relief_s
        return thread

    own = start if HEAD in layout.stage_ranks else None
    return Pipeline(transport, layout, HEAD, inbox.put, own, agreed.inputs_to)


def _in_turn(context: ContextConfig) -> Wording:
    if context.flash_attn == "off":
        return Wording(Setting("exact"), " without flash attention takes requests in turn; see ", Setting("flash_attn"))
    return Wording(
        Setting("exact"), " takes requests in turn: this model's attention has the same bits only for one at a time"
    )


def _limits(context: ContextConfig, layout: Layout, loaded: StageContext, n_requests: int, work: RowWork) -> Limits:
    has_long_runs = context.uses_fast_kernels and not context.exact
    return Limits(
        n_ctx=loaded.n_ctx,
        n_batch=loaded.n_batch,
        n_ubatch=context.n_ubatch,
        n_in_flight=len(layout.stages) + 1,
        n_seq=context.n_seq + loaded.n_prefixes + loaded.n_branches,
        n_requests=n_requests,
        n_prefixes=loaded.n_prefixes,
        partial_prefixes=loaded.partial_prefixes,
        rolls_back=loaded.rolls_back,
        most_taken_back=loaded.most_taken_back,
        drops_rows=loaded.rolls_back and not context.exact,
        n_pauses=layout.fewest_layers - 1 if loaded.can_pause else 0,
        work=work if has_long_runs else work.never_long(),
    )


class _Progress:
    """How far the loading of all ranks with layers is."""

    def __init__(self, head: Head, n_ranks: int) -> None:
        self._head = head
        self._n_ranks = n_ranks
        self._cuts: dict[int, BoundaryTensors] = {}
        self._contexts: dict[int, StageContext] = {}
        self._restored: dict[int, Restored] = {}

    @property
    def done(self) -> bool:
        return len(self._cuts) == self._n_ranks

    def cuts_of(self, layout: Layout) -> list[BoundaryTensors]:
        return [self._cuts[stage.ranks[0]] for stage in layout.stages]

    def context_of(self, layout: Layout) -> StageContext:
        """What holds for the contexts of all its stages, which are alike but for their layers."""
        contexts = [self._contexts[rank] for rank in layout.stage_ranks]
        is_exact = all(context.exact_in_company for context in contexts)
        can_pause = all(context.can_pause for context in contexts)
        return msgspec.structs.replace(contexts[0], exact_in_company=is_exact, can_pause=can_pause)

    def restored_of(self, layout: Layout, context: StageContext, warnings: list[Wording]) -> tuple[int, ...] | None:
        """The tokens that all stages of a layout have from their prompt caches; None: no stage has any. Adds a line to
        `warnings` if the files cannot be used."""
        found = {rank: self._restored[rank] for rank in layout.stage_ranks}
        longest = max((restored.tokens for restored in found.values()), key=len)
        n_common = min(agreeing(restored.tokens, longest) for restored in found.values())
        common = longest[:n_common]
        if not context.partial_prefixes and any(restored.tokens != common for restored in found.values()):
            common = ()
        if context.n_prefixes == 0:
            return () if longest else None
        failed = next((rank for rank, restored in found.items() if restored.problem), None)
        without = next((rank for rank, restored in found.items() if longest and not restored.tokens), None)
        if failed is not None:
            place = f"{self._place(failed)}: " if self._n_ranks > 1 else ""
            warnings.append(Wording(place, found[failed].problem))
        elif without is not None:
            line = f"{self._place(without)} has no prompt cache, others have: the prompt is computed anew"
            warnings.append(Wording(line))
        elif longest and not common:
            line = "the prompt caches of the ranks are of different prompts: the prompt is computed anew"
            warnings.append(Wording(line))
        return common if longest else None

    def _place(self, rank: int) -> str:
        return f"rank {rank} ({self._head.ranks[rank].host})"

    def take(self, event: object) -> None:
        ranks = self._head.ranks
        match event:
            case Loaded(stage, load_s, restored):
                own = ranks[HEAD]
                own.load_s, own.threads = load_s, wiring.threads_of(self._head.config, self._head.transport, TARGET)
                self._restored[HEAD] = restored
                self._loaded(HEAD, stage.cut, wiring.context_of(stage))
            case Loading(done_bytes, total_bytes):
                ranks[HEAD].loaded_bytes, ranks[HEAD].load_bytes = done_bytes, total_bytes
            case Received(rank, StageLoading(done_bytes, total_bytes)):
                ranks[rank].loaded_bytes, ranks[rank].load_bytes = done_bytes, total_bytes
            case Received(rank, StageLoaded() as loaded):
                stats = ranks[rank]
                stats.load_s, stats.threads = loaded.load_s, loaded.threads
                if stats.rank == rank:  # a process of its own
                    stats.resident_bytes = loaded.resident_bytes
                cut = BoundaryTensors(collections.Counter(loaded.wanted), collections.Counter(loaded.produced))
                self._restored[rank] = loaded.restored
                self._loaded(rank, cut, loaded.context)

    def _loaded(self, rank: int, cut: BoundaryTensors, context: StageContext) -> None:
        stats = self._head.ranks[rank]
        stats.loaded_bytes = stats.load_bytes = max(stats.load_bytes, 1)
        self._cuts[rank], self._contexts[rank] = cut, context
