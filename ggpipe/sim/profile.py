"""What was measured on the nodes of a cluster: how long stages take, how fast memory and links are; as a JSON file."""

from __future__ import annotations

import json
import math
import types
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, fields, is_dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_origin, get_type_hints

from ggpipe.errors import UsageError

if TYPE_CHECKING:
    from ggpipe.engine.model_file import ModelFile

_FORMAT, _VERSION = "ggpipe profile", 2
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Point:
    """A run of `rows` tokens behind `n_past` tokens took `seconds` in libllama's decode (a median)."""

    rows: int
    n_past: int
    seconds: float


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """What a model's header says, as far as times and memory follow from it."""

    name: str
    architecture: str
    fingerprint: str
    """As `ModelFile.fingerprint`."""
    n_layer: int
    n_embd: int
    """A row that crosses a border is so many float32 numbers, in nearly all architectures."""
    n_vocab: int
    n_expert: int
    """0: every weight of a layer is used by every row."""
    n_expert_used: int
    layer_bytes: tuple[int, ...]
    """Weights of each layer."""
    input_bytes: int
    """The input embedding: on the first rank, of which a run reads no more than its tokens' rows."""
    output_bytes: int
    """The output layer: on the last rank. When it is the input embedding as well, it counts in both."""

    @classmethod
    def of(cls, model_file: ModelFile) -> ModelFacts:
        """From a model's header."""
        layer_bytes, input_bytes, output_bytes = [0] * model_file.n_layer, 0, 0
        for name, tensor in model_file.tensors.items():
            place, _, rest = name.partition(".")
            number = rest.partition(".")[0]
            if place == "blk" and number.isdigit() and int(number) < len(layer_bytes):
                layer_bytes[int(number)] += tensor.size
            elif place.startswith("output"):
                output_bytes += tensor.size
            else:
                input_bytes += tensor.size
        if model_file.tied_output and "token_embd.weight" in model_file.tensors:
            output_bytes += model_file.tensors["token_embd.weight"].size

        def number_of(key: str) -> int:
            value = model_file.metadata.get(f"{model_file.architecture}.{key}", 0)
            return value if isinstance(value, int) else 0

        return cls(
            str(model_file.metadata.get("general.name", model_file.paths[0].stem)),
            model_file.architecture,
            model_file.fingerprint,
            model_file.n_layer,
            number_of("embedding_length"),
            model_file.array_lengths.get("tokenizer.ggml.tokens", 0) or number_of("vocab_size"),
            number_of("expert_count"),
            number_of("expert_used_count"),
            tuple(layer_bytes),
            input_bytes,
            output_bytes,
        )

    def weight_bytes(self, layers: tuple[int, int]) -> int:
        """What a run reads of a stage's weights, at most: its layers and, on the last stage, the output layer."""
        a, b = layers
        return sum(self.layer_bytes[a:b]) + (self.output_bytes if a < b == self.n_layer else 0)


@dataclass(frozen=True, slots=True)
class Kernels:
    """Settings that change how long a run takes, beside threads; as in `ContextConfig` and `ModelConfig`."""

    cache_type_k: str = "f16"
    cache_type_v: str = "f16"
    flash_attn: str = "on"
    exact: bool = False
    repack: bool = True


@dataclass(frozen=True, slots=True)
class Part:
    """Another range of layers, measured in the same way."""

    layers: tuple[int, int]
    weight_bytes: int
    alone: tuple[Point, ...]


@dataclass(frozen=True, slots=True)
class RankProfile:
    """One rank: its machine, and how long it takes for runs."""

    rank: int
    host: str
    cores: int
    """Physical ones of its machine that this rank may use; ranks of one machine count the same ones."""
    threads: int
    threads_batch: int
    memory_bytes: int
    """RAM that was free or could be freed before anything was loaded; ranks of one machine count the same."""
    memory_bytes_per_s: float
    """`threads` threads reading memory beyond the caches, one byte after the other, while only this rank works."""
    layers: tuple[int, int]
    """First and one past the last, measured as one stage."""
    weight_bytes: int
    """As `ModelFacts.weight_bytes` of these layers: with the output layer if the last layer is in, without the input
    embedding."""
    alone: tuple[Point, ...]
    """While no other rank of the same machine computes."""
    together: tuple[Point, ...]
    """While all ranks of the cluster compute. Means where runs are shorter than a few milliseconds."""
    half: Part | None
    """Fewer of the layers, alone; None where a single one was measured."""
    run_s: float
    """What a run takes beside the decode: from giving it to the stage's thread until its outcome is back."""
    change_s: float
    """What a decode of few rows takes longer when the run before had another number: its graph is built anew."""
    fixed_s: float
    """What a decode of one row takes however few the layers: where a straight line through the fastest ones of `half`
    and of all layers meets no weights. 0 where a single layer was measured."""
    draft: Part | None = None
    """All layers of `Profile.draft`, alone, with as many threads as the target. None where no draft was measured, or
    this rank's memory is too small for it."""


@dataclass(frozen=True, slots=True)
class LinkProfile:
    """Messages from one rank to another."""

    source: int
    target: int
    latency_s: float
    """Of a small message, from program to program: half a round trip between ranks that wait as they do for a hop."""
    bytes_per_s: float
    """What a large message takes beyond that."""


