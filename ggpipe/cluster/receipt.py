"""Receipts: what `ggpipe bench` measured, where and with what, as JSON files that others can read, repeat and simulate.

A receipt names no machine: hosts are called node1, node2 and so on.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta, Struct

from ggpipe.cluster.document import DocumentKind
from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.profile import Profile
from ggpipe.config.context import FlashAttention, KvType
from ggpipe.config.model import TARGET
from ggpipe.config.pipeline import TensorWire
from ggpipe.config.speculation import SpeculationConfig
from ggpipe.core.layout import Layout

_KIND = DocumentKind(
    name="receipt",
    version=1,
    command="ggpipe bench --receipt FILE",
    renewal="measure again, or use the ggpipe that wrote it",
)
_WIDTH = 120

Count = Annotated[int, Meta(ge=0)]
Positive = Annotated[int, Meta(ge=1)]
Share = Annotated[float, Meta(ge=0, le=1)]
Seconds = Annotated[float, Meta(ge=0)]
Rate = Annotated[float, Meta(gt=0)]
Day = Annotated[str, Meta(pattern=r"^\d{4}-\d{2}-\d{2}$")]
ReceiptMode = Literal["iterative", "speculative", "async", "single"]


class ReceiptVersions(Struct, frozen=True, kw_only=True):
    """What was installed on the machine that started the bench."""

    ggpipe: str
    """With the commit, if it is a checkout."""
    llama_cpp_python: str
    """It contains llama.cpp."""
    mpi: str
    mpirun: str
    python: str
    system: str


class ReceiptNode(Struct, frozen=True, kw_only=True):
    """A machine."""

    name: str
    cpu: str
    """What the processor calls itself; empty if the machine could not be asked."""
    cores: Count
    """Physical cores."""
    numa_nodes: Count
    cpu_features: tuple[str, ...]
    """Instruction sets that ggml uses there."""


class ReceiptModel(Struct, frozen=True, kw_only=True):
    """The target, or a draft model."""

    file: str
    """Name of the file, without its folder."""
    size_bytes: Count
    fingerprint: str
    """Hash of the headers and the sizes of all files of the model."""
    sha256: tuple[str, ...]
    """Hash of each file; empty if the model is not on the machine that started the bench."""
    shape: ModelShape


class ReceiptRank(Struct, frozen=True, kw_only=True):
    """A rank's part of one model. A rank that also runs a draft model has several."""

    rank: Count
    node: str
    model: Count
    """0: the target; 1: the first draft model, and so on."""
    layers: tuple[Count, Count]
    """First layer, and one past the last; equal for a rank that only coordinates."""
    threads: tuple[Positive, Positive]
    """For runs of one token, and for longer ones."""


class ReceiptSettings(Struct, frozen=True, kw_only=True):
    """Settings on which speeds depend; their names are those of the config records."""

    layer_split: str
    """As on the command line."""
    n_predict: Positive
    temp: float
    seed: int
    n_ctx: Positive
    n_batch: Positive
    n_ubatch: Positive
    cache_type_k: KvType
    cache_type_v: KvType
    flash_attn: FlashAttention
    fast_kernels: bool
    exact: bool
    tensor_split: tuple[Rate, ...]
    tensor_wire: TensorWire
    single_threads: Positive | None
    """Threads of mode `single`; None: it was not measured."""
    speculation: SpeculationConfig
    """The settings of both speculative modes; its `mode` is not used."""


class ReceiptDrafter(Struct, frozen=True, kw_only=True):
    """What a drafter did in a run of the bench."""

    name: str
    model: Count
    """Id of its model, as in `ReceiptRank`; 0: it has none."""
    judged: Count
    """Positions at which it had named a token when the target's was known."""
    right: Count
    """How often its best token was the target's there."""
    in_output: Count
    """Tokens of the output that it had named before they were sampled."""


class ReceiptRun(Struct, frozen=True, kw_only=True):
    """One request of the bench."""

    mode: ReceiptMode
    round: Positive
    prompt: str
    n_prompt_tokens: Positive
    n_generated_tokens: Positive
    ttft_s: Seconds
    tokens_per_s: Rate
    """Decode speed: tokens per second after the first."""
    output: str
    """Hash of the tokens that were generated: equal outputs have equal hashes."""
    submitted_tokens: Count
    accepted_tokens: Count
    drafters: tuple[ReceiptDrafter, ...]


