"""libllama alone, through llama_cpp's low-level API: what ggpipe's stages and sessions are compared with.

    reference = Reference(path, n_ctx=256)
    logits = reference.decode(run)                     # as a pipeline of stages takes it
    tokens = reference.generate(prompt, SamplingConfig(temp=0), 100)   # as llama.cpp's own programs do it

No device, no loader hook and no parameter of ours is in here: settings are libllama's own fields. With
`exact`, the context's CPU backend computes with reference kernels. libllama has no parameter for that, so
the CPU device's `init_backend` is replaced while the context is made.
"""

import contextlib
import ctypes
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggpipe.config.sampling import SamplingConfig
from ggpipe.core.messages import KvKind, KvOp, LogitsKind, LogitsRequest, Row, Run
from ggpipe.llama.libllama import lib, start
from support.common_sampler import common_chain

Logits = NDArray[np.float32]
Fields = Mapping[str, object]

_CPU = 0  # ggml_backend_dev_type
_INIT_BACKEND = 5  # its place in ggml_backend_device_i, which a ggml_backend_device starts with


def run_of(
    id: int,
    tokens: Sequence[int],
    pos: int,
    seqs: tuple[int, ...] = (0,),
    ops: tuple[KvOp, ...] = (),
) -> Run:
    """A run of consecutive tokens from position `pos`; all logits of every row are wanted."""
    rows = tuple(
        Row(token=int(token), pos=pos + i, seqs=seqs, request=0, logits_request=0) for i, token in enumerate(tokens)
    )
    return Run(id=id, rows=rows, ops=ops, logits_requests=(LogitsRequest(LogitsKind.FULL),))


class Reference:
    """One model and one context of libllama, alone."""

    def __init__(
        self,
        path: Path,
        n_ctx: int,
        threads: int = 1,
        exact: bool = False,
        *,
        n_batch: int = 2048,
        n_ubatch: int = 512,
        model: Fields | None = None,
        context: Fields | None = None,
        loras: Sequence[tuple[Path, float]] = (),
    ) -> None:
        """`model`, `context`: further fields of llama_model_params and llama_context_params."""
        start()
        self._model: Any = lib.llama_model_load_from_file(
            os.fsencode(path), _filled(lib.llama_model_default_params(), model or {})
        )
        assert self._model, f"libllama cannot load {path}"
        fields = {
            "n_ctx": n_ctx,
            "n_batch": n_batch,
            "n_ubatch": n_ubatch,
            "n_threads": threads,
            "n_threads_batch": threads,
            **(context or {}),
        }
        params = _filled(lib.llama_context_default_params(), fields)
        with reference_kernels() if exact else contextlib.nullcontext():
            self._context: Any = lib.llama_init_from_model(self._model, params)
        assert self._context, f"libllama cannot make a context of {path}"
        self.n_batch = int(lib.llama_n_batch(self._context))
        adapters = [lib.llama_adapter_lora_init(self._model, os.fsencode(lora)) for lora, _ in loras]
        assert all(adapters), "libllama cannot load an adapter"
        if adapters:
            n = len(adapters)
            scales = (ctypes.c_float * n)(*(scale for _, scale in loras))
            pointers = (lib.llama_adapter_lora_p_ctypes * n)(*adapters)
            assert lib.llama_set_adapters_lora(self._context, pointers, n, scales) == 0
        self._memory = lib.llama_get_memory(self._context)
        self._vocab = lib.llama_model_get_vocab(self._model)
        self.n_vocab = int(lib.llama_vocab_n_tokens(self._vocab))

    def decode(self, run: Run) -> Logits:
        """The run's operations, then one batch of its rows: logits of the wanted rows, (rows, vocabulary)."""
        for op in run.ops:
            self.apply(op)
        n_seq = max(len(row.seqs) for row in run.rows)
        batch = lib.llama_batch_init(len(run.rows), 0, n_seq)
        batch.n_tokens = len(run.rows)
        for i, row in enumerate(run.rows):
            batch.token[i], batch.pos[i], batch.logits[i] = row.token, row.pos, row.logits_request >= 0
            batch.n_seq_id[i] = len(row.seqs)
            for j, seq in enumerate(row.seqs):
                batch.seq_id[i][j] = seq
        status = lib.llama_decode(self._context, batch)
        lib.llama_batch_free(batch)
        assert status == 0, f"llama_decode returns {status}"
        return np.array([self._row(i) for i, row in enumerate(run.rows) if row.logits_request >= 0])

    def hidden(self, run: Run) -> Logits:
        """As `decode`: the last hidden states of the wanted rows, (rows, width)."""
        lib.llama_set_embeddings(self._context, True)
        self.decode(run)
        lib.llama_set_embeddings(self._context, False)
        width = (int(lib.llama_model_n_embd_out(self._model)),)
        wanted = [i for i, row in enumerate(run.rows) if row.logits_request >= 0]
        pointers = [lib.llama_get_embeddings_ith(self._context, i) for i in wanted]
        return np.array([np.ctypeslib.as_array(pointer, width) for pointer in pointers])

    def apply(self, op: KvOp) -> bool:
        """One operation on the KV cells; False where libllama cannot do it."""
        match op.kind:
            case KvKind.RM:
                return bool(lib.llama_memory_seq_rm(self._memory, op.seq, op.p0, op.p1))
            case KvKind.CP:
                lib.llama_memory_seq_cp(self._memory, op.seq, op.dst, op.p0, op.p1)
        return True

    def tokenize(self, text: str) -> tuple[int, ...]:
        """As llama.cpp's programs do it."""
        data = text.encode()
        tokens = (ctypes.c_int32 * (len(data) + 16))()
        n = lib.llama_tokenize(self._vocab, data, len(data), tokens, len(tokens), True, True)
        return tuple(tokens[:n])

    def generate(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        n_predict: int,
        seen: list[Logits] | None = None,
        n_rows: int | None = None,
    ) -> list[int]:
        """At most `n_predict` tokens, without the one that ends the text. Clears the KV cells first.

        `seen` gets the row of logits that each token was drawn from. `n_rows`: tokens of the prompt that are computed
        together, at most; None: `n_ubatch`.
        """
        lib.llama_memory_clear(self._memory, True)
        chain = common_chain(sampling, self._vocab, lib.llama_n_ctx(self._context))
        for token in prompt:
            lib.llama_sampler_accept(chain, token)
        for at in range(0, len(prompt), self.n_batch):
            batch = prompt[at : at + self.n_batch]
            step = n_rows or len(batch)  # libllama cuts each batch into pieces of n_ubatch
            for first in range(0, len(batch), step):
                self._decode_next(batch[first : first + step])
        tokens: list[int] = []
        while len(tokens) < n_predict:
            if seen is not None:
                seen.append(self._row(-1))
            token = int(lib.llama_sampler_sample(chain, self._context, -1))  # accepts it, too
            if lib.llama_vocab_is_eog(self._vocab, token):
                break
            tokens.append(token)
            if len(tokens) < n_predict:
                self._decode_next((token,))
        lib.llama_sampler_free(chain)
        return tokens

    def _decode_next(self, tokens: Sequence[int]) -> None:
        array = (lib.llama_token * len(tokens))(*tokens)
        status = lib.llama_decode(self._context, lib.llama_batch_get_one(array, len(tokens)))
        assert status == 0, f"llama_decode returns {status}"

    def _row(self, i: int) -> Logits:
        return np.ctypeslib.as_array(lib.llama_get_logits_ith(self._context, i), (self.n_vocab,)).copy()

    def close(self) -> None:
        """Free it. A second call does nothing."""
        if self._context:
            lib.llama_free(self._context)
        if self._model:
            lib.llama_model_free(self._model)
        self._context = self._model = None

    def __enter__(self) -> "Reference":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def overrides(*items: tuple[str, int | float | bool | str]) -> Any:
    """A value for llama_model_params.kv_overrides; keep it as long as the model is loaded."""
    array = (lib.llama_model_kv_override * (len(items) + 1))()
    for entry, (key, value) in zip(array, items, strict=False):
        entry.key = key.encode()
        if isinstance(value, bool):
            entry.tag, entry.value.val_bool = 2, value
        elif isinstance(value, int):
            entry.tag, entry.value.val_i64 = 0, value
        elif isinstance(value, float):
            entry.tag, entry.value.val_f64 = 1, value
        else:
            entry.tag, entry.value.val_str = 3, value.encode()
    return array


