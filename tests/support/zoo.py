"""Tiny random models of many architectures, each written in milliseconds.

    path = make("gemma2", tmp_path / "gemma2.gguf")
    path = quantize(make("llama", tmp_path / "llama.gguf"), tmp_path / "llama-q4.gguf", "Q4_K_M")
    parts = split(path, tmp_path / "llama-q4", 3)

libllama makes them itself: `llama_model_init_from_user` builds a model from metadata and asks for the
values of every tensor, `llama_model_save_to_file` writes it. Which metadata an architecture wants was read
in llama.cpp's loaders and its tests/test-llama-archs.cpp. Bad metadata ends in a GGML_ASSERT that kills the
process: `ZOO` holds what works.

A model made this way has every optional tensor of its architecture; `ZooModel.drop` takes some out again.
Two matter: the NVFP4 scales, which at random values near 0 switch all layers off, so that the next token
depends on the last one alone; and `output.weight`, without which the head is tied to the embedding.
"""

import ctypes
import importlib.util
import os
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggpipe.llama.libllama import start
from scripts.models.quantize import quantize

N_CTX_TRAIN = 2048
N_VOCAB_TEST = 128
N_VOCAB_SPM = 384

Value = bool | int | float | str | Sequence[int] | Sequence[float] | Sequence[str]
Metadata = Mapping[str, Value | Callable[[int], Value]]

_SCALES = r"scales?$"
_PLAIN = rf"{_SCALES}|bias$|^rope_freqs"
_TIED = r"|^output\.(weight|bias)"


@dataclass(frozen=True)
class ZooModel:
    """One recipe; sizes in elements."""

    arch: str
    metadata: Metadata = field(default_factory=dict)
    """Beside the common metadata; keys without the architecture's prefix; a callable gets n_layer."""
    n_layer: int = 3
    fixed_layers: bool = False
    """With another number of layers libllama builds something else, or dies."""
    width: int = 64
    n_head: int = 2
    n_head_kv: int = 2
    n_ff: int = 96
    embedding: float = 1.0
    """Standard deviation of the token embeddings."""
    tokenizer: str = "test"
    """test: 128 tokens, reads any text, writes ids in hex, has no BOS or EOS. spm: 384 tokens, a real one."""
    weight_type: str = "f32"
    drop: str | None = _SCALES
    """Tensors whose names match this regular expression are left out of the file."""