@dataclass(frozen=True, slots=True)
class Profile:
    """All ranks of a cluster, and the links between them, measured with one model, or with a pair."""

    model: ModelFacts
    kernels: Kernels
    ranks: tuple[RankProfile, ...]
    """In order, each of them."""
    links: tuple[LinkProfile, ...]
    """Not all pairs where there are many ranks."""
    draft: ModelFacts | None = None
    """The draft model that was measured beside it; its KV cache has the same types, it is never `exact`."""

    def __post_init__(self) -> None:
        """Raises ValueError for what does not fit together."""
        model, n_ranks = self.model, len(self.ranks)
        for name, facts in (("model", model), *([("draft", self.draft)] if self.draft else [])):
            if facts.n_layer < 1 or len(facts.layer_bytes) != facts.n_layer:
                raise ValueError(f"{name}.layer_bytes has not one entry for each of n_layer layers")
        if not self.ranks or [rank.rank for rank in self.ranks] != list(range(n_ranks)):
            raise ValueError("ranks are not numbered 0, 1, 2, …")
        for rank in self.ranks:
            parts = [Part(rank.layers, rank.weight_bytes, rank.alone), *([rank.half] if rank.half else [])]
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
                if any(p.rows < 1 or p.seconds <= 0 for p in (*part.alone, *rank.together)):
                    raise ValueError(f"rank {rank.rank} has a time of no rows, or a time of 0")
            if rank.cores < 1 or rank.threads < 1 or rank.threads_batch < 1:
                raise ValueError(f"rank {rank.rank} has no cores or no threads")
        for link in self.links:
            if not (link.source < n_ranks and link.target < n_ranks and link.bytes_per_s > 0):
                raise ValueError(f"the link from {link.source} to {link.target} leads nowhere, or carries nothing")

    def link(self, source: int, target: int) -> LinkProfile | None:
        """What was measured between two ranks."""
        return next((x for x in self.links if (x.source, x.target) == (source, target)), None)


def seconds_at(points: Sequence[Point], rows: int) -> float | None:
    """The time of so many rows in the shortest context; None where nobody measured it."""
    return next((p.seconds for p in sorted(points, key=lambda p: p.n_past) if p.rows == rows), None)


def as_text(profile: Profile) -> str:
    """The profile as a JSON document."""
    return json.dumps({"format": _FORMAT, "version": _VERSION, **asdict(profile)}, indent=1) + "\n"


def write(path: Path, profile: Profile) -> None:
    """Write it to a file. Raises UsageError when that cannot be."""
    try:
        path.write_text(as_text(profile))
    except OSError as e:
        raise UsageError(f"cannot write the profile {path}: {e.strerror}") from e


def read(path: Path) -> Profile:
    """The inverse of `write`. Raises UsageError, with the reason, for what is no sound profile."""
    try:
        content = json.loads(path.read_bytes())
    except OSError as e:
        raise UsageError(f"cannot read the profile {path}: {e.strerror}") from e
    except ValueError:
        content = None
    if not isinstance(content, dict) or content.get("format") != _FORMAT:
        raise UsageError(f"{path} is no profile; write one with `ggpipe profile -m MODEL -o {path}`")
    if content.get("version") != _VERSION:
        raise UsageError(
            f"{path} is a profile of format {content.get('version')!r}, this ggpipe reads {_VERSION}: profile anew"
        )
    try:
        return _build(Profile, content, "")
    except ValueError as e:
        raise UsageError(f"{path} is a damaged profile ({e}); write it anew with `ggpipe profile`") from e


def _build(kind: type[T], value: Any, where: str) -> T:
    """A dataclass of what `asdict` and JSON made of it. Unknown keys are ignored."""
    if not isinstance(value, dict):
        raise ValueError(f"{where or 'it'} is no object")
    made = {}
    hints = get_type_hints(kind)
    for field in fields(kind):  # type: ignore[arg-type]
        inner = f"{where}.{field.name}" if where else field.name
        if field.name not in value:
            raise ValueError(f"{inner} is missing")
        made[field.name] = _convert(hints[field.name], value[field.name], inner)
    return kind(**made)


def _convert(kind: Any, value: Any, where: str) -> Any:
    if is_dataclass(kind):
        return _build(kind, value, where)  # type: ignore[arg-type]
    if get_origin(kind) is types.UnionType:  # X | None
        return None if value is None else _convert(get_args(kind)[0], value, where)
    if get_origin(kind) is tuple:
        return tuple(_items(get_args(kind), value, where))
    if kind is float and type(value) is int:
        value = float(value)
    if type(value) is not kind:
        raise ValueError(f"{where} is not of type {kind.__name__}")
    if kind in (int, float) and not (math.isfinite(value) and value >= 0):
        raise ValueError(f"{where} is below 0, or no number")
    return value


def _items(kinds: tuple[Any, ...], value: Any, where: str) -> Iterator[Any]:
    many = kinds[-1] is Ellipsis
    if not isinstance(value, list) or not (many or len(value) == len(kinds)):
        raise ValueError(f"{where} is no list{'' if many else f' of {len(kinds)}'}")
    for i, item in enumerate(value):
        yield _convert(kinds[0] if many else kinds[i], item, f"{where}.{i}")
