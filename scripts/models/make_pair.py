"""Write a random target model and a draft model with any agreement.

    python -m scripts.models.make_pair TARGET.gguf DRAFT.gguf [-s 0.12] [--n-layer 16] [--weight-type q4_0] ...

The weights are random, the computing cost is real: a benchmark or a test gets a pair of any size in
seconds and without a download. Both models have the llama architecture. The draft is the target's first
`n_layer_draft` layers with the target's embedding and head; in the target's later layers the two
projections that write to the residual stream are scaled by `s`: near 0 those layers hardly change the
answer and the agreement is near 1. `head` scales the head's weights: larger = more peaked
distributions. With the defaults (0.75 B parameters in Q4_0, 0.4 GB) s = 0.12 gives a top-1 agreement of
about one half; measure it for other shapes.

Weights are drawn in blocks from a pool of quantized normal deviates: much faster than to quantize each
tensor.
"""

import argparse
import ctypes
import functools
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import gguf
import llama_cpp
import numpy as np
from numpy.typing import NDArray

_FLOATS = ("f32", "f16", "bf16")
_K_QUANTS = ("q2_k", "q3_k", "q4_k", "q5_k", "q6_k")
WEIGHT_TYPES = (*_FLOATS, "q4_0", "q4_1", "q5_0", "q5_1", "q8_0", *_K_QUANTS)
N_POOL = 1 << 20  # deviates in a pool; blocks of them are drawn with replacement
N_CTX = 4096
MIN_VOCAB = 3 + 256 + 1 + 94  # control tokens, bytes, the space mark, printable ASCII


@dataclass(frozen=True)
class Shape:
    """Sizes of a pair. Widths must be multiples of the weight type's block (32; 256 for K-quants)."""

    n_layer: int = 16
    n_layer_draft: int = 1
    width: int = 2048
    n_head: int = 32
    n_head_kv: int = 8
    n_ff: int = 5632
    n_vocab: int = 8192

    def __post_init__(self) -> None:
        if min(getattr(self, field.name) for field in fields(self)) < 1:
            raise ValueError(f"sizes are at least 1: {self}")
        if not 0 < self.n_layer_draft <= self.n_layer:
            raise ValueError(f"a draft of {self.n_layer_draft} layers cannot come from {self.n_layer} layers")
        if self.width % self.n_head or self.n_head % self.n_head_kv:
            raise ValueError(f"width {self.width}: not for {self.n_head} heads, {self.n_head_kv} of them KV")
        if self.n_vocab < MIN_VOCAB:
            raise ValueError(f"n_vocab {self.n_vocab} is below {MIN_VOCAB}, the tokenizer's own tokens")

    def tensors(self, s: float, head: float) -> Iterator[tuple[str, tuple[int, ...], float, bool]]:
        """(name, shape, scale, in the draft too) in file order; norms, all ones, have one dimension."""
        e, kv, ff = self.width, self.width * self.n_head_kv // self.n_head, self.n_ff
        yield "token_embd.weight", (self.n_vocab, e), e**0.5, True
        for i in range(self.n_layer):
            shared = i < self.n_layer_draft
            back = 1.0 if shared else s
            for name, shape, scale in (
                ("attn_norm", (e,), 1.0),
                ("attn_q", (e, e), 1.0),
                ("attn_k", (kv, e), 1.0),
                ("attn_v", (kv, e), 1.0),
                ("attn_output", (e, e), back),
                ("ffn_norm", (e,), 1.0),
                ("ffn_gate", (ff, e), 1.0),
                ("ffn_up", (ff, e), 1.0),
                ("ffn_down", (e, ff), back),
            ):
                yield f"blk.{i}.{name}.weight", shape, scale, shared
        yield "output_norm.weight", (e,), 1.0, True
        yield "output.weight", (self.n_vocab, e), head, True


def spm_vocab(n_vocab: int) -> tuple[list[str], list[float], list[int]]:
    """(tokens, scores, token types) of a SentencePiece vocabulary that can spell any text.

    `<unk> <s> </s>`, 256 byte tokens, the space mark, printable ASCII, then words: " t0", " t1", ...
    """
    chars = ["\u2581", *map(chr, range(33, 127))]
    words = [f"\u2581t{i}" for i in range(n_vocab - MIN_VOCAB)]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{b:02X}>" for b in range(256)), *chars, *words]
    n_text = len(tokens) - 259
    types = [gguf.TokenType.UNKNOWN, *[gguf.TokenType.CONTROL] * 2, *[gguf.TokenType.BYTE] * 256]
    return tokens, [0.0] * 259 + [-1.0] * n_text, [*map(int, types), *[int(gguf.TokenType.NORMAL)] * n_text]


