"""An EAGLE-3 head as llama.cpp's own `draft-eagle3` uses it (common/speculative.cpp), over whole models of libllama."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

from ggpipe.llama.layer_inputs import LayerInputs, extension
from ggpipe.llama.libllama import lib, start
from support.reference import reference_kernels

States = NDArray[np.float32]
_FLOATS = ctypes.POINTER(ctypes.c_float)
_INTS = ctypes.POINTER(ctypes.c_int32)


class Whole:
    """A whole model and a context of one sequence."""

    def __init__(self, path: Path, load_mtp: bool = False, mtp_of: Any = None, other: Whole | None = None) -> None:
        """`load_mtp`: with its MTP layers. `mtp_of`: the loaded model, for a context of these. `other`: the model that
        this one takes weights from which its file lacks."""
        model_params, params = lib.llama_model_default_params(), lib.llama_context_default_params()
        model_params.load_mtp = load_mtp
        self.model: Any = mtp_of or lib.llama_model_load_from_file(os.fsencode(path), model_params)
        params.ctx_type = int(mtp_of is not None)
        if other is not None:
            params.ctx_other = other.context
        params.n_ctx = params.n_batch = params.n_ubatch = 512
        params.n_threads = params.n_threads_batch = 1
        params.flash_attn_type = 1
        self.context: Any = lib.llama_init_from_model(self.model, params)
        self.memory = lib.llama_get_memory(self.context)
        self.n_embd = int(lib.llama_model_n_embd(self.model))
        self.n_embd_out = int(lib.llama_model_n_embd_out(self.model))
        self.n_vocab = int(lib.llama_vocab_n_tokens(lib.llama_model_get_vocab(self.model)))

    def compute(self, function: Any, tokens: Sequence[int], pos: int, states: States | None, outputs: bool) -> None:
        n = len(tokens) or len(states if states is not None else ())
        ids = (ctypes.c_int32 * n)(*tokens) if tokens else None
        own = (ctypes.c_int32 * 1)(0)
        embd = None if states is None else np.ascontiguousarray(states).ctypes.data_as(_FLOATS)
        batch = lib.llama_batch(
            n,
            ids,
            embd,
            (ctypes.c_int32 * (4 * n))(*[*range(pos, pos + n)] * 3),  # of several dimensions where the model has some
            (ctypes.c_int32 * n)(*[1] * n),
            (_INTS * n)(*[ctypes.cast(own, _INTS)] * n),
            ctypes.cast((ctypes.c_int8 * n)(*[outputs] * n), ctypes.POINTER(ctypes.c_int8)),
        )
        assert function(self.context, batch) == 0

    def best(self, row: int = 0) -> int:
        """The most probable token after a row of the last batch."""
        return int(self.logits(row).argmax())

    def logits(self, row: int = 0) -> States:
        """After a row of the last batch: (n_vocab,)."""
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self.context, row), (self.n_vocab,)).copy()


def inputs_of(target: Whole, head: Whole, n: int) -> LayerInputs:
    """The inputs of the target's layers, `n` of them, that a head reads."""
    layers = extension("_Z28llama_model_target_layer_idsPK11llama_model", _INTS, ctypes.c_void_p)(head.model)
    n_layer = int(lib.llama_model_n_layer(target.model))
    return LayerInputs([target.context], [int(layers[i]) for i in range(n)], target.n_embd, target.n_embd_out, n_layer)


class PlainPair:
    """A target, computed with reference kernels, and a head that reads the inputs of `n_layers` of its layers."""

    def __init__(self, target: Path, head: Path, n_layers: int) -> None:
        start()
        with reference_kernels():
            self._target = Whole(target)
        self._head = Whole(head, other=self._target)
        self._inputs = inputs_of(self._target, self._head, n_layers)


class PlainHead(PlainPair):
    """A target, and its EAGLE-3 head."""

    def __init__(self, target: Path, head: Path) -> None:
        super().__init__(target, head, 3)
        extension(
            "_Z26llama_set_embeddings_nextnP13llama_contextbb", None, ctypes.c_void_p, ctypes.c_bool, ctypes.c_bool
        )(self._head.context, True, False)
        self._states = extension("_Z26llama_get_embeddings_nextnP13llama_context", _FLOATS, ctypes.c_void_p)

    def _last_states(self, n: int) -> States:
        return np.ctypeslib.as_array(self._states(self._head.context), (n, self._head.n_embd)).copy()

    def drafts(
        self, prompt: Sequence[int], output: Sequence[int], epochs: Sequence[int], n_draft: int
    ) -> dict[int, list[int]]:
        """For each number of accepted tokens, the `n_draft` tokens that are drafted after them. `output`: accepted
        tokens. A head's context ends with the pair of the last token, and what is drafted is forgotten."""
        text, head = [*prompt, *output], self._head
        self._target.compute(lib.llama_decode, text, 0, None, outputs=False)
        states = np.hstack(self._inputs.of_run(self._target.context, len(text)))
        head.compute(lib.llama_encode, (), 0, states, outputs=True)
        encoded, drafted = self._last_states(len(text)), {}
        for epoch in epochs:
            last = len(prompt) + epoch - 1  # of the accepted tokens
            n = int(lib.llama_memory_seq_pos_max(head.memory, 0)) + 1
            head.compute(lib.llama_decode, text[n + 1 : last + 1], n, encoded[n:last], outputs=True)
            # The last row's logits, from a batch of one.
            lib.llama_memory_seq_rm(head.memory, 0, last - 1, -1)
            token, state, tokens = text[last], encoded[last - 1 : last], list[int]()
            for depth in range(n_draft):
                head.compute(lib.llama_decode, [token], last - 1 + depth, state, outputs=True)
                token, state = head.best(), self._last_states(1)
                tokens.append(token)
            lib.llama_memory_seq_rm(head.memory, 0, last, -1)
            drafted[epoch] = tokens
        return drafted


def reduced(head: Path, path: Path, drafted: range, drop: Sequence[str] = ()) -> Path:
    """Write a head that drafts these tokens only. `drop`: tensors to leave out."""
    reader = gguf.GGUFReader(head)
    writer = gguf.GGUFWriter(path, "eagle3")
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(
                key, field.contents(), field.types[0], field.types[1] if len(field.types) > 1 else None
            )
    for tensor in reader.tensors:
        if tensor.name not in drop:
            data = tensor.data[drafted] if tensor.name == "output.weight" else tensor.data
            writer.add_tensor(tensor.name, data, raw_dtype=tensor.tensor_type)
    writer.add_tensor("d2t", np.array(drafted, np.int64), raw_dtype=gguf.GGMLQuantizationType.I64)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
