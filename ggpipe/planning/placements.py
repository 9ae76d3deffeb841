"""Possible placements of ranks: an order of machines, and a draft on one of them, inside the head, or nowhere.

An `Arrangement` has no split. Given the number of layers of each stage, it becomes a `VirtualPlacement`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.spec import ClusterSpec
from ggpipe.config.pipeline import TensorWire
from ggpipe.core.layout import Layout
from ggpipe.errors import SettingError
from ggpipe.sim.virtual_cluster import VirtualPlacement

_KINDS = 6  # kinds of machines that are tried for the draft
_DRAFT_CORES = 4  # a draft that shares a machine gets one core in this many


@dataclass(frozen=True, slots=True)
class Place:
    """Where a rank can be."""

    node: int
    rank: int | None = None
    """The cluster's own rank at this place. Links between such ranks may have been measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FurtherDraft:
    """A draft model in addition to the first one, on a rank of its own."""

    shape: ModelShape
    node: int | None
    """Its machine, on which there is no other rank; None: that of the first draft model's rank."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """Places for the target's ranks, in order, and for those of draft models."""

    target: tuple[Place, ...]
    threads: tuple[int, ...]
    """Threads of each target rank."""
    group_sizes: tuple[int, ...] = ()
    """Number of ranks in each of the target's stages; empty: one each."""
    tensor_split: tuple[float, ...] = ()
    """See `PipelineConfig.tensor_split`."""
    tensor_wire: TensorWire = "f32"
    """See `PipelineConfig.tensor_wire`."""
    draft: tuple[Place, ...] = ()
    """Places of the first draft model's ranks, which form a group."""
    inside: bool = False
    """The head runs the draft."""
    draft_threads: int = 1
    further: tuple[Place, ...] = ()
    """Place of each further draft model."""
    further_threads: tuple[int, ...] = ()
    """Threads of each further draft model."""
    skips: tuple[bool, ...] = ()
    """Whether each stage may get no layers, and then no ranks. With `in_order`, the first rank remains as coordinator.
    """
    in_order: bool = False
    """The ranks already exist, and keep their numbers."""

    @property
    def drafts(self) -> bool:
        """Whether there is a draft."""
        return self.inside or bool(self.draft)

    @property
    def sizes(self) -> tuple[int, ...]:
        """Number of ranks in each of the target's stages."""
        return self.group_sizes or (1,) * len(self.target)

    @property
    def stages(self) -> tuple[range, ...]:
        """The ranks of each stage, as indices into `target`."""
        return tuple(itertools.starmap(range, itertools.pairwise(itertools.accumulate(self.sizes, initial=0))))

    def shortened(self, n_ranks: int) -> Arrangement:
        """The arrangement without groups on `n_ranks` of its places. The first and the last one stay."""
        kept = (*range(n_ranks - 1), len(self.target) - 1)
        target, threads, skips = (
            tuple(own[i] for i in kept)
            for own in (self.target, self.threads, self.skips or (False,) * len(self.target))
        )
        return replace(self, target=target, threads=threads, skips=skips)

    def places(self, counts: Sequence[int]) -> tuple[Place, ...]:
        """The place of each rank. `counts`: number of layers of each stage."""
        return (*(self.target[i] for i in self._ranks(counts)), *self.draft, *self.further)

    def placed(
        self, spec: ClusterSpec, counts: Sequence[int], draft_layers: int | None, further_layers: Sequence[int] = ()
    ) -> tuple[ClusterSpec, VirtualPlacement]:
        """The cluster with the links that were measured between these places, and the placement of its ranks.

        `counts`: number of layers of each stage. `draft_layers`: number of the first draft model's layers; None: there
        is none. `further_layers`: of each further one.
        """
        used, ranks = self._used(counts), self._ranks(counts)
        starts, sizes = [sum(counts[:i]) for i in used], tuple(self.sizes[i] for i in used)
        layout = Layout.of_ranks([(a, a + counts[i]) for a, i in zip(starts, used, strict=True)], 0, sizes)
        threads, draft_layout = [self.threads[i] for i in ranks], None
        if self.draft and draft_layers is not None:
            draft_layout = Layout.of_ranks([(0, draft_layers)], len(ranks), (len(self.draft),))
            threads += [self.draft_threads] * len(self.draft)
        draft_layouts = [draft_layout]
        for layers in further_layers:
            draft_layouts.append(Layout.of_ranks([(0, layers)], len(threads)))
            threads.append(self.further_threads[len(draft_layouts) - 2])
        while draft_layouts and draft_layouts[-1] is None:
            draft_layouts.pop()
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
            draft_layouts=tuple(draft_layouts),
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
    further: Sequence[FurtherDraft] = (),
) -> list[Arrangement]:
    """All arrangements that are worth an estimate. `speed`: of a node, in any unit.

    `n_ranks`: the exact number of ranks. `in_order`: keep the cluster's ranks, the last one for the draft. `threads`:
    of each rank, instead of its share of the machine's cores. `draft_threads`: of the draft. `draft_parts`: maximum
    number of ranks in the draft's group. `further`: further draft models, which arrangements with a draft also have;
    their machines are free in all arrangements.

    Raises SettingError if there is no room for `n_ranks`.
    """
    maker = _Maker(
        spec=spec,
        speed=speed,
        all_used=n_ranks is not None or in_order,
        in_order=in_order,
        threads=threads,
        draft_threads=draft_threads,
        draft_parts=draft_parts,
    )
    reserved = {own.node for own in further}
    places = [place for place in _places(spec) if place.node not in reserved]
    if n_ranks is not None and n_ranks > len(places):
        raise SettingError(
            "n_ranks", f"{n_ranks}: there is room for {len(places)} ranks, one per machine or as many as named"
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
    if further:
        more = [maker.with_further(own, further) if own.drafts else own for own in found]
        found = [own for own in more if own is not None]
    return list(dict.fromkeys(found))


def _places(spec: ClusterSpec) -> list[Place]:
    taken = spec.target_on + spec.draft_on
    free = [node for node in range(len(spec.nodes)) if node not in taken]
    return [*(Place(node, rank) for rank, node in enumerate(taken)), *(Place(node) for node in free)]


@dataclass(frozen=True, kw_only=True)
class _Maker:
    """Makes arrangements. The fields are the arguments of `arrangements`."""

    spec: ClusterSpec
    speed: Callable[[int], float]
    all_used: bool
    in_order: bool
    threads: int | None
    draft_threads: int | None
    draft_parts: int

    def without_draft(self, base: list[Place]) -> Iterator[Arrangement]:
        for order in self._orders(base):
            yield self._made(order)

    def with_draft(self, base: list[Place]) -> Iterator[Arrangement]:
        for order in self._orders(base):
            for share in self._draft_shares(order[0].node):
                yield self._made(order, inside=True, draft_cores=share)
        if len(base) > 1:
            for place in [base[-1]] if self.in_order else self._kinds(base):
                for drafting in self._draft_groups(base, place):
                    others = [p for p in base if p not in drafting]
                    for order in self._orders(others):
                        yield self._made(order, drafting)
        if self.all_used:
            return
        for place in self._kinds(base):  # next to the target's last rank, since mpirun fills one machine after another
            if self.spec.nodes[place.node].cores > 1:
                order = [*(p for p in base if p.node != place.node), place]
                for share in self._draft_shares(place.node):
                    yield self._made(order, (Place(place.node),), draft_cores=share)

    def with_further(self, own: Arrangement, further: Sequence[FurtherDraft]) -> Arrangement | None:
        """The arrangement with further draft models; None if one is to share the machine of the first draft model's
        rank, and that has none, or no core for it."""
        beside = sum(draft.node is None for draft in further)
        if beside and (not own.draft or own.draft_threads <= beside):
            return None
        draft_threads = own.draft_threads // (1 + beside)
        places, threads = [], []
        ranks = self.spec.target_on + self.spec.draft_on
        for draft in further:
            if draft.node is None:
                places.append(Place(own.draft[-1].node))
                threads.append(draft_threads)
            else:
                places.append(Place(draft.node, ranks.index(draft.node) if draft.node in ranks else None))
                threads.append(self.draft_threads or self.threads or self.spec.nodes[draft.node].cores)
        return replace(own, draft_threads=draft_threads, further=tuple(places), further_threads=tuple(threads))

    def _draft_groups(self, base: list[Place], place: Place) -> Iterator[tuple[Place, ...]]:
        """Places for the draft: this one, and groups of the same kind of machine that end with it."""
        nodes = self.spec.nodes
        alike = [p for p in base if replace(nodes[p.node], name="") == replace(nodes[place.node], name="")]
        for size in range(1, min(self.draft_parts, len(alike), len(base) - 1) + 1):
            yield (*[p for p in alike if p != place][len(alike) - size :], place)

    def _made(
        self, target: list[Place], draft: tuple[Place, ...] = (), *, inside: bool = False, draft_cores: int = 0
    ) -> Arrangement:
        """`draft_cores`: number of cores for a draft that shares a machine; 0: the same as for the other ranks."""
        on = [place.node for place in (*target, *draft)]
        shared = target[0].node if inside else draft[0].node if draft and draft_cores else None
        threads = []
        for place in target:
            cores, n_ranks = self.spec.nodes[place.node].cores, on.count(place.node)
            if place.node == shared and draft_cores:
                cores, n_ranks = cores - draft_cores, n_ranks - len(draft)
            threads.append(self._threads_of(place, max(cores // n_ranks, 1)))
        if draft:
            own = draft_cores or max(self.spec.nodes[draft[0].node].cores // on.count(draft[0].node), 1)
            draft_threads = self._threads_of(draft[0], own)
        else:
            draft_threads = self.threads or draft_cores or threads[0]
        if self.draft_threads is not None:
            draft_threads = self.draft_threads
        skips = [not self.all_used] * len(target)
        if inside:
            skips[0] = False  # otherwise another rank would be the head, with all its threads for the target
        elif draft and draft_cores:
            skips[-1] = False  # otherwise no target rank would share the draft's machine
        if self.in_order and len(target) > 1:
            skips[0] = True
        return Arrangement(
            target=tuple(target),
            threads=tuple(threads),
            draft=draft,
            inside=inside,
            draft_threads=draft_threads,
            skips=tuple(skips),
            in_order=self.in_order,
        )

    def _threads_of(self, place: Place, own: int) -> int:
        if self.threads is not None:
            return self.threads
        if self.in_order and place.rank is not None and self.spec.threads:
            return self.spec.threads[place.rank]
        return own

    def _draft_shares(self, node: int) -> list[int]:
        """Numbers of cores to try for a draft that shares a machine; 0: the user or the cluster sets the threads."""
        cores = self.spec.nodes[node].cores
        if self.in_order or self.threads or self.draft_threads or cores < 2:
            return [0]
        return sorted({max(cores // (2 * _DRAFT_CORES), 1), max(cores // _DRAFT_CORES, 1)})

    def _orders(self, places: list[Place]) -> list[list[Place]]:
        """The places in their own order, and from the fastest to the slowest."""
        fastest = sorted(places, key=lambda place: -self.speed(place.node))
        adjacent = sorted(fastest, key=lambda place: [p.node for p in fastest].index(place.node))
        return [places] if self.in_order or adjacent == places else [places, adjacent]

    def _kinds(self, places: Sequence[Place]) -> list[Place]:
        """The last machine of each kind; if there are many kinds, the slowest ones and the fastest."""
        of_kind = {replace(self.spec.nodes[place.node], name=""): place for place in places}
        kinds = sorted(of_kind.values(), key=lambda place: self.speed(place.node))
        return kinds if len(kinds) <= _KINDS else [*kinds[: _KINDS - 1], kinds[-1]]
