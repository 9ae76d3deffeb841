"""A small random model of every architecture that libllama can continue text with, with rows as long as real ones.

    path = write("gemma2", tmp_path / "gemma2.gguf")

The rows of all matrices have 768 numbers or more, so that K-quants are K-quants, and that a group of three gets whole
blocks of them. The metadata are those of llama.cpp's tests/test-llama-archs.cpp, but for sizes: a superset
that suits all architectures, and what one of them wants otherwise. The weights are those of the zoo: layers matter.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import llama_cpp
import numpy as np
from numpy.typing import NDArray

from ggpipe.llama.libllama import start
from support.zoo import N_VOCAB_TEST, Value, ggml_base, set_value, weights_of

WIDTH, N_HEAD, N_FF = 768, 6, 768
HEAD = 128
Change = Callable[[str, NDArray[np.float32]], NDArray[np.float32]]


@dataclass(frozen=True)
class Sizes:
    """How large a model is. Heads have HEAD numbers in all of them."""

    width: int = WIDTH
    n_head: int = N_HEAD
    n_ff: int = N_FF
    """Columns of the FFN, and of each expert."""
    n_experts: int = 2
    """A token uses two. With two in all, no near-tie between experts can change everything."""
    n_indexers: int = 64
    """Heads of the indexers of sparse attention."""


SMALL = Sizes(width=2 * HEAD, n_head=2, n_ff=256, n_experts=4, n_indexers=4)
"""Whose rows are too short for K-quants, and whose tokens choose among experts."""
NEVER_SMALL = {"plm", "rwkv6qwen2"}
"""Refused by libllama: their metadata do not suit a model of this size."""

_MOE = frozenset(
    """
    afmoe arctic bailingmoe bailingmoe2 bailingmoe3 cohere2moe dbrx deepseek deepseek2 deepseek2-ocr deepseek32
    deepseek4 dots1 dots3note ernie4_5-moe exaone-moe glm-dsa glm4moe glm5-next gpt-oss grok grovemoe hunyuan-moe
    hy_v3 hy_v4 kimi-k3 kimi-linear laguna lfm2moe llama4 maple mellum mimo2 minimax-01 minimax-m2 minimax-m3
    mistral4 olmoe phimoe qwen2moe qwen35moe qwen3moe qwen3next qwen3vlmoe qwen4exp smallthinker step35
    """.split()  # noqa: SIM905
)
"""Always with experts."""

_DENSE = frozenset(
    """
    apertus arcee arwkv7 baichuan bitnet bloom chameleon chatglm codeshell cogvlm cohere2 command-r deci ernie4_5
    exaone exaone4 falcon falcon-h1 gemma gemma2 gemma3 gemma3n gemma4 glm4 gpt2 gptneox granite granite_swa
    granitehybrid granitemoe hrm_text hunyuan-dense hunyuan_vl internlm2 jais jais2 jamba lfm2 llama maincoder mamba
    mamba2 minicpm minicpm3 mistral3 mpt muse-glimmer nanbeige nemotron nemotron_h nemotron_h_moe olmo olmo2 openelm
    orion paddleocr pangu-embedded phi2 phi3 plamo plamo2 plamo3 plm pockettts qwen qwen2 qwen2vl qwen3 qwen35
    qwen3tts qwen3vl refact rwkv6 rwkv6qwen2 rwkv7 seed_oss smollm3 spark2_5 stablelm starcoder starcoder2 talkie
    xverse
    """.split()  # noqa: SIM905
)

ARCHITECTURES = tuple(sorted(_MOE | _DENSE))
WITH_EXPERTS_TOO = tuple(
    """
    gemma4 granite granite_swa granitehybrid granitemoe jamba llama minicpm mistral3 nemotron_h nemotron_h_moe
    """.split()  # noqa: SIM905
)
"""Dense ones that have experts in other models: `NAME+experts`."""
MIXTURES = (*sorted(_MOE), *(f"{name}+experts" for name in WITH_EXPERTS_TOO))
"""Names of models with experts, one of each architecture that can have them."""

_LATENT = frozenset(
    """
    bailingmoe3 deepseek2 deepseek32 dots3note glm-dsa glm5-next hy_v4 kimi-k3 kimi-linear mistral4
    """.split()  # noqa: SIM905
)
_EVEN_ATTENTION = frozenset(
    """
    bailingmoe3 glm5-next granitehybrid jamba kimi-k3 kimi-linear lfm2 lfm2moe nemotron_h nemotron_h_moe plamo2
    """.split()  # noqa: SIM905
)
_WINDOWS = frozenset(
    """
    cohere2moe dots3note granite_swa maple mimo2 muse-glimmer spark2_5 step35
    """.split()  # noqa: SIM905
)
_DELTA_NET = frozenset(
    """
    qwen35 qwen35moe qwen3next qwen4exp
    """.split()  # noqa: SIM905
)
_RWKV = frozenset(
    """
    arwkv7 rwkv6 rwkv6qwen2 rwkv7
    """.split()  # noqa: SIM905
)
_LAYERS = {"gemma4": 5, "gemma3n": 22, "deepseek4": 4, "hrm_text": 6, "llama4": 4, "nemotron_h": 3, "nemotron_h_moe": 3}
_LARGE_VOCABULARY = {"chameleon": 10240, "qwen3tts": 3072}


def write(
    name: str,
    path: Path,
    seed: int = 1,
    *,
    n_layer: int | None = None,
    n_mtp: int = 0,
    sizes: Sizes = Sizes(),
    change: Change = lambda _name, data: data,
    more: Mapping[str, Value] | None = None,
) -> Path:
    """Write a model to `path` unless that exists. `name`: of ARCHITECTURES, or of WITH_EXPERTS_TOO with `+experts`.
    `n_layer`: None: as few as it takes. `n_mtp`: MTP layers after the others. `change` gets the name of each tensor,
    and its values in one dimension. `more`: metadata, without the architecture's prefix.

    Raises RuntimeError when libllama cannot build it. Some metadata that do not fit end the process.
    """
    if path.exists():
        return path
    start()
    base = ggml_base()
    meta, file = base.gguf_init_empty(), base.gguf_init_empty()
    own = {f"{name.partition('+')[0]}.{key}": value for key, value in (more or {}).items()}
    for key, value in {**metadata(name, n_layer, n_mtp, sizes), **own}.items():
        if isinstance(value, np.ndarray):
            base.gguf_set_arr_data(meta, key.encode(), 10, value.ctypes.data, value.size)
        else:
            set_value(meta, key, value)
    base.gguf_set_kv(file, meta)
    known: set[str] = set()

    def fill(tensor: int, _: int) -> None:
        tensor_name = base.ggml_get_name(tensor).decode()
        n, n_bytes = base.ggml_nelements(tensor), base.ggml_nbytes(tensor)
        data = weights_of(tensor_name, n, base.ggml_nrows(tensor), seed, 1.0)
        if name.startswith("gemma4") and tensor_name.endswith("attn_q_norm.weight"):
            data /= 30  # it does not scale scores otherwise, and large ones make every rounding matter
        data = change(tensor_name, data)
        raw = data if n_bytes == data.nbytes else data.astype(np.float16)
        base.ggml_backend_tensor_set(tensor, raw.ctypes.data, 0, n_bytes)
        # scales of NVFP4 weights: optional, and at random values they switch layers off
        if tensor_name not in known and not re.search(r"(?<!gate_inp)\.(scale|input_scale)$", tensor_name):
            known.add(tensor_name)
            base.gguf_add_tensor(file, tensor)

    callback = llama_cpp.llama_model_set_tensor_data_t(fill)
    params = llama_cpp.llama_model_default_params()
    params.use_extra_bufts = False
    params.load_mtp = n_mtp > 0
    built = llama_cpp.llama_model_init_from_user(meta, callback, None, params)
    base.gguf_free(meta)
    if built is None:
        raise RuntimeError(f"libllama cannot build {name}")
    base.gguf_write_to_file(file, str(path).encode(), False)
    base.gguf_free(file)
    llama_cpp.llama_model_free(built)
    return path


def metadata(
    name: str, n_layer: int | None = None, n_mtp: int = 0, sizes: Sizes = Sizes()
) -> dict[str, Value | NDArray[np.uint64]]:
    """Of a model of this name, see `write`."""
    arch, _, more = name.partition("+")
    n_layer = (n_layer or _LAYERS.get(arch, 2)) + n_mtp
    n_vocab = _LARGE_VOCABULARY.get(arch, N_VOCAB_TEST)
    n_kv = 1 if arch in _LATENT else sizes.n_head
    heads: Value = sizes.n_head
    kv_heads: Value = n_kv
    if arch in _EVEN_ATTENTION:
        heads = [0 if i == 1 else sizes.n_head for i in range(n_layer)]
        kv_heads = [0 if i == 1 else n_kv for i in range(n_layer)]
    if arch in _RWKV:
        heads = kv_heads = 0
    of_arch: dict[str, Value | NDArray[np.uint64]] = {
        "vocab_size": n_vocab,
        "context_length": 1024,
        "embedding_length": sizes.width,
        "features_length": sizes.width,
        "block_count": n_layer,
        "leading_dense_block_count": 1,
        "feed_forward_length": sizes.n_ff,
        "attention.head_count": sizes.n_head if arch == "glm5-next" else heads,
        "attention.head_count_kv": kv_heads,
        "attention.layer_norm_epsilon": 1e-5,
        "attention.layer_norm_rms_epsilon": 1e-5,
        "attention.group_norm_epsilon": 1e-5,
        "attention.group_norm_groups": 8,
        "attention.max_alibi_bias": 8.0,
        "attention.clamp_kqv": 1.0,
        "attention.q_lora_rank": 512,
        "attention.kv_lora_rank": 512,
        "attention.relative_buckets_count": 8,
        "attention.sliding_window": 32,
        "attention.sliding_window_pattern": [i % 2 for i in range(n_layer)] if arch in _WINDOWS else 2,
        "attention.indexer.head_count": sizes.n_indexers,
        "attention.indexer.key_length": 128,
        "attention.indexer.top_k": 131072,  # selects all: nothing depends on near-ties
        "attention.indexer.block_size": 4,
        "attention.indexer.kpool": 4,
        "attention.indexer.kpool_select_tail": True,
        "attention.indexer.local_blocks": 1,
        "rope.dimension_sections": [HEAD // 4] * 4,
        "use_parallel_residual": False,
        "logit_scale": 1.0,
        "time_mix_extra_dim": 64,
        "time_decay_extra_dim": 128,
        "full_attention_interval": 2,
        "ssm.inner_size": 1024 if arch in _DELTA_NET else 2 * sizes.width,
        "ssm.conv_kernel": 4,
        "ssm.state_size": 128,
        # ggml's meta device cuts the states of delta nets at powers of two only
        "ssm.time_step_rank": 8 if arch in _DELTA_NET else sizes.n_head,
        "ssm.group_count": {"plamo2": 0}.get(arch, 4 if arch in _DELTA_NET else 2),
        "kda.head_dim": 128,
        "kda.safe_gate": True,
        "kda.gate_lower_bound": -5.0,
        "wkv.head_size": HEAD,
        "shortconv.l_cache": 3,
        "residual_scale": 3.5565588200778455,
        "attn_res.block_size": 12,
        "activation.situ_beta": 4.0,
        "activation.situ_linear_beta": 25.0,
        "posnet.embedding_length": sizes.width,
        "posnet.block_count": n_layer,
        "convnext.embedding_length": sizes.width,
        "convnext.block_count": n_layer,
    }
    if arch in _MOE or more:
        of_arch |= {
            "expert_feed_forward_length": sizes.n_ff,
            "expert_shared_feed_forward_length": 512,
            "expert_latent_length": sizes.n_ff,
            "interleave_moe_layer_step": 2,
            "expert_count": sizes.n_experts,
            "expert_used_count": 2,
            "expert_shared_count": 1,
            "expert_gating_func": 2,
            "expert_group_scale": 1.0,
            "experts_per_group": 1,
        }
    if arch in _LATENT:
        of_arch |= {
            "attention.key_length": 576,
            "attention.value_length": 512,
            "rope.dimension_count": 64,
            "attention.key_length_mla": 192,
            "attention.value_length_mla": 128,
        }
    if arch in _DELTA_NET:
        of_arch |= {
            "attention.key_length": 256,
            "attention.value_length": 256,
            "attention.head_count_kv": sizes.n_head // 2,
        }
    of_arch |= _special(arch, n_layer, n_vocab, sizes)
    if n_mtp:
        of_arch["nextn_predict_layers"] = n_mtp
        if arch == "glm4moe":  # with them it is a model that reads images, whose MTP layers libllama cannot compute
            del of_arch["rope.dimension_sections"]
    activations = {f"xielu.{key}": value for key, value in _XIELU.items()}
    vocabulary: dict[str, Value] = {
        "tokenizer.ggml.model": "test",
        "tokenizer.ggml.tokens": [f"tok_{i}" for i in range(n_vocab)],
        "tokenizer.ggml.scores": [0.0] * n_vocab,
    }
    return {"general.architecture": arch, **{f"{arch}.{k}": v for k, v in of_arch.items()}, **activations, **vocabulary}


_XIELU = {"alpha_n": 1.0, "alpha_p": 1.0, "beta": 1.0, "eps": 1e-7}
_HYPER: dict[str, Value] = {
    "hyper_connection.count": 4,
    "hyper_connection.sinkhorn_iterations": 2,
    "hyper_connection.epsilon": 1e-6,
}


def _special(arch: str, n_layer: int, n_vocab: int, sizes: Sizes) -> dict[str, Value | NDArray[np.uint64]]:
    """What one architecture wants otherwise."""
    other_layers = [i % 2 for i in range(n_layer)]
    own_indexers: Value = [1 - each for each in other_layers]
    match arch:
        case "qwen3" | "muse-glimmer" | "afmoe":
            return {"attention.head_count_kv": sizes.n_head // 2}
        case "minimax-m3":
            return {"rope.dimension_count": 64, "attention.indexer.head_count": sizes.n_head}
        case "nemotron_h" | "nemotron_h_moe":
            return {"feed_forward_length": [0, 0, *[sizes.n_ff] * (n_layer - 2)]}
        case "rwkv7" | "arwkv7":
            ranks = ("decay", "iclr", "value_residual_mix", "gate")
            more: dict[str, Value] = {"token_shift_count": 1} if arch == "arwkv7" else {}
            return {**{f"attention.{rank}_lora_rank": 64 for rank in ranks}, **more}
        case "rwkv6qwen2":
            return {"token_shift_count": 1}
        case "gemma4":
            return {
                "embedding_length_per_layer_input": 256,
                "attention.shared_kv_layers": 0,
                "attention.key_length_swa": HEAD,
                "attention.value_length_swa": HEAD,
                "rope.freq_base_swa": 1e4,
                "attention.sliding_window_pattern": [1, 1, 1, 1, 0],
            }
        case "gemma3n":
            return {"embedding_length": 256, "attention.head_count": 2, "attention.head_count_kv": 2}
        case "deepseek4":
            return {
                **_HYPER,
                "attention.head_count": 8,
                "attention.head_count_kv": 1,
                "attention.key_length": 64,
                "attention.value_length": 64,
                "rope.dimension_count": 32,
                "attention.q_lora_rank": 256,
                "attention.output_group_count": 8,
                "attention.output_lora_rank": 256,
                "attention.compress_ratios": [0, 0, 4, 128],
                "attention.compress_rope_freq_base": 160000.0,
                "hash_layer_count": 0,
                "swiglu_clamp_exp": 10.0,
                "expert_weights_scale": 1.0,
                "expert_weights_norm": True,
                "expert_gating_func": 4,
            }
        case "bailingmoe3":
            return {
                "rope.dimension_sections": [8, 12, 12, 0],
                "swiglu_clamp_exp": [0.0, *[4.0] * (n_layer - 1)],
                "swiglu_clamp_shexp": [0.0, *[5.0] * (n_layer - 1)],
            }
        case "dots3note":
            return {
                "attention.kv_lora_rank_swa": 512,
                "attention.key_length_swa": 576,
                "attention.value_length_swa": 512,
                "attention.key_length_mla_swa": 192,
                "attention.value_length_mla_swa": 128,
                "rope.freq_base_swa": 1e4,
                "attention.indexer.types": own_indexers,
            }
        case "hy_v4":
            return {
                "hyper_connection.count": 4,
                "hyper_connection.epsilon": 1e-6,
                "hyper_connection.magnitude": 2.0,
                "swiglu_clamp_exp": 10.0,
                "expert_weights_scale": 1.0,
                "expert_weights_norm": True,
                "attention.indexer.types": own_indexers,
            }
        case "qwen4exp" | "glm5-next":
            n_grams = 4
            return {
                **_HYPER,
                "hyper_connection.low_rank": 8,
                "attention.compress_ratios": [4] * n_layer,
                "ple.layers": [0],
                "ple.ngram_size": 3,
                "ple.heads_per_ngram": 2,
                "ple.conv_kernel": 4,
                "ple.eos_token_id": 0,
                "embedding_length_per_layer_input": sizes.width // n_grams,
                "ple.layer_multipliers": np.array([1, 3, 5], np.uint64),
                "ple.head_offsets": np.arange(n_grams, dtype=np.uint64) * np.uint64(n_vocab),
                "ple.head_vocab_sizes": np.full(n_grams, n_vocab, np.uint64),
                **({"attention.indexer.key_length": 256} if arch == "qwen4exp" else {}),
                **({"attention.key_length": 512, "rope.dimension_count": 0} if arch == "glm5-next" else {}),
            }
        case "hrm_text":
            return {"hrm.layers_per_stack": 1, "hrm.h_cycles": 2, "hrm.l_cycles": 2}
        case "maple":
            return {"swiglu_clamp_exp": 7.0}
        case _:
            return {}