_MOE: Metadata = {"expert_count": 4, "expert_used_count": 2, "expert_feed_forward_length": 64}
_SSM: Metadata = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 4}
_LORA = ("decay", "iclr", "value_residual_mix", "gate")
_RWKV: Metadata = {"attention.head_count": 0, "wkv.head_size": 32}
# With AVX-512, ggml's wkv7 reads 64 numbers at once: from a shorter head also those behind it.
_RWKV7: Metadata = {**_RWKV, "wkv.head_size": 64, **{f"attention.{kind}_lora_rank": 16 for kind in _LORA}}
_NO_HEADS: Metadata = {"attention.head_count": 0, "feed_forward_length": 0}
_SWA: Metadata = {"attention.sliding_window": 32, "attention.sliding_window_pattern": 2}  # every second layer
_SOFTCAP: Metadata = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_ROPE_SWA: Metadata = {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4}
_MLA: Metadata = {
    "attention.q_lora_rank": 32,
    "attention.kv_lora_rank": 64,
    "attention.key_length": 64 + 16,
    "attention.value_length": 64,
    "attention.key_length_mla": 32 + 16,
    "attention.value_length_mla": 32,
    "rope.dimension_count": 16,
}
_SHARED: Metadata = {"leading_dense_block_count": 1, "expert_shared_count": 1, "expert_gating_func": 1}
_HRM: Metadata = {"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2}
_EVEN_RECURRENT: Metadata = {"attention.head_count_kv": lambda n: [2 * (i % 2) for i in range(n)]}

ZOO: dict[str, ZooModel] = {
    "llama": ZooModel("llama", width=256, n_head=4, n_head_kv=4, n_ff=512, tokenizer="spm", drop=_PLAIN),
    "llama-tied": ZooModel("llama", tokenizer="spm", embedding=0.15, weight_type="q8_0", drop=_PLAIN + _TIED),
    "llama-optional": ZooModel("llama", drop=None),  # every optional tensor
    "mistral": ZooModel("llama", n_head=8, tokenizer="spm", drop=_PLAIN),
    "mixtral": ZooModel("llama", _MOE, drop=_PLAIN),
    "qwen2": ZooModel("qwen2", n_head_kv=1),
    "qwen2-tied": ZooModel("qwen2", n_head_kv=1, embedding=0.15, drop=_SCALES + _TIED),
    "qwen3": ZooModel("qwen3", n_head=4, drop=_PLAIN),
    "qwen3moe": ZooModel("qwen3moe", _MOE, n_head=4, drop=_PLAIN),
    "gemma2": ZooModel("gemma2", {**_SWA, **_SOFTCAP}, n_layer=4, embedding=0.05),
    "gemma3": ZooModel("gemma3", {**_SWA, **_ROPE_SWA}, n_layer=4, embedding=0.125),
    "phi3": ZooModel("phi3", {"rope.dimension_count": 32}),
    "falcon": ZooModel("falcon", n_head_kv=1),
    "bloom": ZooModel("bloom"),
    "mpt": ZooModel("mpt", {"attention.max_alibi_bias": 8.0, "attention.clamp_kqv": 4.0}),
    "starcoder": ZooModel("starcoder", n_head_kv=1),
    "starcoder2": ZooModel("starcoder2", n_head=4),
    "stablelm": ZooModel("stablelm", {"rope.dimension_count": 16, "use_parallel_residual": False}),
    "refact": ZooModel("refact", n_head=4, n_head_kv=1),
    "baichuan-7b": ZooModel("baichuan", n_layer=32, fixed_layers=True),  # RoPE
    "baichuan-13b": ZooModel("baichuan", n_layer=40, fixed_layers=True),  # ALiBi; at other counts neither
    "gpt2": ZooModel("gpt2"),
    "gptneox": ZooModel("gptneox", {"rope.dimension_count": 8, "use_parallel_residual": True}),
    "deepseek2": ZooModel("deepseek2", {**_MOE, **_SHARED, **_MLA}, n_head_kv=1),
    "gpt-oss": ZooModel("gpt-oss", {**_MOE, **_SWA}, n_head=4, n_layer=4),
    "mamba": ZooModel("mamba", {**_NO_HEADS, **_SSM}),
    "mamba2": ZooModel("mamba2", {**_NO_HEADS, **_SSM, "ssm.group_count": 2}),
    "rwkv6": ZooModel("rwkv6", {**_RWKV, "time_mix_extra_dim": 16, "time_decay_extra_dim": 16}),
    "rwkv7": ZooModel("rwkv7", _RWKV7),
    "jamba": ZooModel("jamba", {**_SSM, **_EVEN_RECURRENT}, n_layer=4),  # hybrid
    "hrm_text": ZooModel("hrm_text", _HRM, n_layer=6, fixed_layers=True),  # two layers, run six times in all
}


FURTHER: dict[str, Value] = {}
"""Metadata of all models, by their whole keys."""


def make(
    name: str,
    path: Path,
    *,
    seed: int = 1,
    n_layer: int | None = None,
    weight_type: str | None = None,
    tokenizer: str | None = None,
    n_ff: int | None = None,
    n_head_kv: int | None = None,
    width: int | None = None,
) -> Path:
    """Write ZOO[name] to `path` unless that exists; None: as the recipe says. Same arguments, same bytes.

    `weight_type` is a file type as in `quantize`, or "f32"; `n_ff` the width of the FFN, and of each expert.
    """
    model = ZOO[name]
    model = replace(model, n_head_kv=n_head_kv or model.n_head_kv, width=width or model.width)
    if model.fixed_layers and n_layer not in (None, model.n_layer):
        raise ValueError(f"{name} is what it is because of its {model.n_layer} layers")
    if path.exists():
        return path
    built, ready = (path.with_name(f"{path.name}.{os.getpid()}.{step}") for step in ("built", "ready"))
    if n_ff is not None:
        widths = {key: n_ff for key in model.metadata if key.endswith("feed_forward_length")}
        model = replace(model, n_ff=n_ff, metadata={**model.metadata, **widths})
    _build(model, built, seed, n_layer or model.n_layer, tokenizer or model.tokenizer)
    _copy(built, ready, model.drop)
    ftype = weight_type or model.weight_type
    if ftype.lower() != "f32":
        built, ready = ready, quantize(ready, built, ftype)
    ready.replace(path)  # whole or not at all: several ranks may make the same model at once
    built.unlink()
    return path


def without(src: Path, dst: Path, drop: str) -> Path:
    """Write `src` without the tensors whose names match `drop`."""
    _copy(src, dst, drop)
    return dst


def split(src: Path, dst_prefix: Path, n: int) -> list[Path]:
    """Write `src` as `dst_prefix-00001-of-0000n.gguf`, ...; libllama opens the first and finds the others."""
    parts = [dst_prefix.with_name(f"{dst_prefix.name}-{i:05d}-of-{n:05d}.gguf") for i in range(1, n + 1)]
    for i, part in enumerate(parts):
        _copy(src, part, None, i, n)
    return parts


def _build(model: ZooModel, path: Path, seed: int, n_layer: int, tokenizer: str) -> None:
    """Let libllama write the model with all its optional tensors."""
    start()
    base = ggml_base()
    meta = base.gguf_init_empty()
    for key, value in _metadata(model, n_layer, tokenizer).items():
        set_value(meta, key, value)

    def fill(tensor: int, _: int) -> None:
        name = base.ggml_get_name(tensor).decode()
        data = weights_of(name, base.ggml_nelements(tensor), base.ggml_nrows(tensor), seed, model.embedding)
        assert data.nbytes == base.ggml_nbytes(tensor), f"{name} is not made of floats"
        base.ggml_backend_tensor_set(tensor, data.ctypes.data, 0, data.nbytes)

    callback = llama_cpp.llama_model_set_tensor_data_t(fill)
    built = llama_cpp.llama_model_init_from_user(meta, callback, None, llama_cpp.llama_model_default_params())
    base.gguf_free(meta)
    if built is None:
        raise RuntimeError(f"libllama cannot build {model}")
    llama_cpp.llama_model_save_to_file(built, os.fsencode(path))
    llama_cpp.llama_model_free(built)


def _metadata(model: ZooModel, n_layer: int, tokenizer: str) -> dict[str, Value]:
    meta: dict[str, Value] = {"general.architecture": model.arch}
    common: Metadata = {
        "vocab_size": N_VOCAB_SPM if tokenizer == "spm" else N_VOCAB_TEST,
        "context_length": N_CTX_TRAIN,
        "embedding_length": model.width,
        "block_count": n_layer,
        "feed_forward_length": model.n_ff,
        "attention.head_count": model.n_head,
        "attention.head_count_kv": model.n_head_kv,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
    }
    for key, value in {**common, **model.metadata}.items():
        meta[f"{model.arch}.{key}"] = value(n_layer) if callable(value) else value
    vocab: dict[str, Value] = {"model": "test", "tokens": [f"tok_{i}" for i in range(N_VOCAB_TEST)]}
    if tokenizer == "spm":
        tokens, scores, types = pair_script().spm_vocab(N_VOCAB_SPM)
        vocab = {"model": "llama", "tokens": tokens, "scores": scores, "token_type": types}
        vocab |= {"unknown_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    return meta | {f"tokenizer.ggml.{key}": value for key, value in vocab.items()} | FURTHER


def weights_of(name: str, n_elements: int, n_rows: int, seed: int, embedding: float) -> NDArray[np.float32]:
    """The values of one tensor, seeded by its name: libllama asks twice for a tensor that has two uses.

    The gains make earlier tokens matter as much as the last one, and keep greedy text out of short loops.
    """
    x = np.random.default_rng([seed, zlib.crc32(name.encode())]).standard_normal(n_elements, np.float32)
    if re.search(r"norm(_2)?\.weight|rope_f|scales?$", name):  # factors
        x = np.abs(x)
        x /= 10
        x += 1
        x *= 3 if name == "output_norm.weight" else 1
    elif name.endswith("ssm_a"):  # decay
        x = -np.abs(x)
    elif name.startswith("token_embd"):
        x *= embedding
    elif n_rows == 1:  # biases and the like
        x /= 10
    else:
        gain = 3.0 if re.search(r"attn_(q|k|qkv)\.", name) else 1.0 if name == "output.weight" else 1.5
        x *= gain * (n_rows / n_elements) ** 0.5
    return x


def set_value(meta: int, key: str, value: Value) -> None:
    """Add a value to a gguf_context; whole numbers become u32, which is what the loaders read."""
    base = ggml_base()
    name = key.encode()
    if isinstance(value, bool):
        base.gguf_set_val_bool(meta, name, value)
    elif isinstance(value, int):
        base.gguf_set_val_u32(meta, name, value)
    elif isinstance(value, float):
        base.gguf_set_val_f32(meta, name, value)
    elif isinstance(value, str):
        base.gguf_set_val_str(meta, name, value.encode())
    elif isinstance(value[0], str):
        texts = [str(text).encode() for text in value]
        base.gguf_set_arr_str(meta, name, (ctypes.c_char_p * len(texts))(*texts), len(texts))
    else:
        # gguf_type: 4 = uint32, 5 = int32, 6 = float32
        kind = 6 if isinstance(value[0], float) else 5 if key.endswith("token_type") else 4
        data = np.asarray(value, np.float32 if kind == 6 else np.uint32)
        base.gguf_set_arr_data(meta, name, kind, data.ctypes.data, data.size)


# name:result and arguments, in the letters of ggml_base()
_PROTOTYPES = """
    gguf_init_empty:p gguf_init_from_file:psP gguf_free:-p gguf_write_to_file:bpsb
    gguf_set_kv:-pp gguf_set_val_bool:-psb gguf_set_val_u16:-psH gguf_set_val_i32:-psi gguf_set_val_u32:-psI
    gguf_set_val_f32:-psf gguf_set_val_str:-pss gguf_set_arr_data:-psipN gguf_set_arr_str:-pspN
    gguf_get_n_tensors:qp gguf_get_tensor_name:spq gguf_add_tensor:-pp
    ggml_get_tensor:pps ggml_get_name:sp ggml_nelements:qp ggml_nrows:qp ggml_nbytes:Np
    ggml_backend_tensor_set:-ppNN ggml_free:-p
"""


class _InitParams(ctypes.Structure):
    """gguf_init_params."""

    _fields_ = (("no_alloc", ctypes.c_bool), ("ctx", ctypes.POINTER(ctypes.c_void_p)))


def _copy(src: Path, dst: Path, drop: str | None, part: int = 0, n_parts: int = 1) -> None:
    """Write part `part` of `n_parts` of a GGUF file, without the tensors whose names match `drop`."""
    base = ggml_base()
    data = ctypes.c_void_p()
    old = base.gguf_init_from_file(os.fsencode(src), _InitParams(no_alloc=False, ctx=ctypes.pointer(data)))
    if not old:
        raise RuntimeError(f"libllama cannot read {src}")
    new = base.gguf_init_empty()
    if part == 0:
        base.gguf_set_kv(new, old)
    n_tensors = base.gguf_get_n_tensors(old)
    if n_parts > 1:
        base.gguf_set_val_u16(new, b"split.no", part)
        base.gguf_set_val_u16(new, b"split.count", n_parts)
        base.gguf_set_val_i32(new, b"split.tensors.count", n_tensors)
    for i in range(n_tensors * part // n_parts, n_tensors * (part + 1) // n_parts):
        name = base.gguf_get_tensor_name(old, i)
        if drop is None or not re.search(drop, name.decode()):
            base.gguf_add_tensor(new, base.ggml_get_tensor(data, name))
    base.gguf_write_to_file(new, os.fsencode(dst), False)
    base.gguf_free(new)
    base.gguf_free(old)
    base.ggml_free(data)


@cache
def ggml_base() -> ctypes.CDLL:
    """libggml-base with the prototypes used here: the copy that llama_cpp mapped, not the wheel's others."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    (path,) = {line.split(maxsplit=5)[5] for line in lines if "libggml-base" in line}
    base = ctypes.CDLL(path)
    pointer, text, size = ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t
    whole = (ctypes.c_uint16, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64)
    types = (None, pointer, text, size, *whole, ctypes.c_bool, ctypes.c_float, _InitParams)
    kinds = dict(zip("-psNHiIqbfP", types, strict=True))
    for prototype in _PROTOTYPES.split():
        name, letters = prototype.split(":")
        function = getattr(base, name)
        function.restype, *function.argtypes = (kinds[letter] for letter in letters)
    return base


@cache
def pair_script() -> Any:
    """The module scripts/models/make_pair.py."""
    path = Path(__file__).parents[2] / "scripts" / "models" / "make_pair.py"
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module
