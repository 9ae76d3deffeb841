"""DFlash heads: random ones of all kinds, and their use as in llama.cpp's own `draft-dflash` and `draft-dspark`
(common/speculative.cpp).

path = write(tmp_path / "head.gguf", TARGET)
path = write(tmp_path / "head.gguf", TARGET, follows=text)      it is right now and then
path = write(tmp_path / "head.gguf", TARGET, kind=DSPARK)
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.layer_inputs import LastStates
from ggpipe.llama.libllama import lib
from support.eagle3 import PlainPair

Weights = dict[str, NDArray[np.float32]]
Settings = Mapping[str, int | bool | list[int] | list[bool]]

LAYERS, BLOCK_SIZE, MASK = (2, 4, 6), 7, 3
_N_HEAD, _N_HEAD_KV, _N_LAYER, _N_FF = 8, 4, 2, 128
_SURE = 3.0
DFLASH, DSPARK, DFLASH_2 = "dflash", "dspark", "dflash2"
N_CANDIDATES, _KERNEL, _GROUP, _RANK = 8, 3, 64, 16
SETTINGS: Mapping[str, Settings] = {
    DFLASH: {},
    DSPARK: {},
    DFLASH_2: {"conv_kernel_size": _KERNEL, "conv_group_size": _GROUP, "selector_rank": _RANK,
               "selector_top_k": N_CANDIDATES},
}  # fmt: skip
"""Metadata by the kind of head."""


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
    kind: str = DFLASH,
    layers: Sequence[int] = LAYERS,
) -> Path:
    """A random head with the target's own embeddings and output layer.

    `follows`: it says that the token comes which follows the last accepted one in this text. `drafts`: the tokens that
    it drafts, if not all. `settings`: further metadata, or others. `drop`: tensors to leave out. `layers`: those whose
    inputs it reads.
    """
    reader = gguf.GGUFReader(target)
    chances = np.random.default_rng(seed)
    weights = _random(dict(_floats(reader)), len(layers), chances)
    weights |= more_weights(kind, weights, chances)
    if follows:
        _learn(weights, follows)
    if drafts is not None:
        for name in {"output.weight", "markov_w2.weight"} & weights.keys():
            weights[name] = weights[name][drafts]
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
        "target_layers": list(layers),
        **SETTINGS[kind],
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


def _matrix(chances: np.random.Generator, n_out: int, n_in: int, scale: float = 1.0) -> NDArray[np.float32]:
    return chances.standard_normal((n_out, n_in), np.float32) * np.float32(scale / n_in**0.5)


def _random(own: Weights, n_taps: int, chances: np.random.Generator) -> Weights:
    """`own`: the target's."""
    width = own["token_embd.weight"].shape[1]
    size = width // _N_HEAD
    matrix = functools.partial(_matrix, chances)
    weights = {**own, "fc.weight": matrix(width, n_taps * width)}
    shapes = {
        "attn_q": (width, width), "attn_k": (_N_HEAD_KV * size, width), "attn_v": (_N_HEAD_KV * size, width),
        "attn_output": (width, width), "ffn_gate": (_N_FF, width), "ffn_up": (_N_FF, width), "ffn_down": (width, _N_FF),
    }  # fmt: skip
    norms = {"attn_norm": width, "ffn_norm": width, "attn_q_norm": size, "attn_k_norm": size}
    for layer in range(_N_LAYER):
        weights |= {f"blk.{layer}.{name}.weight": matrix(*shape) for name, shape in shapes.items()}
        weights |= {f"blk.{layer}.{name}.weight": np.ones(n, np.float32) for name, n in norms.items()}
    return weights | {f"{name}.weight": np.ones(width, np.float32) for name in ("enc.output_norm", "output_norm")}


def _with_markov_head(weights: Weights, chances: np.random.Generator) -> Weights:
    n_tokens, width = weights["token_embd.weight"].shape
    return {
        "markov_w1.weight": _matrix(chances, n_tokens, _RANK, scale=_RANK**0.5),
        "markov_w2.weight": _matrix(chances, n_tokens, _RANK),
        "conf_proj.weight": _matrix(chances, 1, width + _RANK),
        "conf_proj.bias": np.ones(1, np.float32),
    }


def _with_selector(weights: Weights, chances: np.random.Generator) -> Weights:
    n_tokens, width = weights["token_embd.weight"].shape
    more = {
        "selector_predecessor.weight": _matrix(chances, n_tokens, _RANK, scale=_RANK**0.5),
        "selector_successor.weight": _matrix(chances, n_tokens, _RANK),
        "selector_hidden.weight": _matrix(chances, _RANK, width),
    }
    for layer, part in itertools.product(range(_N_LAYER), ("attn", "ffn")):
        base = np.zeros((2, _KERNEL, width), np.float32)
        base[:, 0] = 1  # a row's own numbers
        more[f"blk.{layer}.{part}_conv_base"] = base + 0.1 * chances.standard_normal(base.shape, np.float32)
        n_projected = 2 * _KERNEL * width // _GROUP
        more[f"blk.{layer}.{part}_conv_proj.weight"] = _matrix(chances, n_projected, width, scale=0.1)
    return more


def more_weights(kind: str, weights: Weights, chances: np.random.Generator) -> Weights:
    """Random ones that a head of this kind has besides its layers."""
    return _MORE[kind](weights, chances)


_MORE = {DFLASH: lambda weights, chances: {}, DSPARK: _with_markov_head, DFLASH_2: _with_selector}


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

    def __init__(self, target: Path, head: Path, kind: str = DFLASH, n_taps: int = len(LAYERS)) -> None:
        """`n_taps`: how many layers' inputs it reads."""
        super().__init__(target, head, n_taps)
        lib.llama_set_causal_attn(self._head.context, False)
        self._kind = kind
        if kind == DFLASH_2:
            self._packed = LastStates(self._head.context, of_all_rows=True)
        metadata = ModelFile.open(head).metadata
        self._first = 0 if kind == DSPARK and metadata.get("dflash.sample_from_anchor") is not False else 1

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
            masks = [MASK] * (n_draft - 1 + self._first)
            head.compute(lib.llama_decode, [text[last], *masks], last, None, outputs=self._kind != DFLASH_2)
            rows = range(self._first, self._first + n_draft)
            drafted[epoch] = self._selected(n_draft) if self._kind == DFLASH_2 else [head.best(row) for row in rows]
            lib.llama_memory_seq_rm(head.memory, 0, last, -1)
        return drafted

    def _selected(self, n_draft: int) -> list[int]:
        """The path of the highest scores, each after the candidate before."""
        found, before, n = list[int](), 0, N_CANDIDATES
        for packed in self._packed.of_run(n_draft + 1, self._head.n_embd)[1:]:
            before = int(packed[n + before * n : n + (before + 1) * n].argmax())
            found.append(int(packed[before]))
        return found
