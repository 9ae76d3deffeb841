"""Profiles of clusters: times of stages, and speeds of memory and links. They are stored as JSON files."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ggpipe.cluster.document import DocumentKind
from ggpipe.cluster.links import Overheads, Seconds
from ggpipe.errors import UsageError

_KIND = DocumentKind(name="profile", version=4, command="ggpipe profile -m MODEL -o FILE", renewal="profile again")

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0)]
Layers = tuple[Count, Count]
"""First layer, and one past the last."""


class Point(msgspec.Struct, frozen=True):
    """The mean time in libllama's decode of a run of `rows` tokens after `n_past` tokens."""

    rows: Positive
    n_past: Count
    seconds: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The part of a model's header that determines times and memory."""

    name: str
    architecture: str
    fingerprint: str
    """See `ModelFile.fingerprint`."""
    n_layer: Positive
    n_embd: Count
    """Size of an embedding. In nearly all architectures, stages exchange this many float32 per row."""
    n_vocab: Count
    n_expert: Count
    """Number of experts per layer; 0: every row uses all weights."""
    n_expert_used: Count
    layer_bytes: tuple[Count, ...]
    """Bytes of each layer's weights."""
    input_bytes: Count
    """Bytes of the input embedding, on the first rank. A run reads only the rows of its tokens."""
    output_bytes: Count
    """Bytes of the output layer, on the last rank. If it is the input embedding, it counts in both."""

    def weight_bytes(self, layers: tuple[int, int]) -> int:
        """Maximum bytes of weights that a run reads in a stage: its layers and, on the last stage, the output layer."""
        a, b = layers
        return sum(self.layer_bytes[a:b]) + (self.output_bytes if a < b == self.n_layer else 0)


class Kernels(msgspec.Struct, frozen=True, kw_only=True):
    """Settings, other than threads, that affect the time of a run. See `ContextConfig` and `ModelConfig`."""

    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "on"
    exact: bool = False
    fast_kernels: bool | None = None
    repack: bool = True


@dataclass(frozen=True, slots=True)
class MeasuredLayers:
    """Another range of layers, which was measured in the same way as `RankProfile.layers`."""

    layers: Layers
    weight_bytes: Count
    alone: tuple[Point, ...]
    change_s: Seconds = 0.0
    """See `RankProfile.change_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """One rank: its machine, and its times for runs."""

    rank: Count
    host: str
    cores: Positive
    """Number of physical cores that this rank may use. Ranks of one machine count the same cores."""
    threads: Positive
    threads_batch: Positive
    memory_bytes: Count
    """RAM that was available before anything was loaded. Ranks of one machine count the same memory."""
    memory_bytes_per_s: Seconds
    """Speed of `threads` threads that read memory sequentially, beyond the caches, while other ranks are idle."""
    disk_bytes_per_s: Seconds = 0.0
    """How fast it reads the model's file past the page cache, while other ranks of its machine are idle; 0: unknown."""
    layers: Layers
    """The layers that were measured as one stage."""
    weight_bytes: Count
    """`ModelFacts.weight_bytes` of these layers: with the output layer if they include the last one, without the input
    embedding."""
    alone: tuple[Point, ...]
    """Times while no other rank of the same machine computes."""
    together: tuple[Point, ...]
    """Times while all ranks of the cluster compute."""
    half: MeasuredLayers | None
    """Half of the layers, measured alone; None if `layers` is a single layer."""
    overheads: Overheads
    """Time that ggpipe itself takes besides decoding."""
    change_s: Seconds
    """Additional time to decode few rows when the number of rows changes, because the graph is rebuilt."""
    fixed_s: Seconds
    """Time to decode one row that does not depend on the number of layers, extrapolated from the fastest decodes of
    `half` and of all layers. 0 if `layers` is a single layer."""
    turns: Annotated[float, Meta(ge=1)] | None = None
    """Time to decode one row right after another rank of the machine computed, relative to repeated decodes while the
    other ranks are idle. None if the machine has a single rank, or there was no time to measure it."""
    guest: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Speed of a thread at nice 5 with as much work as a draft has for a row, while all ranks compute, relative to its
    speed alone. None if the ranks leave cores free, and for all but the first rank of a machine."""
    drafts: tuple[MeasuredLayers | None, ...] = ()
    """All layers of each model in `Profile.drafts`, measured alone, with the target's number of threads. None for one
    that does not fit into this rank's memory."""


class LinkProfile(msgspec.Struct, frozen=True):
    """Messages from one rank to another."""

    source: Count
    target: Count
    latency_s: Seconds
    """Time of a small message from program to program: half of a round trip between ranks that wait as for a hop."""
    bytes_per_s: Rate
    """Throughput of a large message, excluding latency."""


class SumPoint(msgspec.Struct, frozen=True):
    """The median time of a sum of `rows` rows with `ModelFacts.n_embd` values each."""

    rows: Positive
    seconds: Annotated[float, Meta(gt=0)]


