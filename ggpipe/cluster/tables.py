"""Tables of a cluster file, in TOML: the models, the nodes, and where the ranks are.

    title = "two servers and an office PC, Gigabit Ethernet"
    target_on = ["server1", "server2"]       # the node of each rank with layers, the head first
    draft_on = ["office"]                    # default: the draft runs inside the head
    layer_split = "0.5,0.5/1.0"              # default: even; "0.5*2,0.5*2/1.0": two groups of two ranks
    threads = [16, 16, 6]                    # one per rank; default: the node's cores, divided among its ranks

    [target]                                 # or -m FILE
    name = "70B Q4_K_M"
    layers = 80
    weights_gb = 42.5
    parameters_b = 70.6
    width = 8192
    kv_kb = 328                              # KV cache of a token, in all layers
    vocabulary = 128256                      # default 32000
    tied = false                             # the input embedding is also the output layer; default false
    kv_heads = 8                             # a group has at most as many parts; default: any number
    latent_kv = false                        # the KV cache has no heads, so all parts of a group hold all of it (MLA);
                                             # kv_heads is then the number of query heads; default false
    attention_width = 8192                   # of all query heads together; default: width. Not with latent_kv
    window = 128                             # KV cells that a token sees in window_layers layers: a sliding window, or
                                             # those that the model selects; default: all of its context
    window_layers = 18                       # default: all layers
    index_width = 4096                       # of the heads that select cells, all together; default 0
    state_mb = 79                            # a sequence's recurrent state in all layers together; default: none
    state_layers = 36                        # layers with a state in place of attention; default: all have both

    [draft]                                  # as [target], or -md FILE

    [network]                                # between nodes; [local]: between ranks of a node
    latency_us = 60                          # from program to program
    gbit_per_s = 0.94
    sum_latency_us = 25                      # of a sum over a group, without Python; default: latency_us,
                                             # and 5 for [local], with shared memory
    skew_us = 230                            # how long a sum waits for the group's slowest part; default: 15 for each
                                             # of a part's threads but one, and 7 for [local]

    [[node]]
    name = "server"
    count = 2                                # server1, server2; default 1
    cpu = "Xeon Gold 6226R"                  # gives cores and speeds that are not given here; see cluster/processors.py
    cores = 16
    memory_gb = 64
    memory_gb_per_s = 90                     # read by all cores together
    core_gb_per_s = 12                       # read by one core; default: as the cpu's, or memory_gb_per_s
    disk_gb_per_s = 3.0                      # read from the model's file past the page cache, by all ranks together.
                                             # Weights that do not fit into memory are then streamed; default: they must
                                             # fit
    core_gflops = 60                         # of one core, in matrix products of the weights' type; default: as the
                                             # cpu's, or 60
    crowd = 0.9                              # speed of a core while all others are busy, relative to its speed alone;
                                             # default: from sharing memory_gb_per_s
    turns = 1.06                             # time to decode one row after another rank of the node computed,
                                             # relative to repeated decodes; default 1.06

    [overheads]                              # time that ggpipe itself takes; see cluster/links.py
    run_us = 250

A mixture of experts has further keys in [target] or [draft]:

    experts = 128                            # routed experts in a layer
    experts_used = 8                         # number of experts that a token uses
    expert_gb = 137.3                        # size of all routed experts
    dense_layers = 3                         # number of initial layers without experts; default 0

A node with `sockets = 2` is a machine of two sockets. Each has half of its cores, memory and memory_gb_per_s, and the
link between them is [local]. They are called server/1 and server/2 (server1/1 and so on with a count), and `server` in
target_on or draft_on means a rank on each. `cpu` is the processor of one socket.

Instead of speeds, a node may name a profile from `ggpipe profile`: `profile = "server.json"`, relative to the cluster
file, and `profile_rank = 0`. Cores, memory, the disk, `crowd`, `turns`, [network], [local] and [overheads] come from
the profile unless the cluster file gives them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, replace
from typing import Annotated, Any

from msgspec import Meta, Struct, defstruct

from ggpipe.cluster.links import Link, Overheads, Skew, SumTimes
from ggpipe.cluster.model_shape import Experts, ModelShape, even_shape
from ggpipe.cluster.processors import USUAL_CORE_GFLOPS, processor
from ggpipe.cluster.spec import TURNS, NodeSpec
from ggpipe.config.context import MAX_STATES
from ggpipe.config.layer_split import MAX_PARTS, MAX_RANKS
from ggpipe.core.row_work import Attention

MOST_NODES = MAX_RANKS
"""Maximum number of machines in a cluster."""
_WEIGHT_BITS = (1.0, 64.0)  # plausible bits per weight
_CELL_BYTES = 2  # of a number: F16
# As DeepSeek-V3, whose latent vectors have 576 numbers, of which 512 are values, and whose heads have 192 and 128:
_LATENT_VALUES = 512 / 576
_N_STATES = 1 + 2 * MAX_STATES
"""Sequences with a recurrent state: a request's, kept prefixes, and those that draft tokens are taken back to."""
_LONG_CELL, _EXPANSION = 320 / 1088, 512 * 256 / 1088

