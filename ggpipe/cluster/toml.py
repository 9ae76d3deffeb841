"""Reads clusters from TOML files: the models, the nodes, and where the ranks are.

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

    [draft]                                  # as [target], or -md FILE

    [network]                                # between nodes; [local]: between ranks of a node
    latency_us = 60                          # from program to program
    gbit_per_s = 0.94
    sum_latency_us = 25                      # of a sum over a group, without Python; default: latency_us,
                                             # and 5 for [local], with shared memory

    [[node]]
    name = "server"
    count = 2                                # server1, server2; default 1
    cores = 16
    memory_gb = 64
    memory_gb_per_s = 90                     # read by all cores together
    core_gb_per_s = 12                       # read by one core; default: memory_gb_per_s
    core_gflops = 60                         # of one core, in matrix products of the weights' type
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

Instead of speeds, a node may name a profile from `ggpipe profile`: `profile = "server.json"`, relative to the cluster
file, and `profile_rank = 0`. Cores, memory, `crowd`, `turns`, [network], [local] and [overheads] come from the profile
unless the cluster file gives them.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Annotated, Any

from msgspec import Meta, Struct, defstruct, structs

from ggpipe.cluster.decode import Steps, decode, dotted
from ggpipe.cluster.from_profile import (
    measured_links,
    measured_overheads,
    measured_sums,
    profiled_node,
    spec_from_profile,
    usual_link,
)
from ggpipe.cluster.links import LOCAL_SUMS, Link, Overheads, SumTimes
from ggpipe.cluster.model_shape import Experts, ModelShape, even_shape
from ggpipe.cluster.profile import Profile, read
from ggpipe.cluster.spec import TURNS, ClusterSpec, NodeSpec
from ggpipe.config.layer_split import LayerSplits, n_ranks_of, parse_layer_split
from ggpipe.errors import SettingError, UsageError

CLUSTERS = Path(__file__).parent / "bundled"
"""The folder of cluster files that come with ggpipe, which users refer to by name."""

_MOST_NODES = 1024
_LOCAL = Link(60e-6, 5e9)
_WEIGHT_BITS = (1.0, 64.0)  # plausible bits per weight

NonEmptyText = Annotated[str, Meta(min_length=1, pattern=r"\S")]
PositiveCount = Annotated[int, Meta(ge=1, le=10**15)]
PositiveNumber = Annotated[float, Meta(gt=0, le=1e15)]
Share = Annotated[float, Meta(gt=0, le=1)]
Turns = Annotated[float, Meta(ge=1, le=10)]
Nodes = Annotated[int, Meta(ge=1, le=_MOST_NODES)]
CoreCount = Annotated[int, Meta(ge=1, le=4096)]
ExpertCount = Annotated[int, Meta(ge=1, le=65536)]
LayerCount = Annotated[int, Meta(ge=1, le=4096)]
Microseconds = Annotated[float, Meta(ge=0, le=1e15)]

_Overheads = defstruct(
    "_Overheads",
    [(f"{field.name}_us".replace("_s_us", "_us"), Microseconds | None, None) for field in fields(Overheads)],
    forbid_unknown_fields=True,
)
"""The [overheads] table: the fields of `Overheads`, in microseconds."""


class _Link(Struct, frozen=True, forbid_unknown_fields=True):
    """The [network] and [local] tables."""

    latency_us: Microseconds
    gbit_per_s: PositiveNumber
    sum_latency_us: Microseconds | None = None

    def link(self) -> Link:
        return Link(self.latency_us / 1e6, self.gbit_per_s * 1e9 / 8)

    def sums(self) -> SumTimes | None:
        if self.sum_latency_us is None:
            return None
        return SumTimes.of_link(replace(self.link(), latency_s=self.sum_latency_us / 1e6))


class _Model(Struct, frozen=True, forbid_unknown_fields=True):
    """The [target] and [draft] tables."""

    layers: LayerCount
    weights_gb: PositiveNumber
    parameters_b: PositiveNumber
    width: PositiveCount
    kv_kb: PositiveNumber
    name: NonEmptyText | None = None
    vocabulary: PositiveCount = 32000
    tied: bool = False
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
        return even_shape(
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


class _Node(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A [[node]] table with speeds."""

    name: NonEmptyText | None = None
    count: Nodes = 1
    cores: CoreCount
    memory_gb: PositiveNumber
    memory_gb_per_s: PositiveNumber
    core_gb_per_s: PositiveNumber | None = None
    core_gflops: PositiveNumber
    crowd: Share | None = None
    turns: Turns = TURNS


