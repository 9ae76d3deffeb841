"""Our settings and the rows of a run as libllama's structs, and what comes back of the rows."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ggpipe.config.context import ContextConfig
from ggpipe.config.model import ModelConfig
from ggpipe.core.messages import LogitsKind, LogitsRequest, Row, RowLogits
from ggpipe.errors import RunError, Setting, SettingError
from ggpipe.llama.gguf import ModelFile
from ggpipe.llama.libllama import lib, native

_GGML_TYPES = {
    "f32": 0, "f16": 1, "q4_0": 2, "q4_1": 3, "q5_0": 6, "q5_1": 7, "q8_0": 8, "iq4_nl": 20, "bf16": 30,
}  # fmt: skip
_FLASH_ATTN = {"auto": -1, "off": 0, "on": 1}
_ROPE_SCALING = {"none": 0, "linear": 1, "yarn": 2}
_LOAD_MODE_NONE, _LOAD_MODE_DIRECT_IO = 0, 4
_SPLIT_MODE_LAYER = 1
_EXPERT_COUNTS = (".expert_count", ".expert_used_count")
_MOST_DIMENSIONS = 4  # of a position, in models that read images

NO_STATE = np.empty(0, np.float32)
"""Last hidden state of a model, if it is not known."""


def model_params(config: ModelConfig, keep: list[object]) -> Any:
    """`llama_model_params` without devices. What the struct points to is appended to `keep`: hold it as long."""
    params = lib.llama_model_default_params()
    params.load_mode = _LOAD_MODE_DIRECT_IO if config.load_mode == "dio" else _LOAD_MODE_NONE
    params.split_mode = _SPLIT_MODE_LAYER
    params.lazy_mode = 0
    params.n_gpu_layers = 0
    params.use_extra_bufts = config.repacks
    if config.override_kv:
        overrides = (lib.llama_model_kv_override * (len(config.override_kv) + 1))()
        for item, text in zip(overrides, config.override_kv, strict=False):
            _fill_override(item, text)
        _check_experts(config)
        keep.append(overrides)
        params.kv_overrides = overrides
    return params


def _check_experts(config: ModelConfig) -> None:
    """Raises SettingError if overridden counts of experts do not fit the model."""
    pairs = (text.partition("=")[::2] for text in config.override_kv)
    counts = {key: int(typed.removeprefix("int:")) for key, typed in pairs if key.endswith(_EXPERT_COUNTS)}
    if counts and (problem := ModelFile.open(config.path).misfit_of_experts(counts)):
        text = next(text for text in config.override_kv if text.partition("=")[0] in counts)
        raise SettingError("override_kv", text, problem)


def _fill_override(item: Any, text: str) -> None:
    key, eq, typed = text.partition("=")
    kind, colon, value = typed.partition(":")
    try:
        if not (key and eq and colon) or len(key) > 127 or len(value) > 127:
            raise ValueError
        item.key = key.encode()
        match kind:
            case "int":
                item.tag, item.value.val_i64 = 0, int(value)
            case "float":
                item.tag, item.value.val_f64 = 1, float(value)
            case "bool":
                item.tag, item.value.val_bool = 2, {"true": True, "false": False}[value]
            case "str":
                item.tag, item.value.val_str = 3, value.encode()
            case _:
                raise ValueError
    except (ValueError, KeyError) as e:
        raise SettingError("override_kv", text, "write KEY=TYPE:VALUE with TYPE int, float, bool or str") from e


def place_layers(params: Any, counts: list[tuple[int, int]], keep: list[object]) -> None:
    """Give the model's layers, the output layer last, to devices: (address, number of layers) in order."""
    placed = [(device, n) for device, n in counts if n > 0]
    devices = (ctypes.c_void_p * (len(placed) + 1))(*(d for d, _ in placed), None)
    split = (ctypes.c_float * lib.llama_max_devices())(*(float(n) for _, n in placed))
    keep += [devices, split]
    params.devices = ctypes.cast(devices, ctypes.c_void_p)
    params.tensor_split = split
    params.n_gpu_layers = sum(n for _, n in placed)


