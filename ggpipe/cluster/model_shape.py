"""The shape of a model: its memory and its work, layer by layer."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from ggpipe.config.checks import MAX_TOKENS
from ggpipe.config.draft import draft_cells
from ggpipe.config.layer_split import MAX_PARTS
from ggpipe.core.row_work import Attention, RowWork, together

FLOAT_BYTES = 4
ALL_EXPERTS = 1_000_000
"""A number of rows that use every expert."""
ATTENTION_SPEED = 0.35
"""Operations of attention per second, relative to those of products of quantized weights. With AVX-512 and VNNI, runs
of 64 to 512 rows reached 0.32 with heads of 64 numbers and 0.4 with latent attention (one thread, 8,192 cells)."""
_HEAD_VOCAB = 32000
_BLOCK_HEAD_LAYERS, _BLOCK_SIZE = 5, 16
_ROW_BYTES = 58  # default compute buffer per row and value of an embedding; assumes a feed-forward width of 3.5 times


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelShape:
    """A model without its weights. Everything can be read from the header of a GGUF file."""

    name: str
    layer_bytes: tuple[int, ...]
    """Bytes of each layer's weights."""
    input_bytes: int
    """Bytes of the input embedding, which the first stage holds. It reads one row per token."""
    output_bytes: int
    """Bytes of the output layer, which the last stage holds. If it is the input embedding, it counts in both."""
    parameters_per_byte: float
    """Weights per byte: about 1.8 in 4-bit quantizations."""
    n_embd: int
    """Size of an embedding."""
    layer_cell_bytes: tuple[float, ...]
    """Bytes of a token's KV cache in each layer."""
    layer_attention: tuple[Attention, ...] = ()
    """Floating-point operations of each layer's attention. Empty: unknown, and taken to be none."""
    layer_state_bytes: tuple[int, ...] = ()
    """Bytes of the recurrent states in each layer, for all sequences with a state. Empty: no layer is recurrent."""
    n_states: int = 1
    """Number of sequences with a state."""
    n_vocab: int = 32000
    layer_expert_bytes: tuple[int, ...] = ()
    """Bytes of each layer's experts, of which a token uses only some. Empty: no layer has experts."""
    n_expert: int = 0
    """Number of experts per layer; 0: every row uses all weights."""
    n_expert_used: int = 0
    """Number of experts that a token uses."""
    n_ctx: int = 0
    """Context length in tokens that the model was trained with; 0: unknown."""
    most_ctx: int = 0
    """Size of its context at most, of a draft model that does not see all of its target's; 0: as long as that."""
    row_bytes: float = 0.0
    """Bytes of compute buffer per row of the longest run, on a rank with layers."""
    row_cell_bytes: float = 2.0
    """Bytes of compute buffer per row of the longest run and token of the context."""
    layer_whole_bytes: tuple[int, ...] = ()
    """Bytes of each layer's weights that all parts of a group hold, such as norms. Empty: groups divide all weights."""
    output_whole_bytes: int = 0
    """Bytes of the output layer that all parts of a group hold."""
    divides_attention: bool = True
    """The parts of a group divide the attention heads. Otherwise each part computes all of them."""
    divides_cells: bool = True
    """They also divide the KV cells. Otherwise each part holds all: those of latent attention have no heads."""
    max_parts: int = MAX_PARTS
    """Maximum number of parts such that each has attention heads; 1: the model does not support groups."""
    taps: tuple[int, ...] = ()
    """Of a draft head: the layers of its target whose inputs it reads; of MTP layers, the number of the target's
    layers. Empty: it is neither."""
    drafter: str = "draft"
    """The kind of its drafter, as in `core.drafters.registry`, where it is a draft model."""
    is_part: bool = False
    """It is that of one part of a group."""
    n_streams: int = 1
    """Residual streams, which hyper-connections mix: a layer's output for a token is one embedding for each."""
    horizon: int | None = None
    """Of a draft head: see `core.drafters.base.HeadNeeds`. None: that of EAGLE-3 heads."""
    _parts: dict[float, ModelShape] = field(default_factory=dict, init=False, compare=False, repr=False)
    """Shapes of parts by share; a plan asks for the same few again and again."""

    @property
    def n_layer(self) -> int:
        """Number of layers."""
        return len(self.layer_bytes)

    @property
    def is_recurrent(self) -> bool:
        """Whether some layers keep a recurrent state, which cannot be rolled back."""
        return any(self.layer_state_bytes)

    @property
    def border_bytes(self) -> int:
        """Bytes of a row that one stage sends to the next: float32 values, in nearly all architectures."""
        return FLOAT_BYTES * self.n_embd * self.n_streams

    @property
    def tap_bytes(self) -> int:
        """Bytes of a row's layer input that a draft head reads: the mean of the streams."""
        return FLOAT_BYTES * self.n_embd

    @property
    def weight_bytes(self) -> int:
        """Bytes of all weights."""
        return self.input_bytes + sum(self.layer_bytes) + self.output_bytes

    @property
    def sparsity(self) -> float:
        """Weights that a long run reads, relative to those that a single row uses; 1 without experts."""
        layers = (0, self.n_layer)
        return self.read_bytes(layers, ALL_EXPERTS) / max(self.read_bytes(layers), 1)

    @property
    def work(self) -> RowWork:
        """The work of its rows, with a nominal machine."""
        layers = (0, self.n_layer)
        row_flop = max(self.token_flop(layers), 1) * ATTENTION_SPEED
        return RowWork(
            sparsity=self.sparsity, attention=tuple(part.times(1 / row_flop) for part in self.attention(layers))
        )

    @property
    def sums_per_layer(self) -> int:
        """How often the parts of a group add up values in each layer: after attention, if they divide it, and after
        feed-forward."""
        return 2 if self.divides_attention else 1

    def part(self, share: float) -> ModelShape:
        """The shape of one part of a group. `share`: its share of everything that the parts divide. They do not divide
        compute buffers and recurrent states."""
        if share == 1:
            return self
        if share in self._parts:
            return self._parts[share]
        whole_bytes = self.layer_whole_bytes or (0,) * self.n_layer
        both = zip(self.layer_bytes, whole_bytes, strict=True)
        own = self._parts[share] = replace(
            self,
            is_part=True,
            layer_bytes=tuple(round(whole + share * (n - whole)) for n, whole in both),
            output_bytes=round(self.output_whole_bytes + share * (self.output_bytes - self.output_whole_bytes)),
            layer_cell_bytes=tuple(share * n for n in self.layer_cell_bytes)
            if self.divides_attention and self.divides_cells
            else self.layer_cell_bytes,
            layer_attention=tuple(attention.times(share) for attention in self.layer_attention)
            if self.divides_attention
            else self.layer_attention,
            layer_expert_bytes=tuple(round(share * n) for n in self.layer_expert_bytes),
        )
        return own

    def with_window(self, window: int, n_requests: int) -> ModelShape:
        """The shape of a draft model that sees `window` tokens of each of `n_requests` requests; 0: all. One that has a
        window keeps it."""
        if not window or self.most_ctx or self.taps or self.is_recurrent:
            return self
        return replace(self, most_ctx=draft_cells(MAX_TOKENS, window, n_requests))

    def cell_bytes(self, layers: tuple[int, int]) -> float:
        """Bytes of a token's KV cache in layers [a, b)."""
        return sum(self.layer_cell_bytes[slice(*layers)])

    def never_long(self) -> ModelShape:
        """The shape of a model that never expands latent vectors, as in exact runs."""
        return replace(self, layer_attention=tuple(attention.never_long() for attention in self.layer_attention))

    def attention(self, layers: tuple[int, int]) -> tuple[Attention, ...]:
        """Floating-point operations of attention in layers [a, b)."""
        return together(self.layer_attention[slice(*layers)])

    def state_bytes(self, layers: tuple[int, int]) -> int:
        """Bytes of all recurrent states in layers [a, b)."""
        return sum(self.layer_state_bytes[slice(*layers)])

    def state_traffic(self, layers: tuple[int, int]) -> float:
        """Bytes that a sequence's recurrent states in layers [a, b) make a run read and write."""
        return 2 * self.state_bytes(layers) / self.n_states

    def expert_bytes(self, layers: tuple[int, int]) -> int:
        """Bytes of the experts in layers [a, b)."""
        return sum(self.layer_expert_bytes[slice(*layers)])

    def read_bytes(self, layers: tuple[int, int], n_rows: int = 1) -> float:
        """Bytes of weights that a run of `n_rows` tokens reads in layers [a, b), with the output after the last."""
        a, b = layers
        dense = sum(self.layer_bytes[a:b]) + (self.output_bytes if b == self.n_layer else 0)
        if self.n_expert_used == 0:
            return dense
        untouched = (1 - self.n_expert_used / self.n_expert) ** n_rows
        return dense - self.expert_bytes(layers) * untouched

    def token_flop(self, layers: tuple[int, int]) -> float:
        """Floating-point operations per token in layers [a, b)."""
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