class _ProfiledNode(Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A [[node]] table with a profile."""

    name: NonEmptyText | None = None
    count: Nodes = 1
    profile: NonEmptyText
    profile_rank: Annotated[int, Meta(ge=0)] = 0
    cores: CoreCount | None = None
    memory_gb: PositiveNumber | None = None
    crowd: Share | None = None
    turns: Turns | None = None


class _File(Struct, frozen=True, forbid_unknown_fields=True):
    """A cluster file."""

    title: NonEmptyText | None = None
    node: list[dict[str, Any]] = []
    target_on: list[str] | None = None
    draft_on: list[str] = []
    layer_split: NonEmptyText | None = None
    threads: list[PositiveCount] = []
    target: _Model | None = None
    draft: _Model | None = None
    network: _Link | None = None
    local: _Link | None = None
    overheads: dict[str, Any] = {}


def shipped() -> list[str]:
    """Names of the clusters that come with ggpipe."""
    return sorted(path.stem for path in CLUSTERS.glob("*.toml"))


def read_cluster(path: Path) -> ClusterSpec:
    """Read a cluster file, or a profile (.json). `path` may also be the name of a cluster that comes with ggpipe.

    Raises UsageError if it cannot be read or is invalid.
    """
    try:
        is_there = path.exists()
    except (OSError, ValueError) as e:
        raise UsageError(f"cannot read the cluster file: {e}") from e
    if not is_there:
        if str(path) not in shipped():
            names = ", ".join(shipped())
            raise UsageError(f"cluster file {path} does not exist; clusters that come with ggpipe are {names}")
        path = CLUSTERS / f"{path}.toml"
    if path.suffix.lower() == ".json":
        return spec_from_profile(read(path), path.stem)
    try:
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as e:
        raise UsageError(f"cannot read {path}: {e.strerror}") from e
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, RecursionError) as e:
        raise UsageError(f"{path} is not a TOML file: {e}") from e
    try:
        return _cluster(decode(content, _File, _named), path)
    except ValueError as e:
        raise UsageError(f"{path}: {e}") from e


@dataclass(frozen=True, slots=True)
class _Machine:
    """A node, with the profile and the rank that its speeds come from, if any."""

    node: NodeSpec
    measured: tuple[Profile, int] | None = None


def _cluster(file: _File, path: Path) -> ClusterSpec:
    machines = _machines(file, path)
    numbers = {machine.node.name: i for i, machine in enumerate(machines)}
    draft_on = _numbers_of("draft_on", file.draft_on, numbers)
    others = [name for name, i in numbers.items() if i not in draft_on]
    target_on = _numbers_of("target_on", others if file.target_on is None else file.target_on, numbers)
    if not target_on:
        raise ValueError("target_on names no node: give one per rank with layers, the head first")
    splits = _layer_splits(file, len(target_on), len(draft_on))
    n_ranks = len(target_on) + len(draft_on)
    if len(file.threads) not in (0, n_ranks):
        raise ValueError(f"threads is a list of {len(file.threads)} numbers for {n_ranks} ranks: give one per rank")
    profiles = list({id(m.measured[0]): m.measured[0] for m in machines if m.measured is not None}.values())
    local = file.local.link() if file.local else usual_link(profiles, True) or _LOCAL
    links: Mapping[tuple[int, int], Link] = {}
    if file.network is None:
        links = measured_links([machines[i].measured for i in target_on + draft_on])
        network = usual_link(profiles, False) or (local if len(machines) == 1 else None)
        if network is None:
            raise ValueError("[network] is missing: give latency_us and gbit_per_s of the links between nodes")
    else:
        network = file.network.link()
    return ClusterSpec(
        title=file.title or path.stem,
        nodes=tuple(machine.node for machine in machines),
        target_on=target_on,
        draft_on=draft_on,
        target=file.target.shape("target") if file.target else None,
        draft=file.draft.shape("draft") if file.draft else None,
        network=network,
        local=local,
        layer_split=splits[0] if splits else None,
        draft_layer_splits=splits[1:],
        threads=tuple(file.threads),
        links=links,
        overheads=_overheads(file, measured_overheads(machine.measured for machine in machines)),
        sums={
            (a, b): times
            for (a, b), times in measured_sums([machine.measured for machine in machines]).items()
            if (file.local if a == b else file.network) is None
        },
        network_sums=file.network.sums() if file.network else None,
        local_sums=(file.local and file.local.sums()) or LOCAL_SUMS,
    )


def _machines(file: _File, path: Path) -> list[_Machine]:
    if not file.node:
        raise ValueError("[[node]] is missing: describe at least one machine")
    profiles: dict[Path, Profile] = {}
    machines: list[_Machine] = []
    for number, table in enumerate(file.node, 1):

        def name_of(steps: Steps, number: int = number) -> str:
            return f"[[node]] {number} {_named(steps)}".rstrip()

        is_profiled = "profile" in table
        node = decode(table, _ProfiledNode, name_of) if is_profiled else decode(table, _Node, name_of)
        name = node.name or f"node{number}"
        if isinstance(node, _Node):
            machine = _Machine(_described(node, name))
        else:
            file_path = path.parent / node.profile
            if file_path not in profiles:
                profiles[file_path] = read(file_path)
            profile, rank = profiles[file_path], node.profile_rank
            if rank >= (n_ranks := len(profile.ranks)):
                raise ValueError(f"{name_of(['profile_rank'])} is {rank}, and {file_path} has ranks 0 to {n_ranks - 1}")
            machine = _Machine(_profiled(node, profile, name), (profile, rank))
        for i in range(1, node.count + 1):
            own = replace(machine.node, name=f"{name}{i}" if node.count > 1 else name)
            machines.append(replace(machine, node=own))
    names = [machine.node.name for machine in machines]
    if len(names) > _MOST_NODES:
        raise ValueError(f"[[node]] describes {len(names)} machines, but at most {_MOST_NODES} are supported")
    if twice := [name for i, name in enumerate(names) if name in names[:i]]:
        raise ValueError(f"[[node]] names {twice[0]} twice: give each machine a name of its own")
    return machines


def _described(node: _Node, name: str) -> NodeSpec:
    core_gb_per_s = node.core_gb_per_s or node.memory_gb_per_s
    return NodeSpec(
        name=name,
        cores=node.cores,
        memory_bytes=node.memory_gb * 1e9,
        bytes_per_s=node.memory_gb_per_s * 1e9,
        core_bytes_per_s=core_gb_per_s * 1e9,
        core_flop_per_s=node.core_gflops * 1e9,
        crowd=node.crowd,
        turns=node.turns,
    )


def _profiled(node: _ProfiledNode, profile: Profile, name: str) -> NodeSpec:
    """The node as it was measured, with the values that the cluster file gives."""
    own = profiled_node(profile, node.profile_rank, name)
    memory_bytes = node.memory_gb * 1e9 if node.memory_gb else own.memory_bytes
    return replace(
        own,
        cores=node.cores or own.cores,
        memory_bytes=memory_bytes,
        crowd=node.crowd or own.crowd,
        turns=node.turns or own.turns,
    )


def _overheads(file: _File, overheads: Overheads) -> Overheads:
    """The measured overheads, with the values that the cluster file gives."""
    table = decode(file.overheads, _Overheads, lambda path: f"[overheads] {dotted(path)}")
    given = {key.replace("_us", "_s"): us / 1e6 for key, us in structs.asdict(table).items() if us is not None}
    return replace(overheads, **given)


def _numbers_of(key: str, names: Sequence[str], numbers: Mapping[str, int]) -> tuple[int, ...]:
    for name in names:
        if name not in numbers:
            raise ValueError(f"{key} names {name!r}, but the nodes are {', '.join(numbers)}")
    return tuple(numbers[name] for name in names)


def _layer_splits(file: _File, n_target: int, n_draft: int) -> LayerSplits:
    """The splits of the target and of the draft; empty if the file has none."""
    if file.layer_split is None:
        return ()
    text = file.layer_split
    try:
        splits = parse_layer_split(text)
    except SettingError as e:
        raise ValueError(e.wording.spelled(str)) from e
    if len(splits) > 2:
        raise ValueError(f"layer_split {text}: a cluster has one draft model, so use at most one /")
    named = n_ranks_of(splits[:1]), n_ranks_of(splits[1:])
    if named != (n_target, n_draft):
        raise ValueError(
            f"layer_split {text}: {named[0]} shares for {n_target} target ranks, {named[1]} for {n_draft} draft ranks; "
            "give one per rank"
        )
    return splits


def _named(path: Steps) -> str:
    """The name of a value for messages: `[network] latency_us`, `threads[1]`."""
    match path:
        case [str(table), str(key)]:
            return f"[{table}] {key}"
    return dotted(path)
