"""Reads cluster files (`tables` has their format), and profiles as clusters."""

from __future__ import annotations

import itertools
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from msgspec import structs

from ggpipe.cluster.decode import Steps, decode, dotted
from ggpipe.cluster.from_profile import (
    measured_links,
    measured_overheads,
    measured_skew,
    measured_sums,
    profiled_node,
    spec_from_profile,
    usual_link,
)
from ggpipe.cluster.links import LOCAL_SUMS, NETWORK_SKEW, Link, Overheads, Skew, SumTimes
from ggpipe.cluster.profile import Profile, read
from ggpipe.cluster.spec import ClusterSpec, NodeSpec
from ggpipe.cluster.tables import MOST_NODES, ClusterFile, LinkTable, NodeTable, OverheadsTable, ProfiledNodeTable
from ggpipe.config.layer_split import LayerSplits, n_ranks_of, parse_layer_split
from ggpipe.errors import SettingError, UsageError

CLUSTERS = Path(__file__).parent / "bundled"
"""The folder of cluster files that come with ggpipe, which users refer to by name."""

_LOCAL = Link(60e-6, 5e9)


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
        return _cluster(decode(content, ClusterFile, _named), path)
    except ValueError as e:
        raise UsageError(f"{path}: {e}") from e


@dataclass(frozen=True, slots=True)
class _Machine:
    """A node, with the profile and the rank that its speeds come from, if any."""

    node: NodeSpec
    measured: tuple[Profile, int] | None = None


def _cluster(file: ClusterFile, path: Path) -> ClusterSpec:
    machines = _machines(file, path)
    numbers: dict[str, tuple[int, ...]] = {}
    for i, machine in enumerate(machines):
        for name in dict.fromkeys((machine.node.host, machine.node.name)):
            numbers[name] = (*numbers.get(name, ()), i)
    draft_on = _numbers_of("draft_on", file.draft_on, numbers)
    others = [machine.node.name for i, machine in enumerate(machines) if i not in draft_on]
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
        is_one = len({machine.node.host for machine in machines}) == 1
        network = usual_link(profiles, False) or (local if is_one else None)
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
        network_sums=file.network.sums(NETWORK_SKEW) if file.network else None,
        network_skew=file.network.skew(NETWORK_SKEW) if file.network else measured_skew(profiles, False),
        local_sums=_local_sums(file.local, measured_skew(profiles, True)),
    )


def _local_sums(table: LinkTable | None, skew: Skew) -> SumTimes:
    """Sums between ranks of a node, if they were not measured. `skew`: as measured, or the default."""
    if table is None:
        return replace(LOCAL_SUMS, skew=skew)
    return table.sums(LOCAL_SUMS.skew) or replace(LOCAL_SUMS, skew=table.skew(LOCAL_SUMS.skew))


def _machines(file: ClusterFile, path: Path) -> list[_Machine]:
    if not file.node:
        raise ValueError("[[node]] is missing: describe at least one machine")
    profiles: dict[Path, Profile] = {}
    machines: list[_Machine] = []
    all_names: list[str] = []
    for number, table in enumerate(file.node, 1):

        def name_of(steps: Steps, number: int = number) -> str:
            return f"[[node]] {number} {_named(steps)}".rstrip()

        is_profiled = "profile" in table
        node = decode(table, ProfiledNodeTable, name_of) if is_profiled else decode(table, NodeTable, name_of)
        name = node.name or f"node{number}"
        names = [f"{name}{i}" for i in range(1, node.count + 1)] if node.count > 1 else [name]
        all_names += names
        if isinstance(node, NodeTable):
            machines += [_Machine(socket) for own in names for socket in node.sockets_named(own)]
        else:
            file_path = path.parent / node.profile
            if file_path not in profiles:
                profiles[file_path] = read(file_path)
            profile, rank = profiles[file_path], node.profile_rank
            if rank >= (n_ranks := len(profile.ranks)):
                raise ValueError(f"{name_of(['profile_rank'])} is {rank}, and {file_path} has ranks 0 to {n_ranks - 1}")
            machines += [_Machine(_profiled(node, profile, own), (profile, rank)) for own in names]
    if len(machines) > MOST_NODES:
        raise ValueError(f"[[node]] describes {len(machines)} machines, but at most {MOST_NODES} are supported")
    all_names += [machine.node.name for machine in machines if machine.node.machine]
    if twice := [name for i, name in enumerate(all_names) if name in all_names[:i]]:
        raise ValueError(f"[[node]] names {twice[0]} twice: give each machine a name of its own")
    return machines


def _profiled(node: ProfiledNodeTable, profile: Profile, name: str) -> NodeSpec:
    """The node as it was measured, with the values that the cluster file gives."""
    own = profiled_node(profile, node.profile_rank, name)
    memory_bytes = node.memory_gb * 1e9 if node.memory_gb else own.memory_bytes
    disk_bytes_per_s = node.disk_gb_per_s * 1e9 if node.disk_gb_per_s else own.disk_bytes_per_s
    return replace(
        own,
        cores=node.cores or own.cores,
        memory_bytes=memory_bytes,
        disk_bytes_per_s=disk_bytes_per_s,
        crowd=node.crowd or own.crowd,
        turns=node.turns or own.turns,
    )


def _overheads(file: ClusterFile, overheads: Overheads) -> Overheads:
    """The measured overheads, with the values that the cluster file gives."""
    table = decode(file.overheads, OverheadsTable, lambda path: f"[overheads] {dotted(path)}")
    given = {key.replace("_us", "_s"): us / 1e6 for key, us in structs.asdict(table).items() if us is not None}
    return replace(overheads, **given)


def _numbers_of(key: str, names: Sequence[str], numbers: Mapping[str, tuple[int, ...]]) -> tuple[int, ...]:
    """The nodes of these names, of which that of a machine with several sockets means all of them."""
    for name in names:
        if name not in numbers:
            raise ValueError(f"{key} names {name!r}, but the nodes are {', '.join(numbers)}")
    return tuple(itertools.chain.from_iterable(numbers[name] for name in names))


def _layer_splits(file: ClusterFile, n_target: int, n_draft: int) -> LayerSplits:
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