def head_shape(target: ModelShape) -> ModelShape:
    """An EAGLE-3 head as they are usually trained for a target: a layer like one of its own, without experts that a
    token does not use, an output layer for the 32,000 most frequent tokens, taps near both ends and in the middle."""
    n = target.n_layer
    head = _layers_like(target, 1)
    output_bytes = round(target.output_bytes * min(_HEAD_VOCAB / max(target.n_vocab, 1), 1))
    taps = (min(2, n - 1), n // 2, max(n - 3, 0))
    return replace(head, name="EAGLE-3", output_bytes=output_bytes, taps=taps, drafter="eagle3")


def block_head_shape(target: ModelShape) -> ModelShape:
    """A DFlash head as they are usually trained for a target: five layers like its own, without experts that a token
    does not use, the whole output layer, taps at even distances, blocks of 16 tokens."""
    n = target.n_layer
    taps = tuple(dict.fromkeys(n * i // _BLOCK_HEAD_LAYERS for i in range(_BLOCK_HEAD_LAYERS)))
    head = _layers_like(target, _BLOCK_HEAD_LAYERS)
    return replace(head, name="DFlash", taps=taps, drafter="dflash", horizon=_BLOCK_SIZE - 1)


def _layers_like(target: ModelShape, n_layer: int) -> ModelShape:
    """A model of layers like a target's, without experts that a token does not use."""
    n = target.n_layer
    layer_bytes = round((target.read_bytes((0, n)) - target.output_bytes) / n)
    return replace(
        target,
        layer_bytes=(layer_bytes,) * n_layer,
        layer_cell_bytes=(sum(target.layer_cell_bytes) / n,) * n_layer,
        layer_attention=target.layer_attention[:1] * n_layer,
        layer_state_bytes=(),
        layer_expert_bytes=(),
        n_expert=0,
        n_expert_used=0,
        layer_whole_bytes=(),
        output_whole_bytes=0,
        max_parts=1,
    )


def mtp_shape(
    target: ModelShape,
    layer_bytes: tuple[int, ...] = (),
    layer_cell_bytes: tuple[float, ...] = (),
    layer_expert_bytes: tuple[int, ...] = (),
) -> ModelShape:
    """The MTP layers of a target, which also read its input embedding and its output layer. The sizes are those of
    `ModelShape`. Without them: one layer like the target's last one."""
    if not layer_bytes:
        joins = round(2 * target.n_embd**2 / target.parameters_per_byte)  # token and state become one
        layer_bytes = (target.layer_bytes[-1] + joins,)
        layer_cell_bytes, layer_expert_bytes = target.layer_cell_bytes[-1:], target.layer_expert_bytes[-1:]
    has_experts = any(layer_expert_bytes)
    return replace(
        target,
        name="MTP",
        layer_bytes=layer_bytes,
        layer_cell_bytes=layer_cell_bytes,
        layer_attention=target.layer_attention[-1:] * len(layer_bytes),
        layer_state_bytes=(),
        layer_expert_bytes=layer_expert_bytes if has_experts else (),
        n_expert=target.n_expert if has_experts else 0,
        n_expert_used=target.n_expert_used if has_experts else 0,
        layer_whole_bytes=(),
        output_whole_bytes=0,
        max_parts=1,
        taps=(target.n_layer,),
        drafter="mtp",
    )


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
    """A model with layers that are equal except for their experts, and one type of weights.

    `weight_bytes`, `parameters`: of the whole file. `cell_bytes`: KV cache of a token in all layers. `tied`: the input
    embedding is also the output layer, and the file contains it only once. Heads are taken to be together as wide as an
    embedding.

    Raises ValueError if the experts are larger than the layers.
    """
    edge = weight_bytes * min(n_vocab * n_embd / parameters, 0.9 if tied else 0.45)  # embedding, or output layer
    in_layers = weight_bytes - (edge if tied else 2 * edge)
    layer_expert_bytes = experts.layer_bytes(n_layer) if experts else (0,) * n_layer
    dense = (in_layers - sum(layer_expert_bytes)) / n_layer
    if dense <= 0:
        raise ValueError(
            f"experts of {sum(layer_expert_bytes) / 1e9:.4g} GB do not fit into layers of {in_layers / 1e9:.4g} GB: "
            "lower expert_gb, or check weights_gb"
        )
    return ModelShape(
        name=name,
        layer_bytes=tuple(int(dense + expert_bytes) for expert_bytes in layer_expert_bytes),
        input_bytes=int(edge),
        output_bytes=int(edge),
        parameters_per_byte=parameters / weight_bytes,
        n_embd=n_embd,
        layer_cell_bytes=(cell_bytes / n_layer,) * n_layer,
        layer_attention=(Attention(cell=4 * n_embd),) * n_layer,
        n_vocab=n_vocab,
        layer_expert_bytes=layer_expert_bytes if experts else (),
        n_expert=experts.n_expert if experts else 0,
        n_expert_used=experts.n_used if experts else 0,
        row_bytes=_ROW_BYTES * n_embd,
    )
