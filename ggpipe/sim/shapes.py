"""What a model costs to hold and to run, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass

_ROW_BYTES = 58  # for each number of the width, where nothing else is known: with 3.5 times as many in feed-forward


@dataclass(frozen=True, slots=True)
class ModelShape:
    """A model without its weights. All of it can be read from a GGUF's header."""

    name: str
    layer_bytes: tuple[int, ...]
    """Weights of each layer."""
    embedding_bytes: int
    """The input embedding: the first stage holds it, and reads a row of it for each token."""
    head_bytes: int
    """The output layer: the last stage's. A tied one counts here as well."""
    parameters_per_byte: float
    """Weights in a byte: about 1.8 in 4-bit quantizations."""
    width: int
    """Of the embedding, in numbers."""
    layer_cell_bytes: tuple[float, ...]
    """KV cache of a token in each layer."""
    n_vocab: int = 32000
    layer_expert_bytes: tuple[int, ...] = ()
    """Of each layer's weights, those of experts, of which a token uses only some. None: no layer has experts."""
    n_experts: int = 0
    n_experts_used: int = 0
    n_ctx: int = 0
    """Tokens of the context that it was trained with; 0: not known."""
    row_bytes: float = 0.0
    """Room to compute in, for each row of the longest run, on a rank with layers;"""
    row_cell_bytes: float = 2.0
    """and for each such row and each token of the context."""

    @property
    def n_layer(self) -> int:
        """Layers."""
        return len(self.layer_bytes)

    @property
    def weight_bytes(self) -> int:
        """All of it."""
        return self.embedding_bytes + sum(self.layer_bytes) + self.head_bytes

    def cell_bytes(self, layers: tuple[int, int]) -> float:
        """KV cache of a token in layers [a, b)."""
        return sum(self.layer_cell_bytes[slice(*layers)])

    def expert_bytes(self, layers: tuple[int, int]) -> int:
        """Experts in layers [a, b)."""
        return sum(self.layer_expert_bytes[slice(*layers)])

    def read_bytes(self, layers: tuple[int, int], n_rows: int = 1) -> float:
        """What a run of `n_rows` tokens reads of layers [a, b), and of the output layer behind the last."""
        a, b = layers
        dense = sum(self.layer_bytes[a:b]) + (self.head_bytes if b == self.n_layer else 0)
        if self.n_experts_used == 0:
            return dense
        untouched = (1 - self.n_experts_used / self.n_experts) ** n_rows
        return dense - self.expert_bytes(layers) * untouched

    def token_flop(self, layers: tuple[int, int]) -> float:
        """Additions and multiplications for a token in these layers."""
        return 2 * self.parameters_per_byte * self.read_bytes(layers)


def even_shape(
    name: str,
    n_layer: int,
    weight_bytes: float,
    parameters: float,
    width: int,
    cell_bytes: float,
    n_vocab: int,
    tied: bool = False,
) -> ModelShape:
    """A model whose layers are all alike, and all weights of one type.

    `weight_bytes`, `parameters`: of the whole file. `cell_bytes`: KV cache of a token in all layers. `tied`: the output
    layer is the input embedding, and in the file once.
    """
    edge = weight_bytes * min(n_vocab * width / parameters, 0.9 if tied else 0.45)  # embedding, or output layer
    layer = (weight_bytes - (edge if tied else 2 * edge)) / n_layer
    per_byte = parameters / weight_bytes
    return ModelShape(
        name, (int(layer),) * n_layer, int(edge), int(edge), per_byte, width, (cell_bytes / n_layer,) * n_layer,
        n_vocab, row_bytes=_ROW_BYTES * width,
    )  # fmt: skip