NonEmptyText = Annotated[str, Meta(min_length=1, pattern=r"\S")]
PositiveCount = Annotated[int, Meta(ge=1, le=10**15)]
PositiveNumber = Annotated[float, Meta(gt=0, le=1e15)]
Share = Annotated[float, Meta(gt=0, le=1)]
Turns = Annotated[float, Meta(ge=1, le=10)]
Nodes = Annotated[int, Meta(ge=1, le=MOST_NODES)]
CoreCount = Annotated[int, Meta(ge=1, le=4096)]
Sockets = Annotated[int, Meta(ge=1, le=8)]
ExpertCount = Annotated[int, Meta(ge=1, le=65536)]
LayerCount = Annotated[int, Meta(ge=1, le=4096)]
Microseconds = Annotated[float, Meta(ge=0, le=1e15)]

OverheadsTable = defstruct(
    "OverheadsTable",
    [(f"{field.name}_us".replace("_s_us", "_us"), Microseconds | None, None) for field in fields(Overheads)],
    forbid_unknown_fields=True,
)
"""The [overheads] table: the fields of `Overheads`, in microseconds."""


class LinkTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The [network] and [local] tables."""

    latency_us: Microseconds
    gbit_per_s: PositiveNumber
    sum_latency_us: Microseconds | None = None
    skew_us: Microseconds | None = None

    def link(self) -> Link:
        return Link(self.latency_us / 1e6, self.gbit_per_s * 1e9 / 8)

    def sums(self, skew: Skew) -> SumTimes | None:
        """Sums over these links; None if they are as long as messages."""
        if self.sum_latency_us is None:
            return None
        return SumTimes.of_link(replace(self.link(), latency_s=self.sum_latency_us / 1e6), self.skew(skew))

    def skew(self, default: Skew) -> Skew:
        """The table's skew, or the default."""
        return default if self.skew_us is None else Skew(self.skew_us / 1e6)


