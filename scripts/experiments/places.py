"""Where `scripts/experiments/run` simulates: PipeInfer's pairs on nodes like the paper's, and synthetic pipelines.

Models: layers, widths and KV heads are those of the published models; the paper's script for 8 nodes names Q3_K_M for
Dolphin, and Q4_K_M for its draft, which here stands for all others. The nodes are estimates, not measurements.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

from ggpipe.cluster.links import Link
from ggpipe.cluster.model_shape import ModelShape, even_shape
from ggpipe.cluster.spec import ClusterSpec, NodeSpec
from ggpipe.core.layout import lay_out
from ggpipe.sim.virtual_cluster import PipelineSpec, StageSpec, VirtualCluster, VirtualNode, build, placement_of

_Q3_K_M, _Q4_K_M = 3.85, 4.85  # bits of a weight, on average over a 70B file
_F16_BYTES, _FLOAT_BYTES = 2, 4
_LOCAL = Link(60e-6, 5e9)
GIGABIT = Link(80e-6, 0.94e9 / 8)  # 25 to 50 µs of MPI over TCP, and the receiver's polling
FAST = Link(25e-6, 90e9 / 8)  # 2 to 5 µs of MPI, and the same


@dataclass(frozen=True)
class Model:
    """A published model in a quantization."""

    name: str
    layers: int
    parameters: float
    width: int
    kv_width: int
    """Of all KV heads together."""
    vocabulary: int = 32000
    bits: float = _Q4_K_M

    def shape(self) -> ModelShape:
        """What the simulator needs of it."""
        weight_bytes = self.parameters * self.bits / 8
        cell_bytes = 2 * self.layers * self.kv_width * _F16_BYTES
        return even_shape(
            name=self.name,
            n_layer=self.layers,
            weight_bytes=weight_bytes,
            parameters=self.parameters,
            n_embd=self.width,
            cell_bytes=cell_bytes,
            n_vocab=self.vocabulary,
        )


@dataclass(frozen=True)
class Pair:
    """A target and a draft, with the acceptance rate of PipeInfer's paper."""

    target: Model
    draft: Model
    acceptance: float

    @property
    def name(self) -> str:
        """`Dolphin-70B / TinyLlama-1.1B`."""
        return f"{self.target.name} / {self.draft.name}"


_DOLPHIN = Model("Dolphin-70B", 80, 68.98e9, 8192, 8 * 128, bits=_Q3_K_M)
_GOLIATH = Model("Goliath-120B", 137, 117.75e9, 8192, 8 * 128)
_FALCON = Model("Falcon-180B", 80, 179.5e9, 14848, 8 * 64, 65024)
PAIRS = (
    Pair(_DOLPHIN, Model("TinyLlama-1.1B", 22, 1.10e9, 2048, 4 * 64), 0.79),
    Pair(_DOLPHIN, Model("Orca2-7B", 32, 6.74e9, 4096, 4096), 0.66),
    Pair(_GOLIATH, Model("XWin-7B", 32, 6.74e9, 4096, 4096), 0.52),
    Pair(_GOLIATH, Model("XWin-13B", 40, 13.02e9, 5120, 5120), 0.61),
    Pair(_FALCON, Model("Falcon-7B", 32, 7.22e9, 4544, 64, 65024), 0.687),
    Pair(_FALCON, Model("Falcon-40B", 60, 41.84e9, 8192, 8 * 64, 65024), 0.695),
)


@dataclass(frozen=True)
class Site:
    """A kind of node, and the network between them."""

    name: str
    node: NodeSpec
    network: Link


# One process that spans two sockets gets a quarter to a half of the data sheet's memory bandwidth; a core's
# 4-bit matrix products run at some 20 GFLOP/s for each GHz that it keeps up with AVX2.
_OLDER = NodeSpec(
    name="older", cores=16, memory_bytes=128e9, bytes_per_s=50e9, core_bytes_per_s=7e9, core_flop_per_s=45e9
)  # two Xeons of 2014, 8 cores, DDR4-1866 (119 GB/s)
_NEWER = NodeSpec(
    name="newer", cores=40, memory_bytes=192e9, bytes_per_s=80e9, core_bytes_per_s=7e9, core_flop_per_s=45e9
)  # two of 2019, 20 cores, DDR4-2933 and Optane (282 GB/s)
SITES = (Site("older nodes, Gigabit", _OLDER, GIGABIT), Site("newer nodes, 100 Gbit/s", _NEWER, FAST))
OLDER_FAST = Site("older nodes, 100 Gbit/s", _OLDER, FAST)


