"""How the head gets all ranks to agree and to load."""

from __future__ import annotations

import collections
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from ggpipe.config import ContextConfig
from ggpipe.core.events import Limits
from ggpipe.core.layout import Layout, lay_out
from ggpipe.engine import machine
from ggpipe.engine.model_file import ModelFile
from ggpipe.engine.stage import Cut
from ggpipe.engine.vocab import Vocab
from ggpipe.errors import RunError
from ggpipe.runtime import startup
from ggpipe.runtime.hub import FromDraft, Hub
from ggpipe.runtime.runner import Loaded, Loading
from ggpipe.runtime.stats import RankStats


@dataclass(frozen=True)
class Models:
    """What a session serves with, once everything is loaded."""

    vocab: Vocab
    limits: Limits
    can_speculate: bool
    warnings: tuple[str, ...]


def load_all(hub: Hub, on_progress: Callable[[], None], stopped: Callable[[], bool]) -> Models:
    """Agree with all ranks, then load everywhere; `hub.ranks` shows how far each is, `on_progress` when it changed.

    Raises the first error that any rank met, and RunError when `stopped` says so.
    """
    config, transport, ranks = hub.config, hub.transport, hub.ranks
    model_file = ModelFile.open(config.model.path)
    draft_file = ModelFile.open(config.draft.model.path) if config.draft and hub.draft_inside else None
    own = startup.hello(transport, model_file, False)
    others = hub.gather("hello", lambda _: None)
    hellos = [own, *(others[rank] for rank in sorted(others))]
    warnings = startup.compare(hellos)
    n_target = transport.size - config.n_draft_ranks
    layout = lay_out(model_file.n_layer, n_target, config.pipeline.shares)
    draft_layout: Layout | None = None
    if draft_file is not None:
        draft_layout = Layout(((0, draft_file.n_layer),))
    elif config.draft is not None:
        n_layer = hellos[n_target]["n_layer"]
        draft_layout = lay_out(n_layer, config.n_draft_ranks, config.draft.shares, n_target)
    for content in hellos:
        rank = content["rank"]
        part = draft_layout if draft_layout is not None and content["draft"] else layout
        ranks[rank].host, ranks[rank].layers = content["host"], part.layers_of(rank)
        if rank > 0:
            hub.tell(rank, "load", layers=part.layers, head=part.head)
    hub.open_pipe(layout, model_file)
    if draft_layout is not None:
        hub.open_draft_pipe(draft_layout, draft_file)
        if draft_file is not None:
            ranks[-1].host, ranks[-1].layers = own["host"], draft_layout.layers_of(0)
    vocab = Vocab(model_file, config.model)
    try:
        outline: dict[str, Any] | None = None
        if draft_file is not None and config.draft is not None:
            draft_vocab = Vocab(draft_file, config.draft.model)
            outline = draft_vocab.outline()
            draft_vocab.close()
        loading = _Stages(hub, len(layout.stages) + len(draft_layout.stages if draft_layout else ()))
        while not loading.done or (draft_layout is not None and outline is None):
            event = hub.next()
            if stopped():
                raise RunError("stopped while loading")
            if isinstance(event, dict) and event["kind"] == "vocab":
                outline = event
            else:
                loading.take(event)
            on_progress()
        startup.check_cuts(loading.cuts_of(layout, False), model_file.architecture)
        if draft_layout is not None and draft_file is None:
            startup.check_cuts(loading.cuts_of(draft_layout, True), hellos[draft_layout.head]["architecture"])
        can_speculate = outline is not None
        if outline is not None:
            vocab.check_draft(outline)
            hub.meaningless = tuple(range(vocab.n_tokens, len(outline["texts"])))
            for flag, able in (("-m", vocab.rolls_back), ("-md", outline["rolls_back"])):
                if not able:
                    can_speculate = False
                    warnings.append(f"the model of {flag} cannot take tokens back, so nothing is guessed ahead")
    except BaseException:
        vocab.close()
        raise
    ranks[0].resident_bytes = machine.resident_bytes()
    if config.draft is not None and draft_layout is not None and can_speculate:
        hub.start_draft(asdict(_limits(config.draft.context, draft_layout, loading.n_ctx[True])))
    return Models(vocab, _limits(config.context, layout, loading.n_ctx[False]), can_speculate, tuple(warnings))


def _limits(context: ContextConfig, layout: Layout, n_ctx: int) -> Limits:
    return Limits(n_ctx, context.n_batch, context.n_ubatch, len(layout.stages) + 1, context.n_seq)


class _Stages:
    """How far all stages' loading is."""

    def __init__(self, hub: Hub, n_stages: int) -> None:
        self._hub = hub
        self._n_stages = n_stages
        self._cuts: dict[tuple[int, bool], Cut] = {}
        self.n_ctx: dict[bool, int] = {}
        """Of the target's context (False) and the draft's (True)."""

    @property
    def done(self) -> bool:
        return len(self._cuts) == self._n_stages

    def cuts_of(self, layout: Layout, draft: bool) -> list[Cut]:
        return [self._cuts[rank, draft] for rank in layout.stages]

    def take(self, event: object) -> None:
        inside = isinstance(event, FromDraft)
        own = self._hub.ranks[-1 if inside else 0]
        match event.notice if isinstance(event, FromDraft) else event:
            case Loaded(stage, load_s):
                own.load_s, own.threads = load_s, startup.threads_of(self._hub.config, self._hub.transport, inside)
                self._loaded(own, stage.cut, stage.n_ctx)
            case Loading(done, total):
                own.loaded_bytes, own.load_bytes = done, total
            case dict() as told if told["kind"] == "loading":
                stats = self._hub.ranks[told["rank"]]
                stats.loaded_bytes, stats.load_bytes = told["done"], told["all"]
            case dict() as told if told["kind"] == "loaded":
                stats = self._hub.ranks[told["rank"]]
                stats.load_s, stats.threads = told["load_s"], tuple(told["threads"])
                stats.resident_bytes = told["resident_bytes"]
                cut = Cut(collections.Counter(told["wanted"]), collections.Counter(told["produced"]))
                self._loaded(stats, cut, told["n_ctx"])

    def _loaded(self, stats: RankStats, cut: Cut, n_ctx: int) -> None:
        stats.loaded_bytes = stats.load_bytes = max(stats.load_bytes, 1)
        self._cuts[stats.rank, stats.draft] = cut
        self.n_ctx[stats.draft] = n_ctx
