"""Profiling a cluster: all ranks call `profile_ranks`, the first one says who measures what, and when.

agree       the same model, ggpipe and libllama everywhere
alone       one rank of each machine after the other: memory, a part of its layers, all of them
together    all ranks compute until each has what it needs
links       one pair of ranks after the other; everybody else waits
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from ggpipe.config import EngineConfig
from ggpipe.engine import machine
from ggpipe.engine.model_file import ModelFile
from ggpipe.errors import GgpipeError, ModelError, RankError, UsageError
from ggpipe.runtime import measuring, startup
from ggpipe.runtime.line import Line
from ggpipe.runtime.measuring import TimedStage
from ggpipe.sim.profile import Kernels, LinkProfile, ModelFacts, Part, Point, Profile, RankProfile
from ggpipe.transport.base import Transport

_HEAD = 0
_STAGE_BYTES = 1 << 30
_STAGE_BYTES_PER_S = 100 << 20  # of a rank's own time
_N_CTX = measuring.LONG_CELLS + 2 * measuring.CHUNK_ROWS
_ALL_PAIRS = 8

_MEMORY_S = 0.5

# Shares of the budget
_TOGETHER, _LINKS = 0.15, 0.15
_MEMORY, _HALF, _SHORT, _LONG = 0.05, 0.2, 0.4, 0.35  # of what is left for each rank alone


def profile_ranks(
    transport: Transport,
    config: EngineConfig,
    layers: tuple[int, int] | None = None,
    budget_s: float = 15.0,
    attend: Callable[[], None] = lambda: None,
    say: Callable[[str], None] = lambda _: None,
) -> Profile | None:
    """Measure all ranks with `config`'s model, for about `budget_s` seconds and the time it takes to load.

    All ranks call it with the same arguments; the first one gets the profile, others None. `layers`: first and one past
    the last, by default a part from the middle. `attend` is called every 0.1 s and raises to end it; `say` gets lines
    for the user, on the first rank. The transport is as before afterwards.

    Raises on the first rank what any rank met, and RankError on the others.
    """
    line = Line(transport, attend)
    rank = _Rank(line, config)
    try:
        if transport.rank != _HEAD:
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
    line: Line, own: _Rank, layers: tuple[int, int] | None, budget_s: float, say: Callable[[str], None]
) -> Profile:
    n_ranks = line.transport.size
    hellos = [own.hello(), *line.gather("hello", range(1, n_ranks))]
    for warning in startup.compare(hellos):
        say(f"warning: {warning}")
    model = own.model
    on_host: dict[str, list[int]] = {}
    for hello in hellos:
        on_host.setdefault(hello["host"], []).append(hello["rank"])
    n_rounds = max(map(len, on_host.values()))
    alone_s = budget_s * (1 if n_ranks == 1 else 1 - _TOGETHER - _LINKS) / n_rounds
    if layers is None:
        layers = default_layers(model, alone_s, max(hello["cache_bytes"] for hello in hellos))
    if not 0 <= layers[0] < layers[1] <= model.n_layer:
        raise UsageError(f"--layers {layers[0]}-{layers[1] - 1}: the model has layers 0 to {model.n_layer - 1}")
    say(_announced(model, layers, n_ranks))

    def ask(ranks: Iterable[int], kind: str, **fields: Any) -> list[dict[str, Any]]:
        """What these ranks answer, in order."""
        asked = sorted(ranks)
        for rank in asked:
            if rank != _HEAD:
                line.tell(rank, kind, **fields)
        answers = [own.answer({"kind": kind, **fields})] if _HEAD in asked else []
        return answers + line.gather("answer", [rank for rank in asked if rank != _HEAD])

    measured: dict[int, dict[str, Any]] = {}
    for i in range(n_rounds):
        turn = sorted(ranks[i] for ranks in on_host.values() if i < len(ranks))
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
        _rank_profile(model, hello, measured[i], together[i] if together else None) for i, hello in enumerate(hellos)
    ]
    return Profile(model, kernels, tuple(ranks), tuple(links))


def pairs_of(n_ranks: int) -> list[tuple[int, int]]:
    """(source, target) of the links that are measured: all, or with many ranks those of a ring and those of the first
    rank with all others."""
    if n_ranks <= _ALL_PAIRS:
        return [(a, b) for a in range(n_ranks) for b in range(n_ranks) if a != b]
    ring = [(a, (a + 1) % n_ranks) for a in range(n_ranks)]
    star = [pair for rank in range(1, n_ranks) for pair in ((_HEAD, rank), (rank, _HEAD))]
    return sorted({*ring, *star})


def _announced(model: ModelFacts, layers: tuple[int, int], n_ranks: int) -> str:
    a, b = layers
    which = f"layer {a}" if b == a + 1 else f"layers {a}-{b - 1}"
    where = f" on {n_ranks} ranks" if n_ranks > 1 else ""
    return f"measuring {which} of 0-{model.n_layer - 1} ({model.weight_bytes(layers) / 1e6:.3g} MB){where}"


def _rank_profile(
    model: ModelFacts, hello: dict[str, Any], told: dict[str, Any], together: list[list[float]] | None
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
    )


def _points(told: Iterable[Sequence[float]]) -> tuple[Point, ...]:
    return tuple(Point(int(rows), int(n_past), seconds) for rows, n_past, seconds in told)


def _told(points: Iterable[Point]) -> list[tuple[int, int, float]]:
    return [(p.rows, p.n_past, p.seconds) for p in points]


# Every rank


def _serve(line: Line, rank: _Rank) -> None:
    """Do what the first rank says, until it says that all is done. Raises RankError when it gives up."""
    try:
        line.tell(_HEAD, "hello", **rank.hello())
        while (order := line.told())["kind"] != "leave":
            line.tell(_HEAD, "answer", rank=line.transport.rank, **rank.answer(order))
    except RankError:
        raise
    except GgpipeError as e:
        rank.close()
        line.tell(_HEAD, "failed", **startup.failure(line.transport, e))
        line.wait_for_quit()


class _Rank:
    """A rank's own part."""

    def __init__(self, line: Line, config: EngineConfig) -> None:
        self.config = config
        self._line = line
        self._timed: TimedStage | None = None

    def hello(self) -> dict[str, Any]:
        """What this rank says of itself. Raises ModelError for a model that cannot be read."""
        self._file = ModelFile.open(self.config.model.path)
        self.model = ModelFacts.of(self._file)
        transport = self._line.transport
        return {
            **startup.hello(transport, self._file, False),
            "cores": machine.cores(),
            "threads": startup.threads_of(self.config, transport, False),
            "memory_bytes": machine.available_bytes(),
            "cache_bytes": machine.cache_bytes(),
        }

    def answer(self, order: dict[str, Any]) -> dict[str, Any]:
        """Do what the order says."""
        match order["kind"]:
            case "alone":
                return self._alone((order["layers"][0], order["layers"][1]), order["budget_s"])
            case "together":
                return self._together(order["budget_s"])
            case "link":
                self.close()
                latency_s, bytes_per_s = self._line.measure(order["peer"], order["budget_s"])
                return {"latency_s": latency_s, "bytes_per_s": bytes_per_s}
        raise RankError(f"the first rank asks for {order['kind']!r}: use one ggpipe everywhere")

    def close(self) -> None:
        """Free the stage."""
        if self._timed is not None:
            self._timed.close()
            self._timed = None

    def _alone(self, layers: tuple[int, int], budget_s: float) -> dict[str, Any]:
        single, _ = startup.threads_of(self.config, self._line.transport, False)
        speed = measuring.memory_speed(single, min(budget_s * _MEMORY, _MEMORY_S))
        half, half_s = self._half(layers, budget_s * _HALF)
        timed = self._load(layers)
        short = measuring.measure_short(timed, budget_s * _SHORT)
        points = short.points(measuring.cells_before(timed.stage.n_ctx))
        points += measuring.measure_long(timed, short, budget_s * _LONG)
        fixed_s = 0.0
        if half is not None:
            few, all_bytes = self.model.weight_bytes(half["layers"]), self.model.weight_bytes(layers)
            fixed_s = measuring.where_nothing_is((few, half_s), (all_bytes, short.fastest_s))
        return {
            "layers": layers,
            "points": _told(points),
            "half": half,
            "memory_bytes_per_s": speed,
            "run_s": statistics.median(short.rest_s),
            "change_s": max(statistics.median(short.change_s), 0.0) if short.change_s else 0.0,
            "fixed_s": fixed_s,
        }

    def _half(self, layers: tuple[int, int], budget_s: float) -> tuple[dict[str, Any] | None, float]:
        """The first half of the layers, and its fastest run of one row; None where there is none."""
        (a, b), n = layers, self.model.n_layer
        if b - a == 1:
            return None, 0.0
        some = (a, a + (b - a) // 2)
        try:
            timed = self._load(some)
        except ModelError:
            if layers != (0, n):
                raise
            return None, 0.0  # a model that cannot be cut; what else there is shows when all is loaded
        samples = measuring.measure_short(timed, budget_s, (1, 8))
        points = samples.points(measuring.cells_before(timed.stage.n_ctx))
        return {"layers": some, "points": _told(points)}, samples.fastest_s

    def _together(self, budget_s: float) -> dict[str, Any]:
        assert self._timed is not None
        line = self._line
        leads = line.transport.rank == _HEAD

        def ready() -> None:
            if not leads:
                line.tell(_HEAD, "ready")

        def enough() -> bool:
            if not leads:
                return line.has_told("enough") > 0
            if line.has_told("ready") < line.transport.size - 1:
                return False
            line.tell_all("enough")
            return True

        points = measuring.measure_together(self._timed, budget_s, ready, enough)
        line.forget("ready" if leads else "enough")
        self.close()
        return {"points": _told(points)}

    def _load(self, layers: tuple[int, int]) -> TimedStage:
        self.close()
        config, transport = self.config, self._line.transport
        context = config.context
        trained = self._file.metadata.get(f"{self._file.architecture}.context_length", _N_CTX)
        limits = [n for n in (_N_CTX, context.n_ctx, trained) if isinstance(n, int) and n > 0]
        config = replace(config, context=replace(context, n_ctx=min(limits)))
        load = startup.stage_loader(config, transport, self._file, layers, False)
        try:
            self._timed = TimedStage(
                transport.rank, load, self.model.n_vocab, self._line.inbox, self._line.notice, startup.look_s(config)
            )
        except ModelError as e:
            n = self.model.n_layer
            if "cannot be cut" not in str(e) or layers == (0, n):
                raise
            raise ModelError(
                f"'{self.model.architecture}' models cannot be cut: profile all layers, with --layers 0-{n - 1}"
            ) from e
        return self._timed
