"""Inputs of a target's layers: the hidden states that draft heads read (`eagle3`), and MTP layers (`mtp`).

libllama hands them out by functions of its llama-ext.h, for some architectures only: for others it ends the process
when one is asked for.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggpipe.errors import LaunchError
from ggpipe.llama.libllama import lib

ARCHITECTURES = frozenset(
    """
    bailingmoe3 deepseek4 gemma4 gpt-oss hunyuan-dense hunyuan_vl lfm2 lfm2moe llama mimo2 minimax-m2 muse-glimmer
    nanbeige nemotron_h nemotron_h_moe qwen3 qwen35 qwen35moe qwen3moe qwen3next
    """.split()  # noqa: SIM905
)
"""Those for which libllama hands out the inputs of layers, and whose memories can roll back, or be taken back."""
WITH_OUTPUT = frozenset(["deepseek4", "mimo2", "nemotron_h", "nemotron_h_moe"])
"""Those of them for which it also hands out the last layer's output, under the number of layers."""

_FLOATS = ctypes.POINTER(ctypes.c_float)


def extension(name: str, result: Any, *arguments: Any) -> Any:
    """A function of llama-ext.h by its name in C++ (it is exported under its mangled name only), with the types of its
    result and its arguments. Raises LaunchError where this libllama does not have it."""
    try:
        function = getattr(lib._lib, name)
    except AttributeError as e:
        raise LaunchError(
            "this libllama has no functions for draft heads: install the llama-cpp-python that ggpipe asks for"
        ) from e
    function.restype, function.argtypes = result, arguments
    return function


class LayerInputs:
    """Inputs of some layers, as the contexts of a stage compute them in each run."""

    def __init__(
        self, contexts: Sequence[Any], layers: Sequence[int], width: int, last_width: int, n_layer: int
    ) -> None:
        """Has the contexts keep them from now on; an architecture that is not in `ARCHITECTURES` ends the process in
        the next run. `layers`: those whose inputs are computed, or come in, on this stage. `width`: of a state, in
        numbers; `last_width`: of one that MTP layers read. `n_layer`: layers of the model, without MTP layers.
        """
        self.layers = tuple(layers)
        self._width, self._last_width, self._of_mtp = width, last_width, input_of_mtp(n_layer)
        keep = extension(
            "_Z30llama_set_embeddings_layer_inpP13llama_contextjb",
            None,
            ctypes.c_void_p,
            ctypes.c_uint32,
            ctypes.c_bool,
        )
        self._get = extension(
            "_Z30llama_get_embeddings_layer_inpP13llama_contextj", _FLOATS, ctypes.c_void_p, ctypes.c_uint32
        )
        self._last_states: dict[Any, LastStates] = {}
        for context in contexts:
            if self._of_mtp in self.layers:
                self._last_states[context] = LastStates(context, of_all_rows=True)
            for layer in self.layers:
                if layer != self._of_mtp:
                    keep(context, layer, True)

    def of_run(self, context: Any, n_rows: int) -> tuple[NDArray[np.float32], ...]:
        """For each layer, the states of the rows of a context's last run, (n_rows, width): copies."""
        return tuple(
            self._last_states[context].of_run(n_rows, self._last_width)
            if layer == self._of_mtp
            else np.ctypeslib.as_array(self._get(context, layer), (n_rows, self._width)).copy()
            for layer in self.layers
        )


class LastStates:
    """States that a context's last layer gives, for MTP layers or for drafting on."""

    def __init__(self, context: Any, of_all_rows: bool) -> None:
        """Has the context keep them from now on. `of_all_rows`: otherwise of rows that give logits."""
        keep = extension(
            "_Z26llama_set_embeddings_nextnP13llama_contextbb", None, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool
        )
        keep(context, True, not of_all_rows)
        self._context = context
        self._get = extension("_Z26llama_get_embeddings_nextnP13llama_context", _FLOATS, ctypes.c_void_p)

    def of_run(self, n_rows: int, width: int) -> NDArray[np.float32]:
        """The states of the last run's rows, (n_rows, width): a copy."""
        return np.ctypeslib.as_array(self._get(self._context), (n_rows, width)).copy()


def input_of_mtp(n_layer: int) -> int:
    """The number that stands for the states that MTP layers read, among the layers of a model with `n_layer` others.
    What these compute has the number `n_layer`; that may still be normalized."""
    return n_layer + 1


def own_layers(wanted: Sequence[int], layers: tuple[int, int], n_layer: int) -> tuple[int, ...]:
    """Which of the wanted inputs a stage of layers [first, last) has: what its layers compute, so that each belongs to
    one stage, and on the first stage the embeddings. `n_layer`: as for `input_of_mtp`."""
    first, last = layers
    return tuple(layer for layer in wanted if first < min(layer, n_layer) <= last or layer == first == 0)
