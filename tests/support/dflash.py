"""DFlash heads: random ones for a llama target, and their use as in llama.cpp's own `draft-dflash`
(common/speculative.cpp).

path = write(tmp_path / "head.gguf", TARGET)
path = write(tmp_path / "head.gguf", TARGET, follows=text)      it is right now and then
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from ggpipe.llama.libllama import lib
from support.eagle3 import PlainPair

LAYERS, BLOCK_SIZE, MASK = (2, 4, 6), 7, 3
_N_HEAD, _N_HEAD_KV, _N_LAYER, _N_FF = 8, 4, 2, 128
_SURE = 3.0

Weights = dict[str, NDArray[np.float32]]
Settings = Mapping[str, int | bool | list[int] | list[bool]]


def write(
    path: Path,
    target: Path,
    *,
    follows: Sequence[int] = (),
    drafts: range | None = None,
    seed: int = 1,
    settings: Settings | None = None,
    mask: int | None = MASK,
    drop: Sequence[str] = (),
    more: Sequence[str] = (),
) -> Path:
    """A random head with the target's own embeddings and output layer.

    `follows`: it says that the token comes which follows the last accepted one in this text. `drafts`: the tokens that
    it drafts, if not all. `settings`: further metadata, or others. `drop`, `more`: tensors to leave out, and to add.
    """
    reader = gguf.GGUFReader(target)
    weights = _random(dict(_floats(reader)), np.random.default_rng(seed))
    if follows:
        _learn(weights, follows)
    if drafts is not None:
        weights["output.weight"] = weights["output.weight"][drafts]
    writer = gguf.GGUFWriter(path, "dflash")
    for key, field in reader.fields.items():
        if key.startswith("tokenizer."):
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None
            )
    width = weights["fc.weight"].shape[0]
    values: dict[str, int | bool | list[int] | list[bool]] = {
        "block_count": _N_LAYER,
        "context_length": 1024,
        "embedding_length": width,
        "feed_forward_length": _N_FF,
        "attention.head_count": _N_HEAD,
        "attention.head_count_kv": _N_HEAD_KV,
        "rope.dimension_count": width // _N_HEAD,
        "block_size": BLOCK_SIZE,
        "target_layers": list(LAYERS),
        **(settings or {}),
    }
    if mask is not None:
        writer.add_mask_token_id(mask)
    writer.add_float32("dflash.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_float32("dflash.rope.freq_base", 10000.0)
    for key, value in values.items():
        match value:
            case bool():
                writer.add_bool(f"dflash.{key}", value)
            case int():
                writer.add_uint32(f"dflash.{key}", value)
            case list():
                writer.add_array(f"dflash.{key}", value)
    for name, data in weights.items():
        if name not in drop:
            writer.add_tensor(name, data)
    for name in more:
        writer.add_tensor(name, np.ones((width, width), np.float32))
    if drafts is not None:
        writer.add_tensor("d2t", np.array(drafts, np.int64), raw_dtype=gguf.GGMLQuantizationType.I64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _floats(reader: gguf.GGUFReader) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for tensor in reader.tensors:
        if tensor.name in ("token_embd.weight", "output.weight"):
            yield tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)


def _random(own: Weights, chances: np.random.Generator) -> Weights:
    """`own`: the target's."""
    width = own["token_embd.weight"].shape[1]
    size = width // _N_HEAD

    def matrix(n_out: int, n_in: int) -> NDArray[np.float32]:
        return chances.standard_normal((n_out, n_in), np.float32) / np.float32(n_in**0.5)

    weights = {**own, "fc.weight": matrix(width, len(LAYERS) * width)}
    shapes = {
        "attn_q": (width, width), "attn_k": (_N_HEAD_KV * size, width), "attn_v": (_N_HEAD_KV * size, width),
        "attn_output": (width, width), "ffn_gate": (_N_FF, width), "ffn_up": (_N_FF, width), "ffn_down": (width, _N_FF),
    }  # fmt: skip
    norms = {"attn_norm": width, "ffn_norm": width, "attn_q_norm": size, "attn_k_norm": size}
    for layer in range(_N_LAYER):
        weights |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        weights |= {f"blk.{layer}.{name}.weight": np.ones(n, np.float32) for name, n in norms.items()}
    return weights | {f"{name}.weight": np.ones(width, np.float32) for name in ("enc.output_norm", "output_norm")}