class ModelTable(Struct, frozen=True, forbid_unknown_fields=True):
    """The [target] and [draft] tables."""

    layers: LayerCount
    weights_gb: PositiveNumber
    parameters_b: PositiveNumber
    width: PositiveCount
    kv_kb: PositiveNumber
    name: NonEmptyText | None = None
    vocabulary: PositiveCount = 32000
    tied: bool = False
    kv_heads: PositiveCount = MAX_PARTS
    latent_kv: bool = False
    attention_width: PositiveCount | None = None
    window: PositiveCount | None = None
    window_layers: LayerCount | None = None
    index_width: Annotated[int, Meta(ge=0)] = 0
    state_mb: PositiveNumber | None = None
    state_layers: LayerCount | None = None
    experts: ExpertCount | None = None
    experts_used: ExpertCount | None = None
    expert_gb: PositiveNumber | None = None
    dense_layers: Annotated[int, Meta(ge=0)] = 0

    def __post_init__(self) -> None:
        low, high = _WEIGHT_BITS
        if not low <= (bits := 8 * self.weights_gb / self.parameters_b) <= high:
            raise ValueError(f"weights_gb and parameters_b give {bits:.2g} bits per weight: check both")
        given = {"experts": self.experts, "experts_used": self.experts_used, "expert_gb": self.expert_gb}
        missing = [key for key, value in given.items() if value is None]
        if missing and (self.dense_layers or len(missing) < len(given)):
            raise ValueError(f"{' and '.join(missing)} missing: a mixture of experts needs {', '.join(given)}")
        if self.experts and self.experts_used and self.experts_used >= self.experts:
            raise ValueError(f"experts_used must be below experts ({self.experts}), got {self.experts_used}")
        if self.dense_layers >= self.layers:
            raise ValueError(f"dense_layers must be below layers ({self.layers}), got {self.dense_layers}")
        if self.latent_kv and self.attention_width:
            raise ValueError("attention_width cannot be given with latent_kv, where it follows from kv_heads and kv_kb")
        if not self.window and (self.window_layers or self.index_width):
            raise ValueError(f"window missing: {'window_layers' if self.window_layers else 'index_width'} needs it")
        if self.window_layers and self.window_layers > self.layers:
            raise ValueError(f"window_layers must be at most layers ({self.layers}), got {self.window_layers}")
        if self.state_layers and not self.state_mb:
            raise ValueError("state_mb missing: state_layers needs it")
        if self.state_layers and self.state_layers >= self.layers:
            raise ValueError(f"state_layers must be below layers ({self.layers}), got {self.state_layers}")
        self.shape("")

    def shape(self, default_name: str) -> ModelShape:
        experts = None
        if self.experts and self.experts_used and self.expert_gb:
            experts = Experts(
                n_expert=self.experts,
                n_used=self.experts_used,
                n_bytes=self.expert_gb * 1e9,
                n_dense_layers=self.dense_layers,
            )
        shape = even_shape(
            name=self.name or default_name,
            n_layer=self.layers,
            weight_bytes=self.weights_gb * 1e9,
            parameters=self.parameters_b * 1e9,
            n_embd=self.width,
            cell_bytes=self.kv_kb * 1e3,
            n_vocab=self.vocabulary,
            tied=self.tied,
            experts=experts,
        )
        has_attention = [not own for own in _spread(self.state_layers or 0, self.layers)]
        cell_bytes = self.kv_kb * 1e3 / sum(has_attention)
        shape = replace(
            shape,
            max_parts=min(self.kv_heads, MAX_PARTS),
            divides_cells=not self.latent_kv,
            layer_cell_bytes=tuple(cell_bytes * own for own in has_attention),
            layer_attention=tuple(
                attention if own else Attention(cell=0)
                for own, attention in zip(has_attention, self._attention(), strict=True)
            ),
        )
        if self.state_mb is None:
            return shape
        state_bytes = round(_N_STATES * self.state_mb * 1e6 / (self.state_layers or self.layers))
        has_state = _spread(self.state_layers or self.layers, self.layers)
        return replace(shape, layer_state_bytes=tuple(state_bytes * own for own in has_state), n_states=_N_STATES)

    def _attention(self) -> tuple[Attention, ...]:
        """Of each layer. Those with a window are spread evenly."""
        if self.latent_kv:
            numbers = self.kv_kb * 1e3 / self.layers / _CELL_BYTES
            cell = 2 * self.kv_heads * (1 + _LATENT_VALUES) * numbers
            everywhere = Attention(cell=cell, long_cell=_LONG_CELL * cell, expansion=_EXPANSION * cell)
        else:
            everywhere = Attention(cell=4 * (self.attention_width or self.width))
        if not self.window:
            return (everywhere,) * self.layers
        within = replace(everywhere.never_long(), most_cells=self.window, index=2 * self.index_width)
        n_within = self.window_layers or self.layers
        return tuple(within if own else everywhere for own in _spread(n_within, self.layers))


