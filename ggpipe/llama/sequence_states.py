"""States of a context's sequences, for prompt caches on disk."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggpipe.errors import RunError
from ggpipe.llama.libllama import last_error, lib, logged_errors

_MOST_TOKENS = 128
"""Maximum number of tokens per state. Large models have megabytes per token."""


class SequenceStates:
    """Reads and writes the states of sequences, as libllama has them. Layers of other ranks are zeros."""

    def __init__(self, context: Any, n_swa: int, spare: int | None, ids: Callable[[int], Sequence[int]]) -> None:
        """`n_swa`: the model's sliding window in tokens, 0 without one. `spare`: a sequence id that nothing else uses;
        None: only a whole sequence has a state. `ids`: a sequence's ids in libllama."""
        self._context = context
        self._memory = lib.llama_get_memory(context)
        self._n_swa = n_swa
        self._spare = spare
        self._ids = ids

    @property
    def most_tokens(self) -> int | None:
        """Maximum number of tokens in a state; None: only a whole sequence has a state.

        libllama leaves out what a sliding window hides at the end of the state: this many tokens see each other.
        """
        if self._spare is None:
            return None
        most = max(self._n_swa // 2, 1) if self._n_swa > 0 else _MOST_TOKENS
        return min(1 << (most.bit_length() - 1), _MOST_TOKENS)

    def read(self, seq: int, first: int, end: int) -> NDArray[np.uint8]:
        """The state of tokens [first, end) of a sequence, in the order of its KV cells. Raises RunError when libllama
        cannot write it."""
        source = seq
        if self._spare is not None:
            source = self._spare
            lib.llama_memory_seq_cp(self._memory, seq, source, first, end)
        logged_errors()
        state = np.zeros(int(lib.llama_state_seq_get_size(self._context, source)), np.uint8)
        n = int(lib.llama_state_seq_get_data(self._context, _bytes_of(state), state.size, source))
        if source != seq:
            lib.llama_memory_seq_rm(self._memory, source, -1, -1)
        if n != state.size:
            raise RunError(f"libllama cannot save the state of a sequence: {last_error()}")
        return state

    def append(self, state: NDArray[np.uint8], seq: int) -> None:
        """Append the result of `read` to a sequence. Raises RunError if libllama cannot read it."""
        target = self._spare if self._spare is not None else seq
        logged_errors()
        if int(lib.llama_state_seq_set_data(self._context, _bytes_of(state), state.size, target)) != state.size:
            raise RunError(f"libllama cannot restore the state of a sequence: {last_error()}")
        if target != seq:
            for own in self._ids(seq):
                lib.llama_memory_seq_cp(self._memory, target, own, -1, -1)
            lib.llama_memory_seq_rm(self._memory, target, -1, -1)


def _bytes_of(array: NDArray[np.uint8]) -> Any:
    return array.ctypes.data_as(ctypes.POINTER(ctypes.c_uint8))
