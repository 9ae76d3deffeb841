"""Profiles a cluster: all ranks call `profile_ranks`, and the head decides which rank measures what, and when.

agree       check for the same models, ggpipe and libllama on all ranks
alone       one rank per machine at a time measures the drafts, memory, and some of the target's layers
in turn     the ranks of each machine repeatedly compute one after another
together    all ranks compute until each has enough measurements
links       one pair of ranks at a time exchanges messages while the others wait
sums        one pair of ranks at a time adds up values, as the parts of a group do
decodes     one pair of each kind decodes as a group: how long do its sums wait for the slower rank?

The messages are in `transport/control`. `profiled_rank` carries them out, with `stage_timing` and `links`.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import TypeVar

from ggpipe.cluster.profile import Kernels, LinkProfile, ModelFacts, Point, Profile, RankProfile, SumProfile
from ggpipe.config.engine import EngineConfig
from ggpipe.engine import handshake
from ggpipe.engine.control_channel import ControlChannel
from ggpipe.engine.stage_thread import Notice
from ggpipe.errors import SettingError, Wording
from ggpipe.profiling import stage_timing
from ggpipe.profiling.links import LinkTimer
from ggpipe.profiling.profiled_rank import TURN_S, ProfiledRank
from ggpipe.profiling.sums import by_host, decode_sums, sum_pairs, sum_profile
from ggpipe.transport.base import HEAD, Transport
from ggpipe.transport.loading_messages import ControlMessage
from ggpipe.transport.profile_messages import (
    AloneMeasured,
    DecodesMeasured,
    DraftMeasured,
    EndProfile,
    LinkMeasured,
    MeasureAlone,
    MeasureDecodes,
    MeasureDraft,
    MeasureLink,
    MeasureSums,
    MeasureTogether,
    MeasureTurn,
    ProfileHello,
    SumsMeasured,
    TogetherMeasured,
    TurnMeasured,
)

M = TypeVar("M", bound=ControlMessage)

_STAGE_BYTES = 1 << 30
_STAGE_BYTES_PER_S = 100 << 20  # of a rank's own time
_ALL_PAIRS = 8

_TURNS, _TOGETHER, _LINKS, _SUMS = 0.1, 0.15, 0.1, 0.03  # shares of the budget; the rest is for ranks alone
_DECODES = 0.02  # for each pair
_LEAST_DECODES_S = 0.1  # for less, the layers are not loaded once more
_LEAST_TURNS, _MOST_TURNS = 3, 30
_DRAFT, _DRAFTS = 0.2, 0.4  # shares of a rank's time alone: of each draft model, and of all of them at most


def profile_ranks(
    transport: Transport,
    config: EngineConfig,
    layers: tuple[int, int] | None = None,
    budget_s: float = 15.0,
    attend: Callable[[], None] = lambda: None,
    on_line: Callable[[str | Wording], None] = lambda _: None,
) -> Profile | None:
    """Measure all ranks with the models of `config`, for about `budget_s` seconds plus the time to load them.

    All ranks call this with the same arguments. The head gets the profile, and other ranks None. `layers`: the first
    one, and one past the last; by default some in the middle. Drafts are measured whole on each rank, with the target's
    threads, regardless of where `config` runs it. `attend` is called every 0.1 s, and raises to stop. `on_line` gets
    lines for the user, on the head. The transport can be used again afterwards.

    Raises on the head the error of any rank, or SettingError for layers that the model does not have; RankError on the
    other ranks.
    """
    links = LinkTimer(transport)
    channel: ControlChannel[Notice] = ControlChannel(transport, attend, links.on_message)
    with channel.failing_together(), contextlib.closing(ProfiledRank(channel, links, config)) as rank:
        if transport.rank == HEAD:
            return _ProfileHead(channel, rank, budget_s, on_line).profile(layers)
        rank.serve()
        return None


class _ProfileHead:
    """The head while a cluster is profiled. It sends orders to all ranks, including itself."""

    def __init__(
        self,
        channel: ControlChannel[Notice],
        own: ProfiledRank,
        budget_s: float,
        on_line: Callable[[str | Wording], None],
    ) -> None:
        self._channel = channel
        self._own = own
        self._n_ranks = channel.transport.size
        self._budget_s = budget_s
        self._on_line = on_line

    def profile(self, layers: tuple[int, int] | None) -> Profile:
        """Run all phases. Raises SettingError for layers that the model does not have."""
        model, drafts = self._own.model, self._own.drafts
        hellos = self._agree()
        hosts = [hello.target.host for hello in hellos]
        turns = _turns(hosts)
        share = 1 if self._n_ranks == 1 else 1 - _TURNS - _TOGETHER - _LINKS - _SUMS - 2 * _DECODES
        own_s = self._budget_s * share / len(turns)
        drafts_s = own_s * min(_DRAFT * len(drafts), _DRAFTS)
        if layers is None:
            layers = default_layers(model, own_s - drafts_s, max(hello.cache_bytes for hello in hellos))
        if not 0 <= layers[0] < layers[1] <= model.n_layer:
            raise SettingError("layers", f"{layers[0]}-{layers[1] - 1}: the model has layers 0 to {model.n_layer - 1}")
        self._on_line(_announced(model, layers, drafts, self._n_ranks))
        measured: list[dict[int, DraftMeasured]] = [{} for _ in drafts]
        alone: dict[int, AloneMeasured] = {}
        for ranks in turns:
            for number, of_ranks in enumerate(measured):
                of_ranks |= self._ask(ranks, MeasureDraft(number, drafts_s / len(drafts)), DraftMeasured)
            alone |= self._ask(ranks, MeasureAlone(layers, own_s - drafts_s), AloneMeasured)
        in_turn = self._in_turn(turns, hosts)
        together = self._together(alone)
        links, messages = self._links()
        sums = self._sums(hosts, layers)
        self._channel.send_to_all(EndProfile())
        profiles = []
        for rank, hello in enumerate(hellos):
            own = alone[rank]
            profiles.append(
                RankProfile(
                    rank=rank,
                    host=hello.target.host,
                    cores=hello.cores,
                    threads=hello.threads[0],
                    threads_batch=hello.threads[1],
                    memory_bytes=hello.memory_bytes,
                    memory_bytes_per_s=own.memory_bytes_per_s,
                    disk_bytes_per_s=own.disk_bytes_per_s,
                    layers=layers,
                    weight_bytes=model.weight_bytes(layers),
                    alone=own.alone,
                    together=together[rank].together,
                    half=own.half,
                    overheads=replace(own.overheads, **messages.get(rank, {})),
                    change_s=own.change_s,
                    fixed_s=own.fixed_s,
                    turns=in_turn.get(rank),
                    guest=together[rank].guest if _is_full(hello, hellos) else None,
                    drafts=tuple(of_ranks[rank].draft for of_ranks in measured),
                )
            )
        kernels = kernels_of(self._own.config)
        return Profile(model=model, kernels=kernels, ranks=tuple(profiles), links=links, drafts=drafts, sums=sums)

    def _agree(self) -> list[ProfileHello]:
        """What each rank reports about itself. Raises ModelError or LaunchError if ranks do not fit together."""
        others = self._channel.gather(ProfileHello, range(1, self._n_ranks))
        hellos = [self._own.hello(), *others.values()]
        for warning in handshake.compare([hello.target for hello in hellos]):
            self._on_line(Wording("warning: ", warning))
        for same in zip(*(hello.drafts for hello in hellos), strict=True):
            handshake.compare(same)  # its warnings are those of the target
        return hellos

    def _in_turn(self, turns: Sequence[Sequence[int]], hosts: Sequence[str]) -> dict[int, float]:
        """`RankProfile.turns` of the ranks that share a machine; empty if there is not enough time to measure it."""
        several = [[rank for rank in ranks if hosts.count(hosts[rank]) > 1] for ranks in turns]
        found: dict[int, list[TurnMeasured]] = {rank: [] for ranks in several for rank in ranks}
        until = time.monotonic() + self._budget_s * _TURNS
        if not found or _LEAST_TURNS * len(several) * TURN_S > 2 * self._budget_s * _TURNS:
            return {}
        for i in range(_MOST_TURNS):
            if i >= _LEAST_TURNS and time.monotonic() > until:
                break
            for ranks in several:
                for rank, turn in self._ask(ranks, MeasureTurn(), TurnMeasured).items():
                    found[rank].append(turn)
        return {
            rank: max(sum(turn.first_s for turn in turns) / sum(turn.later_s for turn in turns), 1.0)
            for rank, turns in found.items()
        }

    def _together(self, alone: dict[int, AloneMeasured]) -> dict[int, TogetherMeasured]:
        """What each rank measures while all compute. For a single rank, these are its measurements alone."""
        if self._n_ranks == 1:
            return {rank: TogetherMeasured(_few_rows(measured.alone), None) for rank, measured in alone.items()}
        order = MeasureTogether(self._budget_s * _TOGETHER)
        return self._ask(range(self._n_ranks), order, TogetherMeasured)

    def _links(self) -> tuple[tuple[LinkProfile, ...], dict[int, Mapping[str, float]]]:
        """All links, and the cost of messages for each rank that sent some, as fields of `Overheads`."""
        pairs = pairs_of(self._n_ranks)
        links = []
        messages: dict[int, Mapping[str, float]] = {}
        for source, target in pairs:
            order = MeasureLink(target, self._budget_s * _LINKS / len(pairs))
            link = self._ask([source], order, LinkMeasured)[source]
            links.append(LinkProfile(source, target, link.latency_s, link.bytes_per_s))
            messages[source] = {"send_s": link.send_s, "read_s": link.read_s}
        return tuple(links), messages

    def _sums(self, hosts: Sequence[str], layers: tuple[int, int]) -> tuple[SumProfile, ...]:
        pairs = sum_pairs(hosts)
        found = []
        kinds: set[bool] = set()
        decodes_s = self._budget_s * _DECODES
        for pair in pairs:
            measured = self._ask(pair, MeasureSums(pair, self._budget_s * _SUMS / len(pairs)), SumsMeasured)
            if not all(one.f32_s for one in measured.values()):
                continue
            profile, within = sum_profile(pair, list(measured.values())), hosts[pair[0]] == hosts[pair[1]]
            if self._own.may_group and decodes_s >= _LEAST_DECODES_S and within not in kinds:
                kinds.add(within)
                order = MeasureDecodes(pair, layers, decodes_s)
                decodes = self._ask(pair, order, DecodesMeasured)
                profile = replace(profile, in_decodes=decode_sums(list(decodes.values())))
            found.append(profile)
        return tuple(found)

    def _ask(self, ranks: Collection[int], order: ControlMessage, kind: type[M]) -> dict[int, M]:
        """Have ranks carry out an order at the same time. Returns each rank's answer."""
        others = [rank for rank in ranks if rank != HEAD]
        for rank in others:
            self._channel.send(rank, order)
        answers: dict[int, M] = {}
        if HEAD in ranks:
            answer = self._own.answer(order)
            assert isinstance(answer, kind)
            answers[HEAD] = answer
        return answers | self._channel.gather(kind, others)