def context_params(config: ContextConfig, threads: int, threads_batch: int) -> Any:
    """`llama_context_params` for a stage: unified KV cells, full-size sliding windows, so that rollback works."""
    params = lib.llama_context_default_params()
    params.n_ctx = config.n_ctx
    # A run is one decode of one ubatch. libllama aborts where that has fewer rows than there are sequences.
    params.n_batch = params.n_ubatch = max(min(config.n_batch, config.n_ubatch), config.n_seq)
    params.n_seq_max = config.n_seq
    params.n_threads = threads
    params.n_threads_batch = threads_batch
    params.kv_unified = True
    params.swa_full = True
    params.no_perf = True
    params.type_k = _GGML_TYPES[config.cache_type_k]
    params.type_v = _GGML_TYPES[config.cache_type_v]
    params.flash_attn_type = _FLASH_ATTN[config.flash_attn]
    if config.rope_scaling is not None:
        params.rope_scaling_type = _ROPE_SCALING[config.rope_scaling]
    if config.rope_scale > 0:
        params.rope_freq_scale = 1 / config.rope_scale
    for name in ("rope_freq_base", "rope_freq_scale", "yarn_orig_ctx"):
        if getattr(config, name) > 0:
            setattr(params, name, getattr(config, name))
    for name in ("yarn_ext_factor", "yarn_attn_factor", "yarn_beta_fast", "yarn_beta_slow"):
        if getattr(config, name) >= 0:
            setattr(params, name, getattr(config, name))
    return params


class LlamaBatch:
    """A `llama_batch` over arrays that are filled again for each run."""

    def __init__(self, n_rows: int, n_seq: int, pins: int) -> None:
        """`pins`: added to a row's sequence ids for its pins; 0: it gets none."""
        self.n_rows, self._pins = n_rows, pins
        self._n_seq = n_seq = n_seq + pins
        self._tokens = (ctypes.c_int32 * n_rows)()
        self._pos = (ctypes.c_int32 * (_MOST_DIMENSIONS * n_rows))()
        self._counts = (ctypes.c_int32 * n_rows)()
        self._seqs = (ctypes.c_int32 * (n_rows * n_seq))()
        start = ctypes.addressof(self._seqs)
        pointer = ctypes.POINTER(ctypes.c_int32)
        self._seq_rows = (pointer * n_rows)(*(ctypes.cast(start + 4 * n_seq * i, pointer) for i in range(n_rows)))
        self._flags = (ctypes.c_int8 * n_rows)()
        self.struct: Any = lib.llama_batch(
            0,
            self._tokens,
            None,
            self._pos,
            self._counts,
            self._seq_rows,
            ctypes.cast(self._flags, ctypes.POINTER(ctypes.c_int8)),
        )

    def resized(self, n_rows: int) -> LlamaBatch:
        """Another one, for rows of the same sequences."""
        return LlamaBatch(n_rows, self._n_seq - self._pins, self._pins)

    def fill(self, rows: Sequence[Row], outputs: bool, pinned: bool = True) -> None:
        """Take over a run's rows; with `outputs`, those that want something are flagged. Unless `pinned`, they get no
        pins."""
        n = len(rows)
        if n > self.n_rows:
            raise RunError(f"a run of {n} rows is longer than ", Setting("n_ubatch"), f" {self.n_rows}")
        self.struct.n_tokens = n
        tokens, pos, counts, seqs, flags = self._tokens, self._pos, self._counts, self._seqs, self._flags
        pins = self._pins if pinned else 0
        for i, row in enumerate(rows):
            tokens[i] = row.token
            pos[i] = row.pos
            flags[i] = outputs and row.logits_request >= 0
            ids = (*row.seqs, *(seq + pins for seq in row.seqs)) if pins else row.seqs
            counts[i] = len(ids)
            at = i * self._n_seq
            for k, seq in enumerate(ids):
                seqs[at + k] = seq

    def flag_all(self, outputs: bool) -> None:
        """Flag all rows, or none."""
        for i in range(self.struct.n_tokens):
            self._flags[i] = outputs

    def read_states(self, states: NDArray[np.float32], has_tokens: bool, n_dimensions: int = 1) -> None:
        """Rows read these states, (rows, width), beside their tokens or instead of them. `n_dimensions`: of a position.
        libllama fills in the further ones itself only for rows with tokens: the same position twice more, and a 0."""
        n = self.struct.n_tokens
        for at in range(n, n_dimensions * n):
            self._pos[at] = self._pos[at % n] if at < 3 * n else 0
        self._states = np.ascontiguousarray(states)  # libllama reads it in the next call
        self.struct.embd = self._states.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        self.struct.token = self._tokens if has_tokens else None

    def read_tokens(self) -> None:
        """Rows read their tokens only, as they do until `read_states`."""
        self.struct.embd, self.struct.token = None, self._tokens


