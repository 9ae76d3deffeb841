"""What drafts for random models of DeepSeek-V4: a DSpark head, and an MTP layer. libllama makes neither of them. Both
have layers of the target that do not compress tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

from scripts.models.quantize import finish
from support.dflash import BLOCK_SIZE, DSPARK, MASK, Weights, more_weights

Values = Mapping[str, int | list[int]]
_N_LAYER = 2  # of the head: those of the target whose attention is not compressed
_TARGETS = ("token_embd.weight", "output.weight", "output_norm.weight", "output_hc_")
_NOT_OF_HEADS = ("rope.dimension_sections", "attention.compress_ratios")
_FOR_IMAGES = "exp_probs_b_vl"


def write_head(path: Path, target: Path, layers: Sequence[int], seed: int = 1) -> Path:
    """A DSpark head that has the target's first layers. `layers`: those whose inputs it reads."""
    chances = np.random.default_rng(seed)
    kept = (*_TARGETS, *(f"blk.{layer}." for layer in range(_N_LAYER)))
    weights = {
        name: data for name, data in _weights(target).items() if name.startswith(kept) and _FOR_IMAGES not in name
    }
    width = weights["output_norm.weight"].size
    weights["fc.weight"] = _matrix(chances, width, len(layers) * width)
    weights["enc.output_norm.weight"] = np.ones(width, np.float32)
    weights |= more_weights(DSPARK, weights, chances)
    values: Values = {"block_count": _N_LAYER, "block_size": BLOCK_SIZE, "target_layers": list(layers)}
    writer = _writer(path, target, "dflash", values, leave_out=_NOT_OF_HEADS)
    writer.add_mask_token_id(MASK)
    return _finished(writer, path, weights)


def write_with_mtp(path: Path, target: Path, seed: int = 1) -> Path:
    """The target with an MTP layer, which is its first layer."""
    chances, weights = np.random.default_rng(seed), _weights(target)
    n_layer = 1 + max(int(name.split(".")[1]) for name in weights if name.startswith("blk."))
    width = weights["output_norm.weight"].size
    first = {name.removeprefix("blk.0."): data for name, data in weights.items() if name.startswith("blk.0.")}
    more: Weights = {"nextn.eh_proj.weight": _matrix(chances, width, 2 * width)}
    more |= {f"nextn.{name}.weight": np.ones(width, np.float32) for name in ("enorm", "hnorm", "shared_head_norm")}
    weights |= {f"blk.{n_layer}.{name}": data for name, data in (first | more).items()}
    ratios = gguf.GGUFReader(target).fields["deepseek4.attention.compress_ratios"].contents()
    values: Values = {"block_count": n_layer + 1, "nextn_predict_layers": 1, "attention.compress_ratios": [*ratios, 0]}
    return _finished(_writer(path, target, "deepseek4", values), path, weights)


def _weights(path: Path) -> Weights:
    return {tensor.name: np.array(tensor.data, np.float32) for tensor in gguf.GGUFReader(path).tensors}


def _matrix(chances: np.random.Generator, n_out: int, n_in: int) -> NDArray[np.float32]:
    return chances.standard_normal((n_out, n_in), np.float32) / np.float32(n_in**0.5)


def _writer(
    path: Path, target: Path, architecture: str, values: Values, leave_out: Sequence[str] = ()
) -> gguf.GGUFWriter:
    """Of a file with the target's metadata, but `values`."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, field in gguf.GGUFReader(target).fields.items():
        own, content = key.removeprefix("deepseek4."), field.contents()
        if key.startswith(("GGUF.", "general.architecture")) or own in (*values, *leave_out) or content == []:
            continue
        sub_type = field.types[1] if len(field.types) > 1 else None
        writer.add_key_value(key.replace("deepseek4", architecture, 1), content, field.types[0], sub_type)
    for key, value in values.items():
        if isinstance(value, list):
            writer.add_array(f"{architecture}.{key}", value)
        else:
            writer.add_uint32(f"{architecture}.{key}", value)
    return writer


def _finished(writer: gguf.GGUFWriter, path: Path, weights: Weights) -> Path:
    for name, data in weights.items():
        writer.add_tensor(name, data)
    finish(writer)
    return path
