"""Memory that a rank needs, from a model's header alone.

What libllama allocates counts, whether it gets touched or not: on the last rank that is a row of logits for each row
of the longest run, and on the first the whole input embedding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ggpipe.cluster.model_shape import FLOAT_BYTES, ModelShape
from ggpipe.core.layout import Layout, part_shares

USABLE = 0.95
"""Share of a machine's memory that ranks may use."""
PROCESS_BYTES = 55_000_000
"""Python, libllama and MPI."""
_TOKEN_BYTES = 512  # of a vocabulary, with its merges
_CELLS = 256  # contexts are a multiple of these
_COPIES = 4  # of what crosses a border: as it came, as it is copied, as it goes out, and in MPI
_SMALL = 0.1  # what ggml's matrix products make of their rows, as a share of the room that libllama computes in


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes, by what they are for."""

    weights: float = 0.0
    kv: float = 0.0
    """KV cells and recurrent states."""
    compute: float = 0.0
    """Room that libllama computes in."""
    process: float = 0.0
    """The program itself, vocabularies, messages."""

    @property
    def total(self) -> float:
        """All of it."""
        return self.weights + self.kv + self.compute + self.process

    def __add__(self, other: Memory) -> Memory:
        return Memory(
            self.weights + other.weights,
            self.kv + other.kv,
            self.compute + other.compute,
            self.process + other.process,
        )


def stage_memory(shape: ModelShape, layers: tuple[int, int], n_ctx: int, n_ubatch: int) -> Memory:
    """A stage with layers [a, b), in a process that is there. `n_ctx`: tokens, 0 as many as in training.

    Of a part of a group, `shape` is that of the part.
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
    """A rank without its stages. `is_head`: it has a vocabulary of its own, to read and to write text."""
    return Memory(process=PROCESS_BYTES + is_head * _TOKEN_BYTES * shape.n_vocab)


def memory_by_rank(
    target: ModelShape,
    layout: Layout,
    drafts: Sequence[tuple[ModelShape, Layout | None]],
    n_ctx: int,
    n_ubatch: int,
    tensor_split: tuple[float, ...] = (),
) -> dict[int, Memory]:
    """What each rank needs. `drafts`: draft models; one without a layout is inside the head.

    `tensor_split`: as of `PipelineConfig`.
    """

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
