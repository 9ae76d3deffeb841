"""The shape of a model, from its GGUF's header: no weights are loaded."""

from __future__ import annotations

from collections.abc import Mapping

from ggpipe.cluster.model_shape import ModelShape
from ggpipe.cluster.profile import ModelFacts
from ggpipe.core.drafters import registry
from ggpipe.llama.context_ids import most_taken_back
from ggpipe.llama.draft_heads import needs_of
from ggpipe.llama.gguf import ModelFile, TensorInfo
from ggpipe.llama.group import divided_weights, most_parts, splits_attention, splits_by_heads, splits_hybrid
from ggpipe.llama.model_header import ModelHeader, n_bytes, n_numbers

_OUTPUT = ("output", "cls")


def shape_of(
    model_file: ModelFile,
    cache_type_k: str = "f16",
    cache_type_v: str = "f16",
    flash_attn: bool = True,
    n_seq: int = 1,
    n_prefixes: int = 0,
    n_states: int = 0,
) -> ModelShape:
    """The shape of a model whose KV cache has these types and sequences, as in `ContextConfig`.

    `n_prefixes`: kept prefixes, at most; recurrent and hybrid models keep fewer. `n_states`: as in `ContextConfig`.
    """
    header, needs = ModelHeader(model_file), needs_of(model_file)
    layers = range(header.n_layer)
    n_all = n_seq + min(n_prefixes, header.most_states) + min(n_states, most_taken_back(model_file))
    state_bytes = tuple(n_all * header.state_bytes(layer) for layer in layers)
    output = {name: tensor for name, tensor in header.others.items() if name.startswith(_OUTPUT)}
    embedding = {name: tensor for name, tensor in header.others.items() if name not in output}
    if model_file.tied_output and "token_embd.weight" in embedding:
        output["token_embd.weight"] = embedding["token_embd.weight"]
    expert_bytes = tuple(map(header.expert_bytes, layers))
    has_experts = any(expert_bytes)
    divided = divided_weights(model_file)

    def whole_bytes(tensors: Mapping[str, TensorInfo], prefix: str = "") -> int:
        return sum(tensor.size for name, tensor in tensors.items() if prefix + name not in divided)

    return ModelShape(
        name=str(model_file.metadata.get("general.name") or model_file.paths[0].stem),
        layer_bytes=tuple(map(n_bytes, header.layers)),
        input_bytes=n_bytes(embedding),
        output_bytes=n_bytes(output),
        parameters_per_byte=sum(map(n_numbers, model_file.tensors.values())) / model_file.n_bytes,
        n_embd=header.width,
        layer_cell_bytes=tuple(header.cell_bytes(layer, cache_type_k, cache_type_v) for layer in layers),
        layer_attention=tuple(map(header.attention, layers)),
        layer_state_bytes=state_bytes if any(state_bytes) else (),
        n_states=n_all,
        n_vocab=model_file.array_lengths.get("tokenizer.ggml.tokens", 0) or header.number("vocab_size"),
        layer_expert_bytes=expert_bytes if has_experts else (),
        n_expert=header.number("expert_count") if has_experts else 0,
        n_expert_used=header.number("expert_used_count") if has_experts else 0,
        n_ctx=header.number("context_length"),
        row_bytes=max(map(header.row_bytes, layers)),
        row_cell_bytes=header.row_cell_bytes(flash_attn),
        layer_whole_bytes=tuple(whole_bytes(tensors, f"blk.{i}.") for i, tensors in enumerate(header.layers)),
        output_whole_bytes=whole_bytes(output),
        divides_attention=splits_attention(model_file) or splits_by_heads(model_file),
        divides_cells=splits_attention(model_file) or splits_hybrid(model_file),
        max_parts=most_parts(model_file),
        n_streams=max(header.number("hyper_connection.count"), 1),
        taps=needs.layers if needs is not None else (),
        drafter=registry.kind_of(model_file.architecture),
        horizon=needs.horizon if needs is not None else None,
    )


def facts_of(model_file: ModelFile) -> ModelFacts:
    """The part of a model's shape that a profile keeps, and which model it is."""
    shape = shape_of(model_file)
    return ModelFacts(
        name=shape.name,
        architecture=model_file.architecture,
        fingerprint=model_file.fingerprint,
        n_layer=shape.n_layer,
        n_embd=shape.n_embd,
        n_vocab=shape.n_vocab,
        n_expert=shape.n_expert,
        n_expert_used=shape.n_expert_used,
        layer_bytes=shape.layer_bytes,
        input_bytes=shape.input_bytes,
        output_bytes=shape.output_bytes,
    )