@dataclass(frozen=True)
class PaperPlace:
    """A pair on `n_nodes` nodes: the last one has the draft, the others even shares of the target."""

    pair: Pair
    site: Site
    n_nodes: int

    @functools.lru_cache(256)  # noqa: B019  a few clusters, for as long as the program runs
    def cluster(self, with_draft: bool) -> VirtualCluster:
        """Without the draft, the target gets its node too."""
        n, target = self.n_nodes, self.pair.target.shape()
        draft = self.pair.draft.shape() if with_draft else None
        nodes = tuple(replace(self.site.node, name=f"node{i + 1}") for i in range(n))
        target_on, draft_on = (tuple(range(n - 1)), (n - 1,)) if with_draft else (tuple(range(n)), ())
        spec = ClusterSpec(
            title=self.site.name,
            nodes=nodes,
            target_on=target_on,
            draft_on=draft_on,
            target=target,
            draft=draft,
            network=self.site.network,
            local=_LOCAL,
        )
        return build(spec, placement_of(spec, target, spec.drafts), target, spec.drafts)


@dataclass(frozen=True)
class _EvenCost:
    run_s: float
    row_share: float

    def seconds(self, n_rows: int, n_past: float, n_others: float = 0) -> float:
        """See ggpipe.sim.costs.Cost."""
        return self.run_s * (1 + self.row_share * (n_rows - 1))


@dataclass(frozen=True)
class EvenPlace:
    """A synthetic pipeline: equal stages, and the draft on a node of its own."""

    n_stages: int = 7
    token_s: float = 0.5
    """In all stages together."""
    draft_share: float = 0.05
    """A token of the draft, of that."""
    row_share: float = 0.1
    """Each further row of a run, of the first one."""
    latency_s: float = GIGABIT.latency_s

    @functools.lru_cache(256)  # noqa: B019
    def cluster(self, with_draft: bool) -> VirtualCluster:
        """See PaperPlace; the target has the same stages without the draft."""
        n = self.n_stages
        stages = {rank: StageSpec(threads=1, cost=_EvenCost(self.token_s / n, self.row_share)) for rank in range(n)}
        target = PipelineSpec(layout=lay_out(n, n, None), stages=stages, row_bytes=_FLOAT_BYTES * 8192)
        stage = StageSpec(threads=1, cost=_EvenCost(self.token_s * self.draft_share, self.row_share))
        draft = PipelineSpec(layout=lay_out(1, 1, None, n), stages={n: stage}, row_bytes=0)
        nodes = tuple(VirtualNode(name=f"node{i + 1}", cores=1) for i in range(n + with_draft))
        link = replace(FAST, latency_s=self.latency_s)
        return VirtualCluster(
            title="even",
            nodes=nodes,
            node_of=tuple(range(len(nodes))),
            target=target,
            drafts=(draft,) if with_draft else (),
            links={},
            network=link,
            local=_LOCAL,
        )


Place = PaperPlace | EvenPlace


@dataclass(frozen=True)
class Costs:
    """Times of a place's runs, as shares of a token's time in all stages of the target."""

    token_s: float
    rows: dict[int, float]
    """Number of rows -> time of such a run."""
    slowest: float
    """The slowest stage, for a token."""
    draft: float
    """The draft, for a token."""

    def best_waiting(self, acceptance: float, most: int = 16) -> tuple[float, int]:
        """By formula: the best speed of chains in the synchronous mode, relative to `iterative`.

        Also the number of draft tokens in these chains.
        """
        a = acceptance
        speeds = {n: (1 - a ** (n + 1)) / (1 - a) / (self.rows[n + 1] + n * self.draft) for n in range(1, most + 1)}
        best = max(speeds, key=lambda n: speeds[n])
        return speeds[best], best

    def one_by_one(self, acceptance: float) -> float:
        """By formula: the speed when each draft token is a run of its own, and each rejection costs a pass."""
        return 1 / (1 - acceptance + acceptance * max(self.slowest, self.draft))


def costs_of(place: Place, n_past: int = 128) -> Costs:
    """After `n_past` tokens."""
    cluster = place.cluster(True)
    (draft,) = cluster.drafts
    stages = [stage.cost for stage in cluster.target.stages.values()]
    token_s = sum(cost.seconds(1, n_past) for cost in stages)
    return Costs(
        token_s,
        {n: sum(cost.seconds(n, n_past) for cost in stages) / token_s for n in range(1, 18)},
        max(cost.seconds(1, n_past) for cost in stages) / token_s,
        sum(stage.cost.seconds(1, n_past) for stage in draft.stages.values()) / token_s,
    )
