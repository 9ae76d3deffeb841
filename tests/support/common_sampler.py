"""llama.cpp's `common_sampler_init` (common/sampling.cpp), line by line, through llama_cpp."""

from __future__ import annotations

import ctypes
import math
from typing import Any

from ggpipe.config.sampling import SamplingConfig
from ggpipe.llama.libllama import lib


def common_chain(config: SamplingConfig, vocab: Any, n_ctx: int) -> Any:
    """The chain that llama.cpp's own programs draw with; to be freed. `vocab`: libllama's."""
    n_vocab = lib.llama_vocab_n_tokens(vocab)
    chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
    for sampler in (*_bias(config, vocab, n_vocab), *_rest(config, vocab, n_vocab, n_ctx)):
        lib.llama_sampler_chain_add(chain, sampler)
    return chain


def _bias(config: SamplingConfig, vocab: Any, n_vocab: int) -> list[Any]:
    biases = list(config.logit_bias)
    if config.ignore_eos:
        biases += [(token, -math.inf) for token in range(n_vocab) if lib.llama_vocab_is_eog(vocab, token)]
    n = ctypes.c_int32()
    suppressed = lib.llama_vocab_get_suppress_tokens(vocab, ctypes.byref(n))
    biases += [(suppressed[i], -math.inf) for i in range(n.value)]
    if not biases:
        return []
    array = (lib.llama_logit_bias * len(biases))(*(lib.llama_logit_bias(*bias) for bias in biases))
    return [lib.llama_sampler_init_logit_bias(n_vocab, len(biases), array)]


def _rest(config: SamplingConfig, vocab: Any, n_vocab: int, n_ctx: int) -> list[Any]:
    c, min_keep, seed = config, config.min_keep, max(config.seed, 0)
    if c.mirostat == 1:
        return [
            lib.llama_sampler_init_temp(c.temp),
            lib.llama_sampler_init_mirostat(n_vocab, seed, c.mirostat_tau, c.mirostat_eta, 100),
        ]
    if c.mirostat == 2:
        return [
            lib.llama_sampler_init_temp(c.temp),
            lib.llama_sampler_init_mirostat_v2(seed, c.mirostat_tau, c.mirostat_eta),
        ]
    breakers = [text.encode() for text in c.dry_sequence_breakers]
    texts = (ctypes.c_char_p * len(breakers))(*breakers)
    penalties = (c.repeat_penalty, c.frequency_penalty, c.presence_penalty)
    last_n = n_ctx if c.repeat_last_n == -1 else c.repeat_last_n
    dry_n = n_ctx if c.dry_penalty_last_n == -1 else c.dry_penalty_last_n
    dry = (c.dry_multiplier, c.dry_base, c.dry_allowed_length, dry_n, texts, len(breakers))
    make = {
        "penalties": lambda: lib.llama_sampler_init_penalties(n_vocab, last_n, *penalties),
        "dry": lambda: lib.llama_sampler_init_dry(vocab, *dry),
        "top_n_sigma": lambda: lib.llama_sampler_init_top_n_sigma(c.top_n_sigma),
        "top_k": lambda: lib.llama_sampler_init_top_k(c.top_k),
        "typ_p": lambda: lib.llama_sampler_init_typical(c.typical_p, min_keep),
        "top_p": lambda: lib.llama_sampler_init_top_p(c.top_p, min_keep),
        "min_p": lambda: lib.llama_sampler_init_min_p(c.min_p, min_keep),
        "xtc": lambda: lib.llama_sampler_init_xtc(c.xtc_probability, c.xtc_threshold, min_keep, seed),
        "temperature": lambda: lib.llama_sampler_init_temp_ext(c.temp, c.dynatemp_range, c.dynatemp_exponent),
        "infill": lambda: lib.llama_sampler_init_infill(vocab),
    }
    samplers = [make[name]() for name in c.samplers if name != "adaptive_p"]
    if "adaptive_p" in c.samplers:
        return [*samplers, lib.llama_sampler_init_adaptive_p(c.adaptive_target, c.adaptive_decay, seed)]
    return [*samplers, lib.llama_sampler_init_dist(seed)]
