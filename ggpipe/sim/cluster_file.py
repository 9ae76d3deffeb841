"""Clusters as TOML files: the models, the nodes, which ranks are where.

    title = "two servers and an office PC, Gigabit Ethernet"
    target_on = ["server1", "server2"]       # the node of each rank that holds layers, the head first
    draft_on = ["office"]                    # without: the draft runs inside the head
    layer_split = "0.5,0.5/1.0"              # default: even
    threads = [16, 16, 6]                    # by rank; default: the node's cores, divided among its ranks

    [target]                                 # or -m FILE
    name = "70B Q4_K_M"
    layers = 80
    weights_gb = 42.5
    parameters_b = 70.6
    width = 8192
    kv_kb = 328                              # KV cache of a token, all layers
    vocabulary = 128256                      # default 32000
    tied = false                             # the output layer is the input embedding; default false

    [draft]                                  # as [target], or -md FILE

    [network]                                # between nodes; [local]: between ranks of a node
    latency_us = 60                          # from program to program
    gbit_per_s = 0.94

    [[node]]
    name = "server"
    count = 2                                # server1, server2; default 1
    cores = 16
    memory_gb = 64
    memory_gb_per_s = 90                     # what all cores read together
    core_gb_per_s = 12                       # what one core reads; default: as all together
    core_gflops = 60                         # what one core computes in matrix products of the weights' type
    crowd = 0.9                              # speed of a core while all others are busy, as a share
                                             # default: as they share memory_gb_per_s

    [overheads]                              # what ggpipe itself takes; see sim/cluster.py
    run_us = 250

Instead of the last four a node may name what `ggpipe profile` measured: `profile = "server.json"`, a file beside the
cluster file, and `profile_rank = 0`. What is not said of its cores, its memory, `crowd`, [network], [local],
run_us and hand_us then comes from there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path

from ggpipe.core.layout import parse_shares
from ggpipe.errors import UsageError
from ggpipe.sim.cluster import Link, Overheads
from ggpipe.sim.profile import Profile, read
from ggpipe.sim.profiled import measured_links, measured_overheads, profiled_node, spec_from_profile, usual_link
from ggpipe.sim.shapes import ModelShape, even_shape
from ggpipe.sim.spec import ClusterSpec, NodeSpec
from ggpipe.sim.tables import Table

CLUSTERS = Path(__file__).parent / "clusters"
"""The files that come with ggpipe; their names stand for them."""

_MOST_NODES, _MOST_CORES, _MOST_LAYERS = 1024, 4096, 4096
_WEIGHT_BITS = (1.0, 64.0)  # of a model's weights, on average


def shipped() -> list[str]:
    """Names of the clusters that come with ggpipe."""
    return sorted(path.stem for path in CLUSTERS.glob("*.toml"))


def read_cluster(path: Path) -> ClusterSpec:
    """Read a cluster file, one that comes with ggpipe by its name, or a profile (.json). Raises UsageError."""
    if not path.exists():
        if str(path) not in shipped():
            names = ", ".join(shipped())
            raise UsageError(f"there is no cluster file {path}; clusters that come with ggpipe are {names}")
        path = CLUSTERS / f"{path}.toml"
    if path.suffix.lower() == ".json":
        return spec_from_profile(read(path), path.stem)
    return _Reader(path).cluster()


@dataclass(frozen=True, slots=True)
class _Place:
    """A node, and where its speed was measured."""

    node: NodeSpec
    profile: Profile | None = None
    rank: int = 0

    @property
    def measured(self) -> tuple[Profile, int] | None:
        return None if self.profile is None else (self.profile, self.rank)


class _Reader:
    def __init__(self, path: Path) -> None:
        self._path = path
        self._profiles: dict[Path, Profile] = {}

    def cluster(self) -> ClusterSpec:
        file = Table.read(self._path)
        title = file.text("title", self._path.stem)
        places = self._places(file)
        numbers = {place.node.name: i for i, place in enumerate(places)}
        draft_on = _numbers_of(file, "draft_on", (), numbers)
        others = [name for name, i in numbers.items() if i not in draft_on]
        target_on = _numbers_of(file, "target_on", others, numbers)
        if not target_on:
            raise file.wrong("target_on", "names no node: give one for each rank that holds layers, the head first")
        shares, draft_shares = _shares(file, len(target_on), len(draft_on))
        threads, n_ranks = file.wholes("threads"), len(target_on) + len(draft_on)
        if len(threads) not in (0, n_ranks):
            raise file.wrong("threads", f"is a list of {len(threads)} numbers for {n_ranks} ranks: give one for each")
        target, draft = _shape(file, "target"), _shape(file, "draft")
        profiles = list(self._profiles.values())
        local = _link(file, "local") or usual_link(profiles, True) or Link(60e-6, 5e9)
        network = _link(file, "network")
        links: Mapping[tuple[int, int], Link] = {}
        if network is None:
            links = measured_links([places[i].measured for i in target_on + draft_on])
            network = usual_link(profiles, False) or (local if len(places) == 1 else None)
        if network is None:
            raise file.wrong("[network]", "is missing: say latency_us and gbit_per_s between nodes")
        overheads = _overheads(file, measured_overheads(place.measured for place in places))
        file.close()
        return ClusterSpec(
            title,
            tuple(place.node for place in places),
            target_on,
            draft_on,
            target,
            draft,
            network,
            local,
            shares,
            draft_shares,
            tuple(threads),
            links,
            overheads,
        )

    def _places(self, file: Table) -> list[_Place]:
        tables = file.tables("node")
        if not tables:
            raise file.wrong("[[node]]", "is missing: describe at least one machine")
        places: list[_Place] = []
        for number, table in enumerate(tables, 1):
            name = table.text("name", f"node{number}")
            count = table.whole("count", 1, most=_MOST_NODES)
            place = self._profiled(table, name) if "profile" in table else _Place(_described(table, name))
            table.close()
            for i in range(1, count + 1):
                places.append(replace(place, node=replace(place.node, name=f"{name}{i}" if count > 1 else name)))
        names = [place.node.name for place in places]
        if len(names) > _MOST_NODES:
            raise file.wrong("[[node]]", f"describes {len(names)} machines; {_MOST_NODES} are possible")
        if twice := [name for i, name in enumerate(names) if name in names[:i]]:
            raise file.wrong("[[node]]", f"names {twice[0]} twice: give each machine a name of its own")
        return places

    def _profiled(self, table: Table, name: str) -> _Place:
        path = self._path.parent / table.text("profile")
        rank = table.whole("profile_rank", 0, zero=True)
        if path not in self._profiles:
            self._profiles[path] = read(path)
        profile = self._profiles[path]
        if rank >= len(profile.ranks):
            raise table.wrong("profile_rank", f"is {rank}, and {path} has ranks 0 to {len(profile.ranks) - 1}")
        node = profiled_node(profile, rank, name)
        assert node.crowd is not None
        cores = table.whole("cores", node.cores, most=_MOST_CORES)
        memory_bytes = table.number("memory_gb", node.memory_bytes / 1e9) * 1e9
        node = replace(node, cores=cores, memory_bytes=memory_bytes, crowd=table.number("crowd", node.crowd, most=1))
        return _Place(node, profile, rank)


def _shape(file: Table, name: str) -> ModelShape | None:
    table = file.table(name)
    if table is None:
        return None
    weight_bytes, parameters = table.number("weights_gb") * 1e9, table.number("parameters_b") * 1e9
    low, high = _WEIGHT_BITS
    if not low <= (bits := 8 * weight_bytes / parameters) <= high:
        raise table.wrong("weights_gb", f"and parameters_b make {bits:.2g} bits of each weight: check both")
    shape = even_shape(
        table.text("name", name),
        table.whole("layers", most=_MOST_LAYERS),
        weight_bytes,
        parameters,
        table.whole("width"),
        table.number("kv_kb") * 1e3,
        table.whole("vocabulary", 32000),
        table.truth("tied"),
    )
    table.close()
    return shape


def _described(table: Table, name: str) -> NodeSpec:
    bytes_per_s = table.number("memory_gb_per_s") * 1e9
    return NodeSpec(
        name,
        table.whole("cores", most=_MOST_CORES),
        table.number("memory_gb") * 1e9,
        bytes_per_s,
        table.number("core_gb_per_s", bytes_per_s / 1e9) * 1e9,
        table.number("core_gflops") * 1e9,
        table.number("crowd", most=1) if "crowd" in table else None,
    )


def _numbers_of(file: Table, key: str, default: Sequence[str], numbers: Mapping[str, int]) -> tuple[int, ...]:
    names = file.texts(key, default)
    for name in names:
        if name not in numbers:
            raise file.wrong(key, f"names {name!r}, and the nodes are {', '.join(numbers)}")
    return tuple(numbers[name] for name in names)


def _shares(file: Table, n_target: int, n_draft: int) -> tuple[tuple[float, ...] | None, tuple[float, ...]]:
    if "layer_split" not in file:
        return None, ()
    text = file.text("layer_split")
    try:
        shares, draft_shares = parse_shares(text)
    except UsageError as e:
        raise file.wrong("layer_split", str(e).removeprefix("--mpi-layer-split ")) from e
    if (len(shares), len(draft_shares)) != (n_target, n_draft):
        raise file.wrong(
            "layer_split",
            f"{text}: {len(shares)} shares for {n_target} target ranks, {len(draft_shares)} for {n_draft} draft ranks; "
            "give one for each",
        )
    return shares, draft_shares


def _link(file: Table, name: str) -> Link | None:
    table = file.table(name)
    if table is None:
        return None
    link = Link(table.number("latency_us", zero=True) / 1e6, table.number("gbit_per_s") * 1e9 / 8)
    table.close()
    return link


def _overheads(file: Table, overheads: Overheads) -> Overheads:
    table = file.table("overheads")
    if table is None:
        return overheads
    given = {}
    for field in fields(Overheads):
        key = f"{field.name.removesuffix('_s')}_us"
        if key in table:
            given[field.name] = table.number(key, zero=True) / 1e6
    table.close()
    return replace(overheads, **given)
