"""What a GGUF's header says of a model's size: its shape, with nothing loaded."""

from __future__ import annotations

from ggpipe.engine.model_file import ModelFile
from ggpipe.sim.model_header import ModelHeader, n_bytes, n_numbers
from ggpipe.sim.shapes import ModelShape

_HEAD = ("output", "cls")


def shape_of(
    model_file: ModelFile, cache_type_k: str = "f16", cache_type_v: str = "f16", flash_attn: bool = True
) -> ModelShape:
    """The shape of a model whose KV cache has these types, as -ctk and -ctv name them."""
    header = ModelHeader(model_file)
    layers = range(header.n_layer)
    head = {name: tensor for name, tensor in header.others.items() if name.startswith(_HEAD)}
    embedding = {name: tensor for name, tensor in header.others.items() if name not in head}
    if model_file.tied_output and "token_embd.weight" in embedding:
        head["token_embd.weight"] = embedding["token_embd.weight"]
    expert_bytes = tuple(
        n_bytes({name: tensor for name, tensor in tensors.items() if "_exps." in name}) for tensors in header.layers
    )
    has_experts = any(expert_bytes)
    return ModelShape(
        str(model_file.metadata.get("general.name") or model_file.paths[0].stem),
        tuple(map(n_bytes, header.layers)),
        n_bytes(embedding),
        n_bytes(head),
        sum(map(n_numbers, model_file.tensors.values())) / model_file.n_bytes,
        header.width,
        tuple(header.cell_bytes(layer, cache_type_k, cache_type_v) for layer in layers),
        model_file.array_lengths.get("tokenizer.ggml.tokens", 0) or header.number("vocab_size"),
        expert_bytes if has_experts else (),
        header.number("expert_count") if has_experts else 0,
        header.number("expert_used_count") if has_experts else 0,
        header.number("context_length"),
        max(map(header.row_bytes, layers)),
        header.row_cell_bytes(flash_attn),
    )
