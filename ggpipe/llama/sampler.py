"""llama.cpp's sampler chain, fed with what the last rank sends instead of whole rows of logits."""

from __future__ import annotations

import collections
import ctypes
import secrets
from collections.abc import Iterable
from typing import Any

import numpy as np

from ggpipe.config import SamplingConfig
from ggpipe.core.messages import RowLogits, Want, WantKind
from ggpipe.llama.libllama import lib
from ggpipe.llama.vocab import Vocab

_CANDIDATE = np.dtype([("id", "<i4"), ("logit", "<f4"), ("p", "<f4")])  # llama_token_data


class Sampler:
    """Draws one request's tokens: penalties, top-k, top-p, min-p, temperature, draw; llama.cpp's order."""

    def __init__(self, config: SamplingConfig, vocab: Vocab, n_ctx: int) -> None:
        self._config = config
        self._n_vocab = vocab.n_tokens
        ends = vocab.end_tokens if config.ignore_eos else ()
        self.banned = tuple(sorted({*vocab.suppressed_tokens, *ends}))
        """Tokens that are never drawn."""
        self.seed = config.seed if config.seed >= 0 else secrets.randbelow(2**32 - 1)
        last_n = config.repeat_last_n if config.repeat_last_n >= 0 else n_ctx
        self._window: collections.deque[int] = collections.deque(maxlen=last_n)
        self._chain: Any = None
        if not (config.greedy and not config.penalizes):
            self._chain = lib.llama_sampler_chain_init(lib.llama_sampler_chain_default_params())
            for sampler in (
                lib.llama_sampler_init_penalties(
                    self._n_vocab,
                    last_n,
                    config.repeat_penalty,
                    config.frequency_penalty,
                    config.presence_penalty,
                ),
                lib.llama_sampler_init_top_k(config.top_k),
                lib.llama_sampler_init_top_p(config.top_p, 0),
                lib.llama_sampler_init_min_p(config.min_p, 0),
                lib.llama_sampler_init_temp_ext(config.temp, 0.0, 1.0),
                lib.llama_sampler_init_dist(self.seed),
            ):
                lib.llama_sampler_chain_add(self._chain, sampler)

    def want(self) -> Want:
        """What drawing the next token takes.

        A penalty that only lowers leaves the best k among the best k + (tokens it may lower).
        """
        config = self._config
        lowered = len(set(self._window)) if config.penalizes else 0
        n = lowered + (1 if config.greedy else config.top_k)
        if (config.penalizes and not config.only_lowers) or (not config.greedy and config.top_k <= 0):
            n = self._n_vocab
        if n >= self._n_vocab:
            return Want(WantKind.FULL, banned=self.banned)
        return Want(WantKind.TOP, n, self.banned)

    def sample(self, row: RowLogits) -> int:
        """Draw from a row that was asked for by `want`."""
        if self._chain is None and row.ids is not None:
            return row.ids[0]
        logits = np.asarray(row.logits, np.float32)
        if self._chain is None:
            return int(logits.argmax())
        candidates = np.zeros(len(logits), _CANDIDATE)
        candidates["id"] = np.arange(len(logits)) if row.ids is None else row.ids
        candidates["logit"] = logits
        array = lib.llama_token_data_array(
            ctypes.cast(candidates.ctypes.data, ctypes.POINTER(lib.llama_token_data)), len(logits), -1, False
        )
        lib.llama_sampler_apply(self._chain, ctypes.byref(array))
        return int(array.data[array.selected].id)

    def accept(self, tokens: Iterable[int]) -> None:
        """Tokens of the prompt, or drawn ones: penalties look back on them."""
        for token in tokens:
            self._window.append(token)
            if self._chain is not None:
                lib.llama_sampler_accept(self._chain, token)

    def resume(self, tokens: Iterable[int]) -> None:
        """Tokens that another process drew with the same seed: go on as if they were drawn here.

        What this chain remembers follows from the tokens and the number of draws. Each draw takes one random number,
        whatever the logits are.
        """
        for token in tokens:
            self.sample(RowLogits(0, (token,), (0.0,), 0.0))
            self.accept((token,))

    def close(self) -> None:
        """Free the chain. A second call does nothing."""
        if self._chain is not None:
            lib.llama_sampler_free(self._chain)
        self._chain = None
