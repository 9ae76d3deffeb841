"""Estimates the memory that a rank needs from a model's header.

All memory that libllama allocates counts, even if it is never used: on the last rank a row of logits for each row of
the longest run, and on the first rank the whole input embedding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from ggpipe.cluster.model_shape import FLOAT_BYTES, ModelShape
from ggpipe.core.layout import Layout, part_shares
from ggpipe.core.overtaking import MOST_ROWS, pays

USABLE = 0.95
"""Share of a machine's memory that ranks may use."""
PROCESS_BYTES = 55_000_000
"""Memory of Python, libllama and MPI."""
_TOKEN_BYTES = 512  # per token of a vocabulary, with its merges
_CELLS = 256  # the size of a context is a multiple of this
_COPIES = 4  # of a row between stages: as received, as copied, as sent, and in MPI
_EXPERT_TENSORS = 3  # of a layer
_WITHIN_ROWS = 1 / 3  # of a group's weights, as slices within the rows of matrices: attention's output, and ffn_down
_SMALL = 0.1  # rows converted for ggml's matrix products, as a share of libllama's compute buffer


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of memory by purpose."""

    weights: float = 0.0
    kv: float = 0.0
    """KV cells and recurrent states."""
    compute: float = 0.0
    """libllama's compute buffers."""
    process: float = 0.0
    """The program itself, vocabularies, and messages."""
    streamed: float = 0.0
    """Bytes of further weights that are not in memory: they are read from the file as they are used."""

    @property
    def total(self) -> float:
        """Bytes for all purposes."""
        return float(self.weights + self.kv + self.compute + self.process)

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.weights + other.weights,
            self.kv + other.kv,
            self.compute + other.compute,
            self.process + other.process,
            self.streamed + other.streamed,
        )


@dataclass(frozen=True, slots=True)
class Streamed:
    """What a stage reads from its file in a run, since it has no memory for all of its weights."""

    run_bytes: float
    """Bytes of weights that each run uses."""
    expert_share: float
    """Share of the experts that are not in memory. All are equally likely to be used."""


def weight_bytes(shape: ModelShape, layers: tuple[int, int]) -> int:
    """Bytes of the weights that a stage with layers [a, b) holds."""
    a, b = layers
    edges = (shape.input_bytes if a == 0 else 0) + (shape.output_bytes if b == shape.n_layer else 0)
    return sum(shape.layer_bytes[a:b]) + edges