def make_pair(
    target: Path,
    draft: Path,
    shape: Shape | None = None,
    *,
    weight_type: str = "q4_0",
    s: float = 0.25,
    head: float = 5.0,
    seed: int = 7,
) -> None:
    """Write `target` and `draft`. The same arguments give the same bytes.

    Args:
        shape: the sizes; `Shape()` if None.
        weight_type: ggml type of the matrices, one of WEIGHT_TYPES.
        s: scale of the later layers' output projections, 0 (agreement 1) to about 1.
        head: scale of the output head; larger = more confident distributions.
        seed: seeds all weights.

    Raises:
        ValueError: the type is none of WEIGHT_TYPES, or a width is no multiple of its block.
    """
    shape = shape or Shape()
    if weight_type not in WEIGHT_TYPES:
        raise ValueError(f"weight type {weight_type!r} is none of {', '.join(WEIGHT_TYPES)}")
    qtype = gguf.GGMLQuantizationType[weight_type.upper()]
    block = max(gguf.GGML_QUANT_SIZES[qtype][0], 32)
    if shape.width % block or shape.n_ff % block:
        raise ValueError(f"{weight_type} needs multiples of {block}, not widths {shape.width} and {shape.n_ff}")

    files = (_writer(target, shape, shape.n_layer, qtype), _writer(draft, shape, shape.n_layer_draft, qtype))
    plan = list(shape.tensors(s, head))
    for name, dims, _, shared in plan:
        kind = qtype if len(dims) > 1 else gguf.GGMLQuantizationType.F32
        n_bytes = int(np.prod(gguf.quant_shape_to_byte_shape(dims, kind), dtype=np.int64))
        for file in files[: 1 + shared]:
            file.add_tensor_info(name, dims, np.dtype(np.float32), n_bytes, raw_dtype=kind)
    for file in files:
        file.write_header_to_file()
        file.write_kv_data_to_file()
        file.write_ti_data_to_file()

    rng = np.random.default_rng(seed)
    pools: dict[float, NDArray[np.uint8]] = {}  # by standard deviation: a quantized block cannot be rescaled
    for _, dims, scale, shared in plan:
        if len(dims) == 1:
            data = np.ones(dims, np.float32).view(np.uint8)
        else:
            std = scale / dims[-1] ** 0.5
            if std not in pools:
                deviates = rng.standard_normal(N_POOL, dtype=np.float32) * np.float32(std)
                pools[std] = _quantize(deviates, qtype).reshape(N_POOL // block, -1)
            n_blocks = int(np.prod(dims, dtype=np.int64)) // block
            data = pools[std][rng.integers(0, N_POOL // block, n_blocks, dtype=np.int32)]
        for file in files[: 1 + shared]:
            file.write_tensor_data(data)
    for file in files:
        file.close()


def _writer(path: Path, shape: Shape, n_layer: int, qtype: gguf.GGMLQuantizationType) -> gguf.GGUFWriter:
    """A writer that holds everything but the tensors."""
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name(f"random {n_layer} x {shape.width}")
    writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
    writer.add_file_type(_file_type(qtype))
    writer.add_block_count(n_layer)
    writer.add_context_length(N_CTX)
    writer.add_embedding_length(shape.width)
    writer.add_feed_forward_length(shape.n_ff)
    writer.add_head_count(shape.n_head)
    writer.add_head_count_kv(shape.n_head_kv)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(shape.width // shape.n_head)
    writer.add_vocab_size(shape.n_vocab)
    tokens, scores, types = spm_vocab(shape.n_vocab)
    writer.add_tokenizer_model("llama")
    writer.add_token_list(tokens)
    writer.add_token_scores(scores)
    writer.add_token_types(types)
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_unk_token_id(0)
    return writer


def _file_type(qtype: gguf.GGMLQuantizationType) -> int:
    """The llama.cpp file type that names this tensor type, 0 (F32) where none does."""
    names = gguf.LlamaFileType.__members__
    kinds = (f"MOSTLY_{qtype.name}", f"MOSTLY_{qtype.name}_M", f"ALL_{qtype.name}")
    return next((int(names[kind]) for kind in kinds if kind in names), 0)


def _quantize(values: NDArray[np.float32], qtype: gguf.GGMLQuantizationType) -> NDArray[np.uint8]:
    """`values` as the bytes of ggml's type `qtype`; through ggml, since gguf-py cannot write K-quants."""
    out = np.empty(gguf.quant_shape_to_byte_shape(values.shape, qtype), np.uint8)
    _ggml().ggml_quantize_chunk(qtype, values.ctypes.data, out.ctypes.data, 0, 1, values.size, None)
    return out


@functools.cache
def _ggml() -> ctypes.CDLL:
    """libggml-base: the copy that llama_cpp has mapped, not the wheel's second one."""
    base = ctypes.CDLL(str(Path(llama_cpp.__file__).parent / "lib" / "libggml-base.so.0"))
    i64, ptr = ctypes.c_int64, ctypes.c_void_p
    base.ggml_quantize_chunk.argtypes = [ctypes.c_int, ptr, ptr, i64, i64, i64, ptr]
    base.ggml_quantize_chunk.restype = ctypes.c_size_t
    return base


def main() -> None:
    """Read the command line and write the pair."""
    formatter = argparse.ArgumentDefaultsHelpFormatter
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0], formatter_class=formatter)
    parser.add_argument("target", type=Path, help="GGUF file to write")
    parser.add_argument("draft", type=Path, help="GGUF file to write")
    for field in fields(Shape):
        option = f"--{field.name.replace('_', '-')}"
        parser.add_argument(option, type=int, default=field.default, help="a size")
    parser.add_argument("--weight-type", choices=WEIGHT_TYPES, default="q4_0", help="type of the matrices")
    parser.add_argument("-s", type=float, default=0.25, help="scale of the layers that the draft lacks")
    parser.add_argument("--head", type=float, default=5.0, help="scale of the head: larger = more confident")
    parser.add_argument("--seed", type=int, default=7, help="seeds the weights")
    args = parser.parse_args()
    try:
        options = vars(args)
        shape = Shape(**{field.name: options.pop(field.name) for field in fields(Shape)})
        make_pair(shape=shape, **options)
    except (ValueError, OSError) as exc:
        parser.error(str(exc))


if __name__ == "__main__":
    main()
