"""MTP layers as llama.cpp's own `draft-mtp` uses them (common/speculative.cpp), over whole models of libllama.

`agreeing` writes models that have some.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from ggpipe.llama.layer_inputs import LastStates
from ggpipe.llama.libllama import lib, start
from support.architectures import SMALL, write
from support.eagle3 import States, Whole
from support.reference import reference_kernels
from support.zoo import N_VOCAB_TEST, weights_of

_SEED = 1


def agreeing(name: str, path: Path, n_layer: int = 2) -> Path:
    """Write a model whose MTP layer often names the target's token: that depends on the last token above all, and the
    MTP layer sees nothing else. `name`, `n_layer`: as for `write`."""
    own = f"blk.{n_layer}."

    def change(tensor: str, data: NDArray[np.float32]) -> NDArray[np.float32]:
        if tensor.endswith("eh_proj.weight"):
            return np.eye(SMALL.width, 2 * SMALL.width, dtype=np.float32).reshape(-1)  # the token's half
        if tensor.endswith((".nextn.shared_head_norm.weight", ".nextn.enorm.weight", "output_norm.weight")):
            return np.ones_like(data)
        for part, same in (("shared_head_head", "output.weight"), ("nextn.embed_tokens", "token_embd.weight")):
            if part in tensor:
                return weights_of(same, data.size, N_VOCAB_TEST, _SEED, 1.0)
        if any(part in tensor for part in ("attn_output", "down", "ssm_out")):
            return data * np.float32(0 if tensor.startswith(own) else 0.05)
        return data

    return write(name, path, _SEED, n_layer=n_layer, n_mtp=1, sizes=SMALL, change=change)


class PlainMtp:
    """A target and its MTP layers, computed from one file."""

    def __init__(self, path: Path, exact: bool = False) -> None:
        """`exact`: the target is computed with reference kernels."""
        start()
        with reference_kernels() if exact else contextlib.nullcontext():
            self._target = Whole(path, load_mtp=True)
        self._mtp = Whole(path, mtp_of=self._target.model)
        self._target_states = LastStates(self._target.context, of_all_rows=True)
        self._own_states = LastStates(self._mtp.context, of_all_rows=False)

    def target_states(self, tokens: Sequence[int]) -> States:
        """The target's states of a text: (tokens, width). It forgets the one before."""
        lib.llama_memory_clear(self._target.memory, True)
        self._target.compute(lib.llama_decode, tokens, 0, None, outputs=False)
        return self._target_states.of_run(len(tokens), self._mtp.n_embd_out)

    def drafts(
        self, prompt: Sequence[int], output: Sequence[int], epochs: Sequence[int], n_draft: int
    ) -> dict[int, list[int]]:
        """For each number of accepted tokens, the `n_draft` tokens that are drafted after them. `output`: accepted
        tokens. What is drafted is forgotten."""
        text, mtp, width = [*prompt, *output], self._mtp, self._mtp.n_embd_out
        states = self.target_states(text)
        read = np.vstack([np.zeros((1, width), np.float32), states[:-1]])
        drafted, n = dict[int, list[int]](), 0
        for epoch in epochs:
            last = len(prompt) + epoch - 1  # of the accepted tokens
            if n < last:
                mtp.compute(lib.llama_decode, text[n:last], n, read[n:last], outputs=False)
            token, state, tokens = text[last], read[last : last + 1], list[int]()
            for depth in range(n_draft):
                mtp.compute(lib.llama_decode, [token], last + depth, state, outputs=True)
                token, state = mtp.best(), self._own_states.of_run(1, width)
                tokens.append(token)
            lib.llama_memory_seq_rm(mtp.memory, 0, last, -1)
            drafted[epoch], n = tokens, last
        return drafted