def default_layers(model: ModelFacts, alone_s: float, cache_bytes: int) -> tuple[int, int]:
    """A quarter of the layers, from the middle, as (first, one past the last). Fewer if these take too long to measure
    in `alone_s` seconds, but at least one, and too many for a machine's caches (`cache_bytes`)."""
    limit = max(min(_STAGE_BYTES, int(alone_s * _STAGE_BYTES_PER_S)), 3 * cache_bytes)
    n = max(model.n_layer // 4, 1)
    while True:
        a = (model.n_layer - n) // 2
        if n == 1 or sum(model.layer_bytes[a : a + n]) <= limit:
            return a, a + n
        n -= 1


def pairs_of(n_ranks: int) -> list[tuple[int, int]]:
    """(source, target) of each link that is measured: all links, or with many ranks those of a ring and those between
    the head and all others."""
    if n_ranks <= _ALL_PAIRS:
        return [(a, b) for a in range(n_ranks) for b in range(n_ranks) if a != b]
    ring = [(a, (a + 1) % n_ranks) for a in range(n_ranks)]
    star = [pair for rank in range(1, n_ranks) for pair in ((HEAD, rank), (rank, HEAD))]
    return sorted({*ring, *star})


def _turns(hosts: Sequence[str]) -> list[list[int]]:
    """The ranks that measure at the same time, in each turn: one rank of each machine."""
    turns = itertools.zip_longest(*by_host(hosts))
    return [sorted(rank for rank in ranks if rank is not None) for ranks in turns]


def _announced(model: ModelFacts, layers: tuple[int, int], drafts: Sequence[ModelFacts], n_ranks: int) -> str:
    a, b = layers
    which = f"layer {a}" if b == a + 1 else f"layers {a}-{b - 1}"
    where = f" on {n_ranks} ranks" if n_ranks > 1 else ""
    sizes = [f"{draft.weight_bytes((0, draft.n_layer)) / 1e6:.3g} MB" for draft in drafts]
    beside = f" and the draft{'s' * (len(sizes) > 1)} ({', '.join(sizes)})" if sizes else ""
    return f"measuring {which} of 0-{model.n_layer - 1} ({model.weight_bytes(layers) / 1e6:.3g} MB){beside}{where}"


def _is_full(own: ProfileHello, hellos: Sequence[ProfileHello]) -> bool:
    """Whether the ranks of this rank's machine have at least as many threads as the machine has cores."""
    return sum(hello.threads[0] for hello in hellos if hello.target.host == own.target.host) >= own.cores


def _few_rows(points: tuple[Point, ...]) -> tuple[Point, ...]:
    """The points with few rows in the shortest context, which is measured first."""
    return tuple(p for p in points if p.rows in stage_timing.FEW_ROWS and p.n_past == points[0].n_past)


def kernels_of(config: EngineConfig) -> Kernels:
    """The settings on which the target's times depend."""
    context = config.context
    return Kernels(
        cache_type_k=context.cache_type_k,
        cache_type_v=context.cache_type_v,
        flash_attn=context.flash_attn,
        exact=context.exact,
        fast_kernels=context.fast_kernels,
        repack=config.model.repack,
    )
