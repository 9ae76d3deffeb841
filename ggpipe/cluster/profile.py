"""Profiles: how long stages take on the nodes of a cluster, how fast memory and links are; as a JSON file."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta

from ggpipe.cluster.decode import decode
from ggpipe.cluster.links import Overheads, Seconds
from ggpipe.errors import UsageError

_FORMAT, _VERSION = "ggpipe profile", 3

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Rate = Annotated[float, Meta(gt=0)]
Layers = tuple[Count, Count]
"""First layer, and one past the last."""


@dataclass(frozen=True, slots=True)
class Point:
    """A run of `rows` tokens behind `n_past` tokens took `seconds` in libllama's decode, on average."""

    rows: Positive
    n_past: Count
    seconds: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """The part of a model's header that times and memory follow from."""

    name: str
    architecture: str
    fingerprint: str
    """As `ModelFile.fingerprint`."""
    n_layer: Positive
    n_embd: Count
    """Numbers in an embedding: a row that crosses a border is so many float32, in nearly all architectures."""
    n_vocab: Count
    n_expert: Count
    """Experts in a layer; 0: a row uses every weight."""
    n_expert_used: Count
    layer_bytes: tuple[Count, ...]
    """Bytes of each layer's weights."""
    input_bytes: Count
    """Bytes of the input embedding, on the first rank: a run reads its tokens' rows alone."""
    output_bytes: Count
    """Bytes of the output layer, on the last rank. Where it is the input embedding, it counts in both."""

    def weight_bytes(self, layers: tuple[int, int]) -> int:
        """Weights that a run reads in a stage, at most: its layers and, on the last stage, the output layer."""
        a, b = layers
        return sum(self.layer_bytes[a:b]) + (self.output_bytes if a < b == self.n_layer else 0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernels:
    """Settings other than threads that change how long a run takes; as in `ContextConfig` and `ModelConfig`."""

    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "on"
    exact: bool = False
    repack: bool = True


@dataclass(frozen=True, slots=True)
class MeasuredLayers:
    """Another range of layers, measured in the same way."""

    layers: Layers
    weight_bytes: Count
    alone: tuple[Point, ...]
    change_s: Seconds = 0.0
    """As `RankProfile.change_s`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RankProfile:
    """One rank: its machine, and how long it takes for runs."""

    rank: Count
    host: str
    cores: Positive
    """Physical ones of its machine that this rank may use; ranks of one machine count the same ones."""
    threads: Positive
    threads_batch: Positive
    memory_bytes: Count
    """RAM that was free or could be freed before anything was loaded; ranks of one machine count the same."""
    memory_bytes_per_s: Seconds
    """`threads` threads reading memory beyond the caches, one byte after the other, while only this rank works."""
    layers: Layers
    """The layers that were measured as one stage."""
    weight_bytes: Count
    """As `ModelFacts.weight_bytes` of these layers: with the output layer if the last layer is in, without the input
    embedding."""
    alone: tuple[Point, ...]
    """Times while no other rank of the same machine computes."""
    together: tuple[Point, ...]
    """Times while all ranks of the cluster compute."""
    half: MeasuredLayers | None
    """Fewer of the layers, alone; None where a single layer was measured."""
    overheads: Overheads
    """What ggpipe takes besides decoding."""
    change_s: Seconds
    """Extra time of a decode of few rows when the run before had another number of rows: its graph is built anew."""
    fixed_s: Seconds
    """Time of a decode of one row that does not depend on the number of layers: a straight line through the fastest
    decodes of `half` and of all layers, at no weights. 0 where a single layer was measured."""
    turns: Annotated[float, Meta(ge=1)] | None = None
    """Time of a decode of one row right after another rank of the machine computed, relative to decodes in a row while
    the other ranks rest. None where the machine has a single rank, or there was no time for it."""
    guest: Annotated[float, Meta(gt=0, le=1)] | None = None
    """Speed of a thread at nice 10 that works as long as a draft does for a row, while all ranks compute, relative to
    its speed alone. None where the ranks leave cores free, and for all but the first rank of a machine."""
    draft: MeasuredLayers | None = None
    """All layers of `Profile.draft`, alone, with as many threads as the target. None where no draft was measured, or
    this rank's memory is too small for it."""


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Messages from one rank to another."""

    source: Count
    target: Count
    latency_s: Seconds
    """Time of a small message, from program to program: half a round trip between ranks that wait as for a hop."""
    bytes_per_s: Rate
    """Throughput of a large message, its latency not counted."""


@dataclass(frozen=True, slots=True)
class SumPoint:
    """A sum of `rows` rows of `ModelFacts.n_embd` values took `seconds`: the median."""

    rows: Positive
    seconds: Annotated[float, Meta(gt=0)]


@dataclass(frozen=True, slots=True)
class SumProfile:
    """Sums over a group of two ranks, without waiting for the slower one."""

    ranks: tuple[Count, Count]
    f32: tuple[SumPoint, ...]
    f16: tuple[SumPoint, ...] = ()
    """With values that travel as 16-bit floats; empty where the ranks share memory."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """All ranks of a cluster, and the links between them, measured with one model, or with a pair."""

    model: ModelFacts
    kernels: Kernels
    ranks: tuple[RankProfile, ...]
    """All ranks, in order."""
    links: tuple[LinkProfile, ...]
    """Links that were measured: not all pairs where there are many ranks."""
    draft: ModelFacts | None = None
    """The draft model that was measured with it; its KV cache has the same types, it is never `exact`."""
    sums: tuple[SumProfile, ...] = ()
    """Sums that were measured: over two ranks of each machine that has several, and between machines. Empty where MPI
    cannot compute in groups."""

    def __post_init__(self) -> None:
        """Raises ValueError for what does not fit together."""
        model, n_ranks = self.model, len(self.ranks)
        for name, facts in (("model", model), *([("draft", self.draft)] if self.draft else [])):
            if len(facts.layer_bytes) != facts.n_layer:
                raise ValueError(f"{name}.layer_bytes has not one entry for each of n_layer layers")
        if not self.ranks or [rank.rank for rank in self.ranks] != list(range(n_ranks)):
            raise ValueError("ranks are not numbered 0, 1, 2, …")
        for rank in self.ranks:
            parts = [MeasuredLayers(rank.layers, rank.weight_bytes, rank.alone), *([rank.half] if rank.half else [])]
            if any(not 0 <= part.layers[0] < part.layers[1] <= model.n_layer for part in parts):
                raise ValueError(f"rank {rank.rank} has layers that the model has not")
            if rank.draft is not None:
                if self.draft is None or rank.draft.layers != (0, self.draft.n_layer):
                    raise ValueError(f"rank {rank.rank} has not all layers of the draft")
                if rank.draft.weight_bytes < 1:
                    raise ValueError(f"rank {rank.rank} has a draft of no weights")
                parts.append(rank.draft)
            for part in parts:
                if seconds_at(part.alone, 1) is None:
                    raise ValueError(f"rank {rank.rank} has no time of a single row")
        for link in self.links:
            if not (link.source < n_ranks and link.target < n_ranks):
                raise ValueError(f"the link from {link.source} to {link.target} has no such ranks")
        for sums in self.sums:
            if not max(sums.ranks) < n_ranks:
                raise ValueError(f"the sums over {sums.ranks[0]} and {sums.ranks[1]} have no such ranks")
            if any(len({point.rows for point in points}) not in (0, len(points)) for points in (sums.f32, sums.f16)):
                raise ValueError(f"the sums over {sums.ranks[0]} and {sums.ranks[1]} have a number of rows twice")

    def link(self, source: int, target: int) -> LinkProfile | None:
        """What was measured between two ranks."""
        return next((x for x in self.links if (x.source, x.target) == (source, target)), None)


def seconds_at(points: Sequence[Point], rows: int) -> float | None:
    """The time of a run of `rows` tokens in the shortest context; None where that was not measured."""
    return next((p.seconds for p in sorted(points, key=lambda p: p.n_past) if p.rows == rows), None)


def as_text(profile: Profile) -> str:
    """The profile as a JSON document."""
    document = {"format": _FORMAT, "version": _VERSION, **msgspec.to_builtins(profile)}
    return msgspec.json.format(msgspec.json.encode(document), indent=1).decode() + "\n"


def write(path: Path, profile: Profile) -> None:
    """Write it to a file. Raises UsageError when that cannot be."""
    try:
        path.write_text(as_text(profile))
    except OSError as e:
        raise UsageError(f"cannot write the profile {path}: {e.strerror}") from e


def read(path: Path) -> Profile:
    """The inverse of `write`. Raises UsageError, with the reason, for a file that is no sound profile."""
    try:
        content = msgspec.json.decode(path.read_bytes())
    except OSError as e:
        raise UsageError(f"cannot read the profile {path}: {e.strerror}") from e
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UsageError(f"{path} is no profile; write one with `ggpipe profile -m MODEL -o {path}`")
    if content.get("version") != _VERSION:
        raise UsageError(
            f"{path} is a profile of format {content.get('version')!r}, this ggpipe reads {_VERSION}: profile anew"
        )
    try:
        return decode(content, Profile)
    except ValueError as e:
        raise UsageError(f"{path} is a damaged profile ({e}); write it anew with `ggpipe profile`") from e
