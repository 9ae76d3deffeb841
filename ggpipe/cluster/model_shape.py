"""The shape of a model: what it takes to hold and to run, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ggpipe.config.layer_split import MAX_PARTS

FLOAT_BYTES = 4
ALL_EXPERTS = 1_000_000
"""Rows that use every expert."""
_ROW_BYTES = 58  # for each number of an embedding, where nothing else is known: with 3.5 times as many in feed-forward


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model without its weights. All of it can be read from a GGUF's header."""

    name: str
    layer_bytes: tuple[int, ...]
    """Bytes of each layer's weights."""
    input_bytes: int
    """Bytes of the input embedding: the first stage holds it, and reads a row of it for each token."""
    output_bytes: int
    """Bytes of the output layer, which the last stage holds. Where it is the input embedding, it counts in both."""
    parameters_per_byte: float
    """Weights in a byte: about 1.8 in 4-bit quantizations."""
    n_embd: int
    """Numbers in an embedding."""
    layer_cell_bytes: tuple[float, ...]
    """Bytes of a token's KV cache in each layer."""
    layer_state_bytes: tuple[int, ...] = ()
    """Bytes of the recurrent states in each layer, of all sequences that have one. Empty: no layer is recurrent."""
    n_vocab: int = 32000
    layer_expert_bytes: tuple[int, ...] = ()
    """Bytes of each layer's experts, of which a token uses only some. Empty: no layer has experts."""
    n_expert: int = 0
    """Experts in a layer; 0: a row uses every weight."""
    n_expert_used: int = 0
    """Experts that a token uses."""
    n_ctx: int = 0
    """Tokens of the context that it was trained with; 0: not known."""
    row_bytes: float = 0.0
    """Compute buffer for each row of the longest run, on a rank with layers."""
    row_cell_bytes: float = 2.0
    """Compute buffer for each row of the longest run and each token of the context."""
    layer_whole_bytes: tuple[int, ...] = ()
    """Bytes of each layer's weights that all parts of a group hold, such as norms. Empty: a group divides all."""
    output_whole_bytes: int = 0
    """The same of the output layer."""
    divides_attention: bool = True
    """The parts of a group divide the attention heads and their KV cells; else each computes, and holds, all."""
    max_parts: int = MAX_PARTS
    """Parts of a group that all have attention heads to compute; 1: the model cannot be divided so."""

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return len(self.layer_bytes)

    @property
    def border_bytes(self) -> int:
        """Bytes of a row that crosses a border between stages: float32, in nearly all architectures."""
        return FLOAT_BYTES * self.n_embd

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.input_bytes + sum(self.layer_bytes) + self.output_bytes

    @property
    def sparsity(self) -> float:
        """Weights that a long run reads, as a multiple of those that a row uses: 1 without experts."""
        layers = (0, self.n_layer)
        return self.read_bytes(layers, ALL_EXPERTS) / max(self.read_bytes(layers), 1)

    @property
    def sums_per_layer(self) -> int:
        """How often the parts of a group add up what they have: behind attention, where they divide it, and behind
        feed-forward."""
        return 2 if self.divides_attention else 1

    def part(self, share: float) -> ModelShape:
        """The shape of what one part of a group holds, with `share` of all that the parts divide.

        What a part needs to compute in is not divided, nor are recurrent states.
        """
        if share == 1:
            return self
        whole_bytes = self.layer_whole_bytes or (0,) * self.n_layer
        both = zip(self.layer_bytes, whole_bytes, strict=True)
        return replace(
            self,
            layer_bytes=tuple(round(whole + share * (n - whole)) for n, whole in both),
            output_bytes=round(self.output_whole_bytes + share * (self.output_bytes - self.output_whole_bytes)),
            layer_cell_bytes=tuple(share * n for n in self.layer_cell_bytes)
            if self.divides_attention
            else self.layer_cell_bytes,
            layer_expert_bytes=tuple(round(share * n) for n in self.layer_expert_bytes),
        )

    def cell_bytes(self, layers: tuple[int, int]) -> float:
        """Bytes of a token's KV cache in layers [a, b)."""
        return sum(self.layer_cell_bytes[slice(*layers)])

    def state_bytes(self, layers: tuple[int, int]) -> int:
        """Bytes of all recurrent states in layers [a, b)."""
        return sum(self.layer_state_bytes[slice(*layers)])

    def expert_bytes(self, layers: tuple[int, int]) -> int:
        """Bytes of the experts in layers [a, b)."""
        return sum(self.layer_expert_bytes[slice(*layers)])

    def read_bytes(self, layers: tuple[int, int], n_rows: int = 1) -> float:
        """Bytes that a run of `n_rows` tokens reads in layers [a, b), and in the output layer behind the last."""
        a, b = layers
        dense = sum(self.layer_bytes[a:b]) + (self.output_bytes if b == self.n_layer else 0)
        if self.n_expert_used == 0:
            return dense
        untouched = (1 - self.n_expert_used / self.n_expert) ** n_rows
        return dense - self.expert_bytes(layers) * untouched

    def token_flop(self, layers: tuple[int, int]) -> float:
        """Additions and multiplications for a token in these layers."""
        return 2 * self.parameters_per_byte * self.read_bytes(layers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Experts:
    """The routed experts of a mixture of experts. Shared experts are not among them: every token uses those."""

    n_expert: int
    """Experts in a layer."""
    n_used: int
    """Experts that a token uses in each layer."""
    n_bytes: float
    """Bytes of all experts in all layers."""
    n_dense_layers: int = 0
    """Layers without experts: the first ones of the model."""

    def layer_bytes(self, n_layer: int) -> tuple[int, ...]:
        """Bytes of the experts in each of `n_layer` layers."""
        n_sparse = n_layer - self.n_dense_layers
        return (0,) * self.n_dense_layers + (int(self.n_bytes / n_sparse),) * n_sparse


def even_shape(
    *,
    name: str,
    n_layer: int,
    weight_bytes: float,
    parameters: float,
    n_embd: int,
    cell_bytes: float,
    n_vocab: int,
    tied: bool = False,
    experts: Experts | None = None,
) -> ModelShape:
    """A model whose layers are all alike, apart from their experts, and whose weights all have one type.

    `weight_bytes`, `parameters`: of the whole file. `cell_bytes`: KV cache of a token in all layers. `tied`: the output
    layer is the input embedding, and in the file once. Raises ValueError when the experts do not fit into the rest.
    """
    edge = weight_bytes * min(n_vocab * n_embd / parameters, 0.9 if tied else 0.45)  # embedding, or output layer
    in_layers = weight_bytes - (edge if tied else 2 * edge)
    layer_expert_bytes = experts.layer_bytes(n_layer) if experts else (0,) * n_layer
    dense = (in_layers - sum(layer_expert_bytes)) / n_layer
    if dense <= 0:
        raise ValueError(
            f"experts of {sum(layer_expert_bytes) / 1e9:.4g} GB do not fit into layers of {in_layers / 1e9:.4g} GB"
        )
    return ModelShape(
        name=name,
        layer_bytes=tuple(int(dense + expert_bytes) for expert_bytes in layer_expert_bytes),
        input_bytes=int(edge),
        output_bytes=int(edge),
        parameters_per_byte=parameters / weight_bytes,
        n_embd=n_embd,
        layer_cell_bytes=(cell_bytes / n_layer,) * n_layer,
        n_vocab=n_vocab,
        layer_expert_bytes=layer_expert_bytes if experts else (),
        n_expert=experts.n_expert if experts else 0,
        n_expert_used=experts.n_used if experts else 0,
        row_bytes=_ROW_BYTES * n_embd,
    )
