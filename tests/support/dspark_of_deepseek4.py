"""DSpark heads for DeepSeek-V4: its own layers, as far as these do not compress tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import gguf
import numpy as np

from support.dflash import BLOCK_SIZE, DSPARK, MASK, Weights, more_weights

_N_LAYER = 2  # those of the target whose attention is not compressed
_LEFT_OUT = (
    "GGUF.", "general.architecture", "dflash.block_count", "dflash.attention.compress_ratios",
    "dflash.rope.dimension_sections",
)  # fmt: skip
_FOR_IMAGES = "exp_probs_b_vl"
_ALSO = ("token_embd.weight", "output.weight", "output_norm.weight", "output_hc_")


def write(path: Path, target: Path, layers: Sequence[int], seed: int = 1) -> Path:
    """A head that has the target's first layers. `layers`: those whose inputs it reads."""
    reader, chances = gguf.GGUFReader(target), np.random.default_rng(seed)
    kept = (*_ALSO, *(f"blk.{layer}." for layer in range(_N_LAYER)))
    taken = [t for t in reader.tensors if t.name.startswith(kept) and _FOR_IMAGES not in t.name]
    weights: Weights = {tensor.name: np.array(tensor.data, np.float32) for tensor in taken}
    width = weights["output_norm.weight"].size
    weights["fc.weight"] = chances.standard_normal((width, len(layers) * width), np.float32) / np.float32(width**0.5)
    weights["enc.output_norm.weight"] = np.ones(width, np.float32)
    weights |= more_weights(DSPARK, weights, chances)
    writer = gguf.GGUFWriter(path, "dflash")
    for key, field in reader.fields.items():
        own = key.replace("deepseek4.", "dflash.")
        if not own.startswith(_LEFT_OUT) and field.contents() != []:
            writer.add_key_value(
                own, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None
            )
    writer.add_uint32("dflash.block_count", _N_LAYER)
    writer.add_uint32("dflash.block_size", BLOCK_SIZE)
    writer.add_array("dflash.target_layers", list(layers))
    writer.add_mask_token_id(MASK)
    for name, data in weights.items():
        writer.add_tensor(name, data)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
