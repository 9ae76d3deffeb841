"""Possible placements of ranks: machines in an order; the draft on one of them, inside the head, or nowhere.

An `Arrangement` has no split yet; with the number of layers at each place it becomes a `VirtualPlacement`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.pipeline import TensorWire
from ggpipe.core.layout import Layout
from ggpipe.errors import SettingError
from ggpipe.sim.virtual_cluster import VirtualPlacement

_KINDS = 6  # kinds of machines that are tried for the draft
_DRAFT_CORES = 4  # a draft that shares a machine gets one core in this many


@dataclass(frozen=True, slots=True)
class Place:
    """Room for a rank."""

    node: int
    rank: int | None = None
    """The cluster's own rank at this place: links between such ranks may have been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Places for the target's ranks, in order, and for the draft."""

    target: tuple[Place, ...]
    threads: tuple[int, ...]
    """Threads of each target rank."""
    group_sizes: tuple[int, ...] = ()
    """Ranks of each of the target's stages; empty: one each."""
    tensor_split: tuple[float, ...] = ()
    """As of `PipelineConfig`."""
    tensor_wire: TensorWire = "f32"
    """As of `PipelineConfig`."""
    draft: tuple[Place, ...] = ()
    """Of its ranks, which compute it together."""
    inside: bool = False
    """The draft is inside the head."""
    draft_threads: int = 1
    skips: tuple[bool, ...] = ()
    """Stages that may get no layers, and then no rank. (With `in_order` the first rank stays: it coordinates.)"""
    in_order: bool = False
    """The ranks exist, and each keeps its number."""

    @property
    def drafts(self) -> bool:
        """There is a draft."""
        return self.inside or bool(self.draft)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Ranks of each of the target's stages."""
        return self.group_sizes or (1,) * len(self.target)

    @property
    def stages(self) -> tuple[range, ...]:
        """Each stage's ranks, by their number in `target`."""
        return tuple(itertools.starmap(range, itertools.pairwise(itertools.accumulate(self.sizes, initial=0))))

    def places(self, counts: Sequence[int]) -> tuple[Place, ...]:
        """The place of each rank. `counts`: layers of each stage."""
        return (*(self.target[i] for i in self._ranks(counts)), *self.draft)

    def placed(
        self, spec: ClusterSpec, counts: Sequence[int], draft_layers: int | None
    ) -> tuple[ClusterSpec, VirtualPlacement]:
        """The cluster with the links measured between these places, and the placement of its ranks."""
        used, ranks = self._used(counts), self._ranks(counts)
        starts, sizes = [sum(counts[:i]) for i in used], tuple(self.sizes[i] for i in used)
        layout = Layout.of_ranks([(a, a + counts[i]) for a, i in zip(starts, used, strict=True)], 0, sizes)
        threads, draft_layout = [self.threads[i] for i in ranks], None
        if self.draft and draft_layers is not None:
            draft_layout = Layout.of_ranks([(0, draft_layers)], len(ranks), (len(self.draft),))
            threads += [self.draft_threads] * len(self.draft)
        places = list(enumerate(self.places(counts)))
        links = {
            (i, j): spec.links[a.rank, b.rank]
            for (i, a), (j, b) in itertools.permutations(places, 2)
            if a.rank is not None and b.rank is not None and (a.rank, b.rank) in spec.links
        }
        placement = VirtualPlacement(
            target_on=tuple(place.node for _, place in places[: len(ranks)]),
            draft_on=tuple(place.node for _, place in places[len(ranks) :]),
            layout=layout,
            draft_layout=draft_layout,
            threads=tuple(threads),
            draft_threads=self.draft_threads if self.inside else None,
            tensor_split=self.tensor_split if len(self.tensor_split) in sizes else (),
            tensor_wire=self.tensor_wire,
        )
        return replace(spec, links=links, threads=()), placement

    def _used(self, counts: Sequence[int]) -> list[int]:
        return [i for i, count in enumerate(counts) if count or (self.in_order and i == 0)]

    def _ranks(self, counts: Sequence[int]) -> list[int]:
        return [rank for i in self._used(counts) for rank in self.stages[i]]


def arrangements(
    spec: ClusterSpec,
    has_draft: bool,
    speed: Callable[[int], float],
    *,
    n_ranks: int | None = None,
    in_order: bool = False,
    threads: int | None = None,
    draft_threads: int | None = None,
    draft_parts: int = 1,
) -> list[Arrangement]:
    """All arrangements that are worth an estimate. `speed`: a node's, in any unit.

    `n_ranks`: exactly this number of ranks. `in_order`: the cluster's ranks as they are, the last one for the draft.
    `threads`: those of each rank, instead of a part of its machine's cores; `draft_threads`: those of the draft.
    `draft_parts`: ranks that may compute the draft together, at most. Raises UsageError for more ranks than there is
    room for.
    """
    maker = _Maker(spec, speed, n_ranks is not None or in_order, in_order, threads, draft_threads, draft_parts)
    places = _places(spec)
    if n_ranks is not None and n_ranks > len(places):
        raise SettingError(
            "n_ranks", f"{n_ranks}: there is room for {len(places)} ranks, one on each machine or as many as named"
        )
    if n_ranks is not None:
        fastest = sorted(range(len(places)), key=lambda i: -speed(places[i].node))[:n_ranks]
        places = [places[i] for i in sorted(fastest)]
    bases = [places]
    if n_ranks is None and not in_order:
        singles = [place for i, place in enumerate(places) if place.node not in {p.node for p in places[:i]}]
        bases = [singles, places] if len(singles) < len(places) else [singles]
    found = []
    for base in bases:
        found += list(maker.without_draft(base))
        if has_draft:
            found += list(maker.with_draft(base))
    return list(dict.fromkeys(found))