class Receipt(Struct, frozen=True, kw_only=True):
    """A bench of one layout. Raises ValueError if its parts contradict each other."""

    day: Day
    """When it was measured (UTC)."""
    note: str
    """For what people should know, to be written by hand."""
    command: str
    versions: ReceiptVersions
    nodes: tuple[ReceiptNode, ...]
    models: Annotated[tuple[ReceiptModel, ...], Meta(min_length=1)]
    """The target, then the draft models."""
    settings: ReceiptSettings
    ranks: Annotated[tuple[ReceiptRank, ...], Meta(min_length=1)]
    runs: Annotated[tuple[ReceiptRun, ...], Meta(min_length=1)]
    profile: Profile
    """Times of these ranks and links, measured right before the bench."""

    def __post_init__(self) -> None:
        names = {node.name for node in self.nodes}
        if unknown := {rank.node for rank in self.ranks} - names:
            raise ValueError(f"ranks are on {min(unknown)}, which is not one of the nodes")
        numbers = sorted({rank.rank for rank in self.ranks})
        if numbers != list(range(len(self.profile.ranks))):
            raise ValueError(f"the profile has {len(self.profile.ranks)} ranks, and the bench had {len(numbers)}")
        for model, own in enumerate(self.models):
            n_layer, end = own.shape.n_layer, 0
            for a, b in dict.fromkeys(rank.layers for rank in self.ranks_of(model) if rank.layers[0] < rank.layers[1]):
                if a != end:
                    raise ValueError(f"the ranks of {own.file} do not hold its layers in order")
                end = b
            if end != n_layer:
                raise ValueError(f"the ranks of {own.file} hold {end} of its {n_layer} layers")
        if any(rank.model >= len(self.models) for rank in self.ranks):
            raise ValueError("a rank has a model that is not one of the models")
        if any(run.mode == "single" for run in self.runs) and self.settings.single_threads is None:
            raise ValueError("settings.single_threads is missing, and mode single was measured")

    @property
    def modes(self) -> tuple[ReceiptMode, ...]:
        """The measured modes, in the order in which they were measured first."""
        return tuple(dict.fromkeys(run.mode for run in self.runs))

    @property
    def prompts(self) -> tuple[str, ...]:
        """Names of the prompts."""
        return tuple(dict.fromkeys(run.prompt for run in self.runs))

    def ranks_of(self, model: int) -> list[ReceiptRank]:
        """The ranks of a model, in order."""
        return sorted((rank for rank in self.ranks if rank.model == model), key=lambda rank: rank.rank)

    def layout_of(self, model: int) -> Layout | None:
        """The stages of a model; None for a draft model inside the head's process."""
        own = self.ranks_of(model)
        if model != TARGET and own[0].rank == 0:
            return None
        counts: dict[tuple[int, int], int] = {}
        for rank in own:
            counts[rank.layers] = counts.get(rank.layers, 0) + 1
        return Layout.of_ranks(list(counts), own[0].rank, tuple(counts.values()))


def as_text(receipt: Receipt) -> str:
    """The receipt as a JSON document, in which whatever fits is on one line, with six digits of each measurement."""
    content = {**_KIND.tag, **msgspec.to_builtins(receipt)}
    return _laid_out(_rounded(content), "") + "\n"


def _rounded(value: Any) -> Any:
    """With six digits of each number that is not whole."""
    if isinstance(value, dict):
        return {name: _rounded(own) for name, own in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(own) for own in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _laid_out(value: Any, indent: str, n_before: int = 0) -> str:
    """`n_before`: characters before it on its line, apart from the indentation."""
    line = json.dumps(value, ensure_ascii=False)
    if len(indent) + n_before + len(line) < _WIDTH or not isinstance(value, dict | list):
        return line
    inner = indent + "  "
    if isinstance(value, dict):
        parts = [f'"{name}": {_laid_out(own, inner, len(name) + 4)}' for name, own in value.items()]
        return "{\n" + ",\n".join(inner + part for part in parts) + f"\n{indent}}}"
    if all(isinstance(own, int | float) for own in value):
        return "[\n" + ",\n".join(inner + line for line in _wrapped(value, _WIDTH - len(inner) - 1)) + f"\n{indent}]"
    return "[\n" + ",\n".join(inner + _laid_out(own, inner) for own in value) + f"\n{indent}]"


def _wrapped(numbers: Sequence[float], width: int) -> list[str]:
    lines = [""]
    for number in map(json.dumps, numbers):
        if lines[-1] and len(lines[-1]) + len(number) + 3 > width:
            lines.append("")
        lines[-1] += f", {number}" if lines[-1] else number
    return lines


def read(path: Path) -> Receipt:
    """Read a receipt from a file. Raises UsageError, with the reason, for a file that is not a valid receipt."""
    return _KIND.read(path, Receipt)
