"""Estimates the memory that a rank needs from a model's header.

All memory that libllama allocates counts, even if it is never used: on the last rank a row of logits for each row of
the longest run, and on the first rank the whole input embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ggpipe.cluster.model_shape import FLOAT_BYTES, ModelShape
from ggpipe.core.layout import Layout, part_shares

USABLE = 0.95
"""Share of a machine's memory that ranks may use."""
PROCESS_BYTES = 55_000_000
"""Memory of Python, libllama and MPI."""
_TOKEN_BYTES = 512  # per token of a vocabulary, with its merges
_CELLS = 256  # the size of a context is a multiple of this
_COPIES = 4  # of a row between stages: as received, as copied, as sent, and in MPI
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
        )


def stage_memory(shape: ModelShape, layers: tuple[int, int], n_ctx: int, n_ubatch: int) -> Memory:
    """Memory of a stage with layers [a, b), without that of the process. `n_ctx`: tokens; 0: the training length.

    For a part of a group, `shape` is the shape of the part.
    """
    a, b = layers
    if a == b:
        return Memory()
    n_cells = -(-(n_ctx or shape.n_ctx) // _CELLS) * _CELLS
    n_rows = min(n_ubatch, n_cells)
    weights = sum(shape.layer_bytes[a:b]) + (shape.input_bytes if a == 0 else 0)
    row_bytes = shape.row_bytes
    if b == shape.n_layer:
        weights += shape.output_bytes
        row_bytes = max(row_bytes, FLOAT_BYTES * (shape.n_vocab + 2 * shape.n_embd))
    compute_bytes = row_bytes + shape.row_cell_bytes * n_cells + shape.border_bytes
    other_bytes = _COPIES * shape.border_bytes + _SMALL * shape.row_bytes
    return Memory(
        weights,
        shape.cell_bytes(layers) * n_cells + shape.state_bytes(layers),
        n_rows * compute_bytes,
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
        own = stage_memory(shape.part(share), stage.layers, n_ctx, n_ubatch)
        return own + process_memory(shape, rank == layout.head)

    needs = {rank: rank_memory(target, layout, rank) for rank in layout.ranks}
    for draft, own in drafts:
        if own is None:
            needs[layout.head] += stage_memory(draft, (0, draft.n_layer), n_ctx, n_ubatch)
        else:
            needs |= {rank: rank_memory(draft, own, rank) for rank in own.ranks}
    return needs