class DecodeSums(msgspec.Struct, frozen=True):
    """Mean times of a sum of one row inside decodes of a group of two ranks."""

    wait_s: Seconds
    """How long a sum waits for the slower rank, although both ranks have equally much to do; see `Skew`."""
    transfer_s: Seconds
    """Time of the sum on the rank that arrived later."""


@dataclass(frozen=True, slots=True)
class SumProfile:
    """Sums over a group of two ranks, excluding the time of waiting for the slower one."""

    ranks: tuple[Count, Count]
    f32: tuple[SumPoint, ...]
    f16: tuple[SumPoint, ...] = ()
    """Sums of values sent as 16-bit floats; empty if the ranks share memory."""
    in_decodes: DecodeSums | None = None
    """Sums inside decodes. None if they were not measured between these ranks: one pair within a machine and one pair
    between machines is, if the model can be divided."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All ranks of a cluster and the links between them, measured with one model or with a pair."""

    model: ModelFacts
    kernels: Kernels
    ranks: tuple[RankProfile, ...]
    """All ranks, in order."""
    links: tuple[LinkProfile, ...]
    """Links that were measured; not all pairs if there are many ranks."""
    drafts: tuple[ModelFacts, ...] = ()
    """The draft models that were also measured, with the same types of KV cache and never with `exact`."""
    sums: tuple[SumProfile, ...] = ()
    """Sums that were measured: over two ranks of each machine that has several, and between machines. Empty if MPI does
    not support groups."""

    def __post_init__(self) -> None:
        """Raises ValueError if values contradict each other."""
        model, n_ranks = self.model, len(self.ranks)
        for name, facts in (("model", model), *((f"drafts[{i}]", own) for i, own in enumerate(self.drafts))):
            if len(facts.layer_bytes) != facts.n_layer:
                raise ValueError(f"{name}.layer_bytes must have n_layer entries")
        if not self.ranks or [rank.rank for rank in self.ranks] != list(range(n_ranks)):
            raise ValueError("ranks are not numbered 0, 1, 2, …")
        for rank in self.ranks:
            parts = [MeasuredLayers(rank.layers, rank.weight_bytes, rank.alone), *([rank.half] if rank.half else [])]
            if any(not 0 <= part.layers[0] < part.layers[1] <= model.n_layer for part in parts):
                raise ValueError(f"rank {rank.rank} has layers that the model does not have")
            if len(rank.drafts) != len(self.drafts):
                raise ValueError(f"rank {rank.rank} has {len(rank.drafts)} of {len(self.drafts)} drafts")
            for own, facts in zip(rank.drafts, self.drafts, strict=True):
                if own is None:
                    continue
                if own.layers != (0, facts.n_layer):
                    raise ValueError(f"rank {rank.rank} does not have all layers of the draft {facts.name}")
                if own.weight_bytes < 1:
                    raise ValueError(f"rank {rank.rank} has a draft without weights")
                parts.append(own)
            for part in parts:
                if seconds_at(part.alone, 1) is None:
                    raise ValueError(f"rank {rank.rank} has no time for a single row")
        for link in self.links:
            if not (link.source < n_ranks and link.target < n_ranks):
                raise ValueError(f"the link from {link.source} to {link.target} names ranks that do not exist")
        for sums in self.sums:
            if not max(sums.ranks) < n_ranks:
                raise ValueError(f"the sums over {sums.ranks[0]} and {sums.ranks[1]} name ranks that do not exist")
            if any(len({point.rows for point in points}) not in (0, len(points)) for points in (sums.f32, sums.f16)):
                raise ValueError(f"the sums over {sums.ranks[0]} and {sums.ranks[1]} repeat a number of rows")

    def link(self, source: int, target: int) -> LinkProfile | None:
        """The link between two ranks; None if it was not measured."""
        return next((x for x in self.links if (x.source, x.target) == (source, target)), None)


def seconds_at(points: Sequence[Point], rows: int) -> float | None:
    """The time of a run of `rows` tokens in the shortest context, in seconds; None if it was not measured."""
    return next((p.seconds for p in sorted(points, key=lambda p: p.n_past) if p.rows == rows), None)


def as_text(profile: Profile) -> str:
    """The profile as a JSON document."""
    document = {**_KIND.tag, **msgspec.to_builtins(profile)}
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def write(path: Path, profile: Profile) -> None:
    """Write a profile to a file. Raises UsageError if the file cannot be written."""
    try:
        path.write_text(as_text(profile))
    except OSError as e:
        raise UsageError(f"cannot write the profile {path}: {e.strerror}") from e


def read(path: Path) -> Profile:
    """Read a profile from a file. Raises UsageError, with the reason, for a file that is not a valid profile."""
    return _KIND.read(path, Profile)