@contextlib.contextmanager
def reference_kernels() -> Iterator[None]:
    """CPU backends that are made inside use ggml's reference kernels."""
    library = ggml()
    device = library.ggml_backend_dev_by_type(_CPU)
    registry = library.ggml_backend_dev_backend_reg(device)
    address = library.ggml_backend_reg_get_proc_address(registry, b"ggml_backend_cpu_set_use_ref")
    use_reference = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_bool)(address)
    init_type = ctypes.CFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_char_p)
    table = ctypes.cast(device, ctypes.POINTER(ctypes.c_void_p))
    original = table[_INIT_BACKEND]
    init = init_type(original)
    made = 0

    def init_reference(dev: int, params: bytes | None) -> Any:
        nonlocal made
        backend = init(dev, params)
        use_reference(backend, True)
        made += 1
        return backend

    callback = init_type(init_reference)
    table[_INIT_BACKEND] = ctypes.cast(callback, ctypes.c_void_p).value
    try:
        yield
    finally:
        table[_INIT_BACKEND] = original
    assert made > 0, "no CPU backend was made"


@cache
def ggml() -> ctypes.CDLL:
    """libggml and libggml-base, the copies that llama_cpp mapped."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    (path,) = {line.split(maxsplit=5)[5] for line in lines if "libggml.so" in line}
    library = ctypes.CDLL(path)
    pointer = ctypes.c_void_p
    for name, arguments in (
        ("ggml_backend_dev_by_type", [ctypes.c_int]),
        ("ggml_backend_dev_backend_reg", [pointer]),
        ("ggml_backend_reg_get_proc_address", [pointer, ctypes.c_char_p]),
    ):
        function: Callable[..., Any] = getattr(library, name)
        function.restype, function.argtypes = pointer, arguments  # type: ignore[attr-defined]
    return library


def _filled(params: Any, fields: Fields) -> Any:
    for name, value in fields.items():
        getattr(params, name)  # a typing error would set an attribute that nobody reads
        setattr(params, name, value)
    return params