def _spread(n: int, n_layers: int) -> tuple[bool, ...]:
    """Which layers are `n` that are spread evenly over all."""
    return tuple((i + 1) * n // n_layers > i * n // n_layers for i in range(n_layers))


class NodeTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A [[node]] table with speeds."""

    name: NonEmptyText | None = None
    count: Nodes = 1
    cpu: NonEmptyText | None = None
    sockets: Sockets = 1
    cores: CoreCount | None = None
    memory_gb: PositiveNumber
    memory_gb_per_s: PositiveNumber | None = None
    core_gb_per_s: PositiveNumber | None = None
    core_gflops: PositiveNumber | None = None
    disk_gb_per_s: PositiveNumber | None = None
    crowd: Share | None = None
    turns: Turns = TURNS

    def __post_init__(self) -> None:
        if self.cpu is not None:
            try:
                processor(self.cpu)
            except ValueError as e:
                raise ValueError(f"cpu {e}") from e
            return
        given = {"cores": self.cores, "memory_gb_per_s": self.memory_gb_per_s}
        if missing := [key for key, value in given.items() if value is None]:
            raise ValueError(
                f'{" and ".join(missing)} missing: give a value, or the processor, as in cpu = "EPYC 7763"'
            )
        if self.cores is not None and self.cores % self.sockets:
            raise ValueError(f"cores must be a multiple of sockets ({self.sockets}), got {self.cores}")

    def sockets_named(self, name: str) -> Iterator[NodeSpec]:
        """Each of the machine's sockets; the machine itself if it has only one."""
        own = None if self.cpu is None else processor(self.cpu)
        cores = self.cores // self.sockets if self.cores else own.cores if own else 0
        gb_per_s = self.memory_gb_per_s / self.sockets if self.memory_gb_per_s else own.gb_per_s if own else 0.0
        core_gb_per_s = self.core_gb_per_s or (own.core_gb_per_s if own else gb_per_s)
        core_gflops = self.core_gflops or (own.core_gflops if own else USUAL_CORE_GFLOPS)
        for number in range(1, self.sockets + 1):
            yield NodeSpec(
                name=name if self.sockets == 1 else f"{name}/{number}",
                machine="" if self.sockets == 1 else name,
                cores=cores,
                memory_bytes=self.memory_gb * 1e9 / self.sockets,
                bytes_per_s=gb_per_s * 1e9,
                core_bytes_per_s=core_gb_per_s * 1e9,
                core_flop_per_s=core_gflops * 1e9,
                disk_bytes_per_s=self.disk_gb_per_s * 1e9 / self.sockets if self.disk_gb_per_s else 0.0,
                crowd=self.crowd,
                turns=self.turns,
            )


class ProfiledNodeTable(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A [[node]] table with a profile."""

    name: NonEmptyText | None = None
    count: Nodes = 1
    profile: NonEmptyText
    profile_rank: Annotated[int, Meta(ge=0)] = 0
    cores: CoreCount | None = None
    memory_gb: PositiveNumber | None = None
    disk_gb_per_s: PositiveNumber | None = None
    crowd: Share | None = None
    turns: Turns | None = None


class ClusterFile(Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster file."""

    title: NonEmptyText | None = None
    node: list[dict[str, Any]] = []
    target_on: list[str] | None = None
    draft_on: list[str] = []
    layer_split: NonEmptyText | None = None
    threads: list[PositiveCount] = []
    target: ModelTable | None = None
    draft: ModelTable | None = None
    network: LinkTable | None = None
    local: LinkTable | None = None
    overheads: dict[str, Any] = {}