def row_of(row: int, logits: NDArray[np.float32], logits_request: LogitsRequest, first: int = 0) -> RowLogits:
    """What a request brings of a row's logits. `first`: as in `best_of`."""
    at, n_tokens, banned = logits.ctypes.data, len(logits), logits_request.banned
    match logits_request.kind:
        case LogitsKind.TOP:
            return best_of(row, logits, logits_request, first)
        case LogitsKind.LIKELY:
            ids, likely = native.likely(at, n_tokens, banned, logits_request.min_p)
            return RowLogits(row, tuple(ids), tuple(likely), math.nan)
        case LogitsKind.DRAWN:
            id = native.draw(at, n_tokens, banned, logits_request.temp, logits_request.number)
            return RowLogits(row, (id,), (float(logits[id]),), logits_request.number)
    return whole_row(row, logits, logits_request)


def whole_row(row: int, logits: NDArray[np.float32], logits_request: LogitsRequest) -> RowLogits:
    """What a request of the kind FULL brings: all but what is banned."""
    logits = logits.copy()
    logits[list(logits_request.banned)] = -np.inf
    return RowLogits(row, None, logits, 0.0)


def best_of(row: int, logits: NDArray[np.float32], logits_request: LogitsRequest, first: int = 0) -> RowLogits:
    """What a request of the kind TOP brings, for tokens from `first` on; `logits_request` counts from there too."""
    ids, best, log_sum_exp, below = native.top(
        logits.ctypes.data,
        len(logits),
        logits_request.n,
        logits_request.banned,
        logits_request.sums,
        logits_request.temp,
    )
    others = list(set(logits_request.also).difference(ids)) if logits_request.also else []
    if others:
        ids, best = ids + others, best + logits[others].tolist()
    found = tuple(first + id for id in ids) if first else tuple(ids)
    return RowLogits(row, found, tuple(best), log_sum_exp, len(others), below=tuple(below))


def hidden_states(given: bytes, asking: Sequence[tuple[int, LogitsRequest]], width: int) -> list[RowLogits]:
    """What requests of the kind HIDDEN bring. `given`: the last hidden states of all rows that ask for anything, which
    are `asking`, by their numbers; nothing where the model has none."""
    if not any(logits_request.kind is LogitsKind.HIDDEN for _, logits_request in asking):
        return []
    states = np.frombuffer(given, np.float32)
    rows = states.reshape(-1, width) if states.size == len(asking) * width else [NO_STATE] * len(asking)
    found = zip(asking, rows, strict=True)
    return [
        RowLogits(i, None, state, 0.0)
        for (i, logits_request), state in found
        if logits_request.kind is LogitsKind.HIDDEN
    ]
