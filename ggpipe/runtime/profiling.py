"""Profiling a cluster: all ranks call `profile_ranks`, the first one says who measures what, and when.

agree       the same models, ggpipe and libllama everywhere
alone       one rank of each machine after the other: the draft, memory, a part of the target's layers, all of them
together    all ranks compute until each has what it needs
links       one pair of ranks after the other; everybody else waits
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ggpipe.config import EngineConfig
from ggpipe.errors import GgpipeError, RankError, UsageError
from ggpipe.runtime import measuring, startup
from ggpipe.runtime.line import HEAD, Line
from ggpipe.runtime.profiled_rank import ProfiledRank
from ggpipe.sim.profile import Kernels, LinkProfile, ModelFacts, Part, Point, Profile, RankProfile
from ggpipe.transport.base import Transport

_STAGE_BYTES = 1 << 30
_STAGE_BYTES_PER_S = 100 << 20  # of a rank's own time
_ALL_PAIRS = 8

_TOGETHER, _LINKS = 0.15, 0.15  # shares of the budget; the rest is for ranks alone
_DRAFT = 0.2  # share of a rank's time alone, when there is a draft


def profile_ranks(
    transport: Transport,
    config: EngineConfig,
    layers: tuple[int, int] | None = None,
    budget_s: float = 15.0,
    attend: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
) -> Profile | None:
    """Measure all ranks with `config`'s models, for about `budget_s` seconds and the time it takes to load.

    All ranks call it with the same arguments; the first one gets the profile, others None. `layers`: first and one past
    the last, by default a part from the middle. A draft is measured whole, on each rank and with the target's threads,
    wherever `config` lets it run. `attend` is called every 0.1 s and raises to end it; `say` gets lines for the user,
    on the first rank. The transport is as before afterwards.

    Raises on the first rank what any rank met, and RankError on the others.
    """
    line = Line(transport, attend)
    rank = ProfiledRank(line, config)
    try:
        if transport.rank != HEAD:
            _serve(line, rank)
            return None
        try:
            profile = _lead(line, rank, layers, budget_s, say)
        except BaseException:
            line.tell_all("quit")
            raise
        line.tell_all("leave")
        return profile
    finally:
        rank.close()


def _serve(line: Line, rank: ProfiledRank) -> None:
    """Do what the first rank says, until it says that all is done. Raises RankError when it gives up."""
    try:
        line.tell(HEAD, "hello", **rank.hello())
        while (order := line.told())["kind"] != "leave":
            line.tell(HEAD, "answer", rank=line.transport.rank, **rank.answer(order))
    except RankError:
        raise
    except GgpipeError as e:
        rank.close()
        line.tell(HEAD, "failed", **startup.failure(line.transport, e))
        line.wait_for_quit()


def default_layers(model: ModelFacts, alone_s: float, cache_bytes: int) -> tuple[int, int]:
    """A quarter of the layers, from the middle; fewer where these are too much to measure in `alone_s` seconds, though
    not so few that a machine's caches could hold them, and at least one."""
    limit = max(min(_STAGE_BYTES, int(alone_s * _STAGE_BYTES_PER_S)), 3 * cache_bytes)
    n = max(model.n_layer // 4, 1)
    while True:
        a = (model.n_layer - n) // 2
        if n == 1 or sum(model.layer_bytes[a : a + n]) <= limit:
            return a, a + n
        n -= 1


def _lead(
    line: Line, own: ProfiledRank, layers: tuple[int, int] | None, budget_s: float, say: Callable[[str], None]
) -> Profile:
    n_ranks = line.transport.size
    hellos = [own.hello(), *line.gather("hello", range(1, n_ranks))]
    for warning in startup.compare(hellos):
        say(f"warning: {warning}")
    model, draft = own.model, own.draft
    if draft is not None:
        startup.compare([hello["of_draft"] for hello in hellos])  # what it warns of, all know by now
    on_host: dict[str, list[int]] = {}
    for hello in hellos:
        on_host.setdefault(hello["host"], []).append(hello["rank"])
    n_rounds = max(map(len, on_host.values()))
    own_s = budget_s * (1 if n_ranks == 1 else 1 - _TOGETHER - _LINKS) / n_rounds
    draft_s = own_s * _DRAFT if draft is not None else 0.0
    alone_s = own_s - draft_s
    if layers is None:
        layers = default_layers(model, alone_s, max(hello["cache_bytes"] for hello in hellos))
    if not 0 <= layers[0] < layers[1] <= model.n_layer:
        raise UsageError(f"--layers {layers[0]}-{layers[1] - 1}: the model has layers 0 to {model.n_layer - 1}")
    say(_announced(model, layers, draft, n_ranks))

    def ask(ranks: Iterable[int], kind: str, **fields: Any) -> list[dict[str, Any]]:
        """What these ranks answer, in order."""
        asked = sorted(ranks)
        for rank in asked:
            if rank != HEAD:
                line.tell(rank, kind, **fields)
        answers = [own.answer({"kind": kind, **fields})] if HEAD in asked else []
        return answers + line.gather("answer", [rank for rank in asked if rank != HEAD])

    measured: dict[int, dict[str, Any]] = {}
    drafts: dict[int, list[list[float]] | None] = {}
    for i in range(n_rounds):
        turn = sorted(ranks[i] for ranks in on_host.values() if i < len(ranks))
        if draft is not None:
            answers = ask(turn, "draft", budget_s=draft_s)
            drafts |= {rank: told["points"] for rank, told in zip(turn, answers, strict=True)}
        answers = ask(turn, "alone", layers=layers, budget_s=alone_s)
        measured |= dict(zip(turn, answers, strict=True))
    together: list[list[list[float]]] = []
    links: list[LinkProfile] = []
    if n_ranks > 1:
        together = [told["points"] for told in ask(range(n_ranks), "together", budget_s=budget_s * _TOGETHER)]
        pairs = pairs_of(n_ranks)
        for source, target in pairs:
            (told,) = ask([source], "link", peer=target, budget_s=budget_s * _LINKS / len(pairs))
            links.append(LinkProfile(source, target, told["latency_s"], told["bytes_per_s"]))
    context, weights = own.config.context, own.config.model
    kernels = Kernels(context.cache_type_k, context.cache_type_v, context.flash_attn, context.exact, weights.repack)
    ranks = [
        _rank_profile(model, hello, measured[i], together[i] if together else None, _draft_part(draft, drafts.get(i)))
        for i, hello in enumerate(hellos)
    ]
    return Profile(model, kernels, tuple(ranks), tuple(links), draft)


def pairs_of(n_ranks: int) -> list[tuple[int, int]]:
    """(source, target) of the links that are measured: all, or with many ranks those of a ring and those of the first
    rank with all others."""
    if n_ranks <= _ALL_PAIRS:
        return [(a, b) for a in range(n_ranks) for b in range(n_ranks) if a != b]
    ring = [(a, (a + 1) % n_ranks) for a in range(n_ranks)]
    star = [pair for rank in range(1, n_ranks) for pair in ((HEAD, rank), (rank, HEAD))]
    return sorted({*ring, *star})


def _announced(model: ModelFacts, layers: tuple[int, int], draft: ModelFacts | None, n_ranks: int) -> str:
    a, b = layers
    which = f"layer {a}" if b == a + 1 else f"layers {a}-{b - 1}"
    where = f" on {n_ranks} ranks" if n_ranks > 1 else ""
    beside = f" and the draft ({draft.weight_bytes((0, draft.n_layer)) / 1e6:.3g} MB)" if draft is not None else ""
    return f"measuring {which} of 0-{model.n_layer - 1} ({model.weight_bytes(layers) / 1e6:.3g} MB){beside}{where}"


def _rank_profile(
    model: ModelFacts,
    hello: dict[str, Any],
    told: dict[str, Any],
    together: list[list[float]] | None,
    draft: Part | None,
) -> RankProfile:
    layers, half = tuple(told["layers"]), told["half"]
    alone = _points(told["points"])
    shared = tuple(p for p in alone if p.rows in measuring.FEW_ROWS and p.n_past == alone[0].n_past)
    half_layers = tuple(half["layers"]) if half else (0, 0)
    threads, threads_batch = hello["threads"]
    return RankProfile(
        rank=hello["rank"],
        host=hello["host"],
        cores=hello["cores"],
        threads=threads,
        threads_batch=threads_batch,
        memory_bytes=hello["memory_bytes"],
        memory_bytes_per_s=told["memory_bytes_per_s"],
        layers=layers,
        weight_bytes=model.weight_bytes(layers),
        alone=alone,
        together=shared if together is None else _points(together),
        half=Part(half_layers, model.weight_bytes(half_layers), _points(half["points"])) if half else None,
        run_s=told["run_s"],
        change_s=told["change_s"],
        fixed_s=told["fixed_s"],
        draft=draft,
    )


def _draft_part(draft: ModelFacts | None, told: list[list[float]] | None) -> Part | None:
    if draft is None or told is None:
        return None
    layers = (0, draft.n_layer)
    return Part(layers, draft.weight_bytes(layers), _points(told))


def _points(told: Iterable[Sequence[float]]) -> tuple[Point, ...]:
    return tuple(Point(int(rows), int(n_past), seconds) for rows, n_past, seconds in told)