def _learn(weights: Weights, text: Sequence[int]) -> None:
    """In the first layer, all KV heads but one of each mask look at the last token, which its embedding's first number
    tells from masks and states; what they find there becomes the output of the token that follows it in the text."""
    size = weights["blk.0.attn_q_norm.weight"].size
    width, n_own = size * _N_HEAD, (_N_HEAD_KV - 1) * size
    per_kv = _N_HEAD // _N_HEAD_KV
    weights["token_embd.weight"] = embedding = weights["token_embd.weight"].copy()
    scale = float(np.abs(embedding).mean()) * 10
    embedding[:, 0] = scale
    embedding[MASK], embedding[MASK, 0] = 0, -scale
    weights["fc.weight"][0] = 0
    weights["output_norm.weight"][0] = 0
    for name, sign, n in (("attn_k", 1, n_own), ("attn_q", -1, n_own * per_kv)):
        weights[f"blk.0.{name}.weight"][:n] = 0
        weights[f"blk.0.{name}.weight"][size - 1 : n : size, 0] = sign  # where RoPE turns slowest
    weights["blk.0.attn_q_norm.weight"][:] = _SURE
    read = embedding[list(text[:-1])]
    read = read / np.sqrt((read**2).mean(1, keepdims=True))
    output = weights["output.weight"][list(text[1:])]
    output = output / np.linalg.norm(output, axis=1, keepdims=True) * width**0.5
    found = np.linalg.solve(read.T @ read + 0.1 * np.eye(width), read.T @ output)  # (width, width)
    left, values, right = np.linalg.svd(found)
    weights["blk.0.attn_v.weight"][:n_own] = left[:, :n_own].T
    weights["blk.0.attn_output.weight"] *= 0.1
    for kv in range(_N_HEAD_KV - 1):
        own = slice(kv * size, (kv + 1) * size)
        at = kv * per_kv * size
        weights["blk.0.attn_output.weight"][:, at : at + size] = (values[own, None] * right[own]).T
    for layer in range(_N_LAYER):
        weights[f"blk.{layer}.ffn_down.weight"] *= 0.1
    weights["blk.1.attn_output.weight"] *= 0.1


class PlainDFlash(PlainPair):
    """A target, and its DFlash head."""

    def __init__(self, target: Path, head: Path) -> None:
        super().__init__(target, head, len(LAYERS))
        lib.llama_set_causal_attn(self._head.context, False)

    def drafts(
        self, prompt: Sequence[int], output: Sequence[int], epochs: Sequence[int], n_draft: int
    ) -> dict[int, list[int]]:
        """For each number of accepted tokens, the `n_draft` tokens that are drafted after them. `output`: accepted
        tokens. A head's context ends with the state before the last token, and the block is forgotten."""
        text, head = [*prompt, *output], self._head
        self._target.compute(lib.llama_decode, text, 0, None, outputs=False)
        states, drafted = np.hstack(self._inputs.of_run(self._target.context, len(text))), dict[int, list[int]]()
        for epoch in epochs:
            last = len(prompt) + epoch - 1  # of the accepted tokens
            n = int(lib.llama_memory_seq_pos_max(head.memory, 0)) + 1
            head.compute(lib.llama_decode, (), n, states[n:last], outputs=False)
            head.compute(lib.llama_decode, [text[last], *[MASK] * n_draft], last, None, outputs=True)
            drafted[epoch] = [head.best(row) for row in range(1, n_draft + 1)]
            lib.llama_memory_seq_rm(head.memory, 0, last, -1)
        return drafted