def _places(spec: ClusterSpec) -> list[Place]:
    taken = spec.target_on + spec.draft_on
    free = [node for node in range(len(spec.nodes)) if node not in taken]
    return [*(Place(node, rank) for rank, node in enumerate(taken)), *(Place(node) for node in free)]


class _Maker:
    def __init__(
        self,
        spec: ClusterSpec,
        speed: Callable[[int], float],
        all_used: bool,
        in_order: bool,
        threads: int | None,
        draft_threads: int | None,
        draft_parts: int,
    ) -> None:
        self._spec = spec
        self._speed = speed
        self._all_used = all_used
        self._in_order = in_order
        self._threads = threads
        self._draft_threads = draft_threads
        self._draft_parts = draft_parts

    def without_draft(self, base: list[Place]) -> Iterator[Arrangement]:
        for order in self._orders(base):
            yield self._made(order)

    def with_draft(self, base: list[Place]) -> Iterator[Arrangement]:
        for order in self._orders(base):
            for share in self._draft_shares(order[0].node):
                yield self._made(order, inside=True, draft_cores=share)
        if len(base) > 1:
            for place in [base[-1]] if self._in_order else self._kinds(base):
                for drafting in self._draft_groups(base, place):
                    others = [p for p in base if p not in drafting]
                    for order in self._orders(others):
                        yield self._made(order, drafting)
        if self._all_used:
            return
        for place in self._kinds(base):  # on the machine of the target's last rank: mpirun fills machine after machine
            if self._spec.nodes[place.node].cores > 1:
                order = [*(p for p in base if p.node != place.node), place]
                for share in self._draft_shares(place.node):
                    yield self._made(order, (Place(place.node),), draft_cores=share)

    def _draft_groups(self, base: list[Place], place: Place) -> Iterator[tuple[Place, ...]]:
        """Places for the draft: this one, and groups of machines of its kind that end with it."""
        nodes = self._spec.nodes
        alike = [p for p in base if replace(nodes[p.node], name="") == replace(nodes[place.node], name="")]
        for size in range(1, min(self._draft_parts, len(alike), len(base) - 1) + 1):
            yield (*[p for p in alike if p != place][len(alike) - size :], place)

    def _made(
        self, target: list[Place], draft: tuple[Place, ...] = (), *, inside: bool = False, draft_cores: int = 0
    ) -> Arrangement:
        """`draft_cores`: the draft's cores on a machine that it shares; 0: as many as any rank there."""
        on = [place.node for place in (*target, *draft)]
        shared = target[0].node if inside else draft[0].node if draft and draft_cores else None
        threads = []
        for place in target:
            cores, n_ranks = self._spec.nodes[place.node].cores, on.count(place.node)
            if place.node == shared and draft_cores:
                cores, n_ranks = cores - draft_cores, n_ranks - len(draft)
            threads.append(self._threads_of(place, max(cores // n_ranks, 1)))
        if draft:
            own = draft_cores or max(self._spec.nodes[draft[0].node].cores // on.count(draft[0].node), 1)
            draft_threads = self._threads_of(draft[0], own)
        else:
            draft_threads = self._threads or draft_cores or threads[0]
        if self._draft_threads is not None:
            draft_threads = self._draft_threads
        skips = [not self._all_used] * len(target)
        if inside:
            skips[0] = False  # else another one would be the head, with all its threads for the target
        elif draft and draft_cores:
            skips[-1] = False  # else no target rank would share the draft's machine
        if self._in_order and len(target) > 1:
            skips[0] = True
        return Arrangement(
            target=tuple(target),
            threads=tuple(threads),
            draft=draft,
            inside=inside,
            draft_threads=draft_threads,
            skips=tuple(skips),
            in_order=self._in_order,
        )

    def _threads_of(self, place: Place, own: int) -> int:
        if self._threads is not None:
            return self._threads
        if self._in_order and place.rank is not None and self._spec.threads:
            return self._spec.threads[place.rank]
        return own

    def _draft_shares(self, node: int) -> list[int]:
        """Numbers of cores for a draft that shares a machine; 0 where the user or the cluster sets the threads."""
        cores = self._spec.nodes[node].cores
        if self._in_order or self._threads or self._draft_threads or cores < 2:
            return [0]
        return sorted({max(cores // (2 * _DRAFT_CORES), 1), max(cores // _DRAFT_CORES, 1)})

    def _orders(self, places: list[Place]) -> list[list[Place]]:
        """The places in their own order, and with the fastest first."""
        fastest = sorted(places, key=lambda place: -self._speed(place.node))
        adjacent = sorted(fastest, key=lambda place: [p.node for p in fastest].index(place.node))
        return [places] if self._in_order or adjacent == places else [places, adjacent]

    def _kinds(self, places: Sequence[Place]) -> list[Place]:
        """The last machine of each kind; of many kinds the slowest ones and the fastest."""
        of_kind = {replace(self._spec.nodes[place.node], name=""): place for place in places}
        kinds = sorted(of_kind.values(), key=lambda place: self._speed(place.node))
        return kinds if len(kinds) <= _KINDS else [*kinds[: _KINDS - 1], kinds[-1]]