def stage_memory(shape: ModelShape, layers: tuple[int, int], n_ctx: int, n_ubatch: int, pauses: bool = False) -> Memory:
    """Memory of a stage with layers [a, b), without that of the process. `n_ctx`: tokens; 0: the training length.
    `pauses`: its long runs pause for others, which have buffers of their own.

    For a part of a group, `shape` is the shape of the part.
    """
    a, b = layers
    if a == b:
        return Memory()
    n_ctx = n_ctx or shape.n_ctx
    n_cells = -(-(min(n_ctx, shape.most_ctx) if shape.most_ctx else n_ctx) // _CELLS) * _CELLS
    n_rows = min(n_ubatch, n_cells)
    row_bytes = shape.row_bytes
    if b == shape.n_layer:
        row_bytes = max(row_bytes, FLOAT_BYTES * (shape.n_vocab + 2 * shape.n_embd))
    compute_bytes = row_bytes + shape.row_cell_bytes * n_cells + shape.border_bytes
    other_bytes = _COPIES * shape.border_bytes + _SMALL * shape.row_bytes
    return Memory(
        weight_bytes(shape, layers),
        shape.cell_bytes(layers) * n_cells + shape.state_bytes(layers),
        (n_rows + pauses * min(MOST_ROWS, n_rows)) * compute_bytes,
        n_rows * other_bytes + _TOKEN_BYTES * shape.n_vocab,
    )


def process_memory(shape: ModelShape, is_head: bool) -> Memory:
    """Memory of a rank without its stages. `is_head`: it also has a vocabulary, to tokenize and to decode."""
    return Memory(process=PROCESS_BYTES + is_head * _TOKEN_BYTES * shape.n_vocab)


def memory_by_rank(
    target: ModelShape,
    layout: Layout,
    drafts: Sequence[tuple[ModelShape, Layout | None]],
    n_ctx: int,
    n_ubatch: int,
    tensor_split: tuple[float, ...] = (),
) -> dict[int, Memory]:
    """Memory of each rank. `drafts`: draft models; the head runs one without a layout. `tensor_split`: see
    `PipelineConfig.tensor_split`."""

    def rank_memory(shape: ModelShape, layout: Layout, rank: int) -> Memory:
        stage = layout.stage_of(rank)
        share = part_shares(len(stage.ranks), tensor_split)[layout.part_of(rank)]
        pauses = shape is target and pays(len(layout.stages) == 1, target.sparsity)
        own = stage_memory(shape.part(share), stage.layers, n_ctx, n_ubatch, pauses)
        return own + process_memory(shape, rank == layout.head)

    needs = {rank: rank_memory(target, layout, rank) for rank in layout.ranks}
    for draft, own in drafts:
        if own is None:
            needs[layout.head] += stage_memory(draft, (0, draft.n_layer), n_ctx, n_ubatch)
        else:
            needs |= {rank: rank_memory(draft, own, rank) for rank in own.ranks}
    return needs


def streamed(shape: ModelShape, layers: tuple[int, int], kept_bytes: float) -> Streamed | None:
    """What a stage streams if it keeps this much of its weights in memory; None if it cannot.

    As `native/streamed.cpp` chooses: weights that each run uses come first. If they fit, experts have the rest of the
    memory. Otherwise a window takes the place of a layer of them, and experts have the least that they need. In a
    group, slices within the rows of matrices always stay: about one matrix of three.
    """
    a, b = layers
    experts = shape.layer_expert_bytes[a:b] or (0,) * (b - a)
    dense = [n - own for n, own in zip(shape.layer_bytes[a:b], experts, strict=True)]
    edges = weight_bytes(shape, layers) - sum(shape.layer_bytes[a:b])
    least_cache, window = max(experts) / _EXPERT_TENSORS, max(dense)
    room = kept_bytes - edges - least_cache
    stays = sum(shape.layer_bytes[a:b]) * _WITHIN_ROWS if shape.is_part else 0.0
    if room < max(min(window, sum(dense)), stays):
        return None
    if room >= sum(dense):
        cached = kept_bytes - edges - sum(dense)
        return Streamed(0.0, 1 - min(cached / sum(experts), 1.0) if any(experts) else 0.0)
    return Streamed(sum(dense) - room + window, 1 - least_cache / sum(experts) if any(experts) else 0.0)


def with_streaming(
    target: ModelShape,
    layout: Layout,
    needs: Mapping[int, Memory],
    node_of: Sequence[int],
    usable_bytes: Mapping[int, float],
    tensor_split: tuple[float, ...] = (),
) -> dict[int, Memory]:
    """The memory of each rank, where ranks of the target stream the weights that do not fit.

    `needs`: as of `memory_by_rank`. `usable_bytes`: memory of each node whose ranks may stream. A node's ranks share
    what nothing else needs in proportion to their weights. Those for which that is too little stay as they are.
    """
    found = dict(needs)
    for node, usable in usable_bytes.items():
        here = [rank for rank in needs if node_of[rank] == node]
        short = sum(needs[rank].total for rank in here) - usable
        weights: dict[int, float] = {}
        parts: dict[int, tuple[ModelShape, tuple[int, int]]] = {}
        for rank in here:
            if rank in layout.ranks:
                stage = layout.stage_of(rank)
                part = target.part(part_shares(len(stage.ranks), tensor_split)[layout.part_of(rank)])
                parts[rank] = part, stage.layers
                weights[rank] = weight_bytes(part, stage.layers)
        for rank, own in weights.items():
            missing = short * own / sum(weights.values())
            if missing > 0 and streamed(*parts[rank], own - missing) is not None:
                found[rank] = replace(found[rank], weights=found[rank].weights - missing, streamed=missing)
    return found
