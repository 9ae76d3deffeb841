"""A GGUF model on disk: what its header says, before anything is loaded."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, cast

from ggpipe.cluster.model_file import check_model_file
from ggpipe.errors import ModelError, Setting
from ggpipe.llama.libllama import ggml, logged_errors, start

MetadataValue = int | float | str | bool | tuple[int, ...]
"""Value of a metadata key."""

_MAX_LAYERS = 512  # libllama aborts the process at more
_F32_BYTES = 4
_SPLIT_NAME = re.compile(r"^(?P<prefix>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})\.gguf$")


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor's bytes are. Offsets and sizes in bytes, from the start of file number `file`."""

    file: int
    offset: int
    size: int
    type: str


@dataclass(frozen=True)
class ModelFile:
    """One model, in one file or in several (`NAME-00001-of-0000N.gguf`)."""

    paths: tuple[Path, ...]
    metadata: Mapping[str, MetadataValue]
    """Metadata of the first file, without long arrays and arrays of strings."""
    array_lengths: Mapping[str, int]
    tensors: Mapping[str, TensorInfo]
    header_bytes: tuple[int, ...]
    borrowed: Mapping[str, str] = field(default_factory=dict)
    """Of a draft head: weights that are its target's, and their names there. The target's files follow the head's."""

    @classmethod
    def open(cls, path: Path) -> ModelFile:
        """Read the headers. Raises ModelError when a file is missing, no GGUF, or shorter than it says."""
        start()
        paths: tuple[Path, ...] = (path,)
        header = _read_header(path)
        count = header.metadata.get("split.count", 1)
        if not isinstance(count, int):
            raise ModelError(f"{path} is damaged: its header counts {count!r} parts; copy it again")
        if count > 1:
            paths = _siblings(path, count)
        tensors: dict[str, TensorInfo] = {}
        header_bytes = []
        for i, part in enumerate(paths):
            h = header if i == 0 and part == path else _read_header(part)
            header = h if i == 0 else header
            size = part.stat().st_size
            for name, offset, n, kind in h.tensors:
                if offset + n > size:
                    raise ModelError(
                        f"{part} is truncated: it has {size} bytes and needs at least {offset + n}; copy it again"
                    )
                tensors[name] = TensorInfo(i, offset, n, kind)
            header_bytes.append(h.data_offset)
        model = cls(paths, header.metadata, header.array_lengths, tensors, tuple(header_bytes))
        if not model.architecture or model.n_blocks < 1:
            raise ModelError(f"{path} holds no language model (its header names no architecture or no layers)")
        if model.n_layer < 1:
            raise ModelError(f"{path} has no layers but those for multi-token prediction: give the whole model")
        if not tensors:
            raise ModelError(f"{path} has no weights, as files of a vocabulary alone: give a model's file")
        if model.n_blocks > _MAX_LAYERS:
            raise ModelError(
                f"{path} is damaged: its header counts {model.n_blocks} layers, "
                f"and libllama takes at most {_MAX_LAYERS}; copy it again"
            )
        if problem := model.misfit_of_experts({}):
            raise ModelError(f"{path} is damaged: {problem}; copy it again, or convert the model again")
        return model

    def misfit_of_experts(self, overrides: Mapping[str, int]) -> str:
        """Why the header's counts of experts cannot be right; empty if they can. libllama ends the process at some of
        these. `overrides`: counts to take instead, by their keys."""
        metadata = {**self.metadata, **overrides}
        count, used, width = (
            metadata.get(f"{self.architecture}.{key}", 0)
            for key in ("expert_count", "expert_used_count", "embedding_length")
        )
        most_used = max(used) if isinstance(used, tuple) and used else used
        if not isinstance(count, int) or not isinstance(most_used, int):
            return ""
        has_experts = any("_exps." in name for name in self.tensors)
        if most_used > count or (most_used < 1 and has_experts):
            allowed = f"from 1 to expert_count ({count})" if count > 0 else "0, since expert_count is 0"
            return f"expert_used_count must be {allowed}, got {most_used}"
        for name, tensor in self.tensors.items():
            if name.endswith("ffn_gate_inp.weight") and tensor.type == "f32" and isinstance(width, int):
                if tensor.size != _F32_BYTES * width * count:
                    there = tensor.size / (_F32_BYTES * max(width, 1))
                    return f"expert_count is {count}, and {name} is for {there:g} experts"
                break
        return ""

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def n_layer(self) -> int:
        """Layers that compute the next token."""
        return self.n_blocks - self.n_mtp

    @property
    def n_mtp(self) -> int:
        """Layers for multi-token prediction (MTP), which follow those of `n_layer`. The file may lack their weights."""
        return min(self._count("nextn_predict_layers"), self.n_blocks)

    @property
    def n_blocks(self) -> int:
        """All layers; 0 when the header does not say."""
        return self._count("block_count")

    def _count(self, key: str) -> int:
        count = self.metadata.get(f"{self.architecture}.{key}", 0)
        return count if isinstance(count, int) else 0

    @property
    def n_bytes(self) -> int:
        """Bytes of all weights."""
        return sum(t.size for t in self.tensors.values())

    @property
    def tied_output(self) -> bool:
        """The output layer is the input embedding."""
        return "output.weight" not in self.tensors

    @cached_property
    def fingerprint(self) -> str:
        """Hash of headers and file sizes: the same on every rank that holds the same model."""
        digest = hashlib.sha256()
        for path, n in zip(self.paths, self.header_bytes, strict=True):
            with path.open("rb") as f:
                while n > 0 and (block := f.read(min(n, 1 << 20))):
                    digest.update(block)
                    n -= len(block)
            digest.update(str(path.stat().st_size).encode())
        return digest.hexdigest()[:16]


def has_header(path: Path) -> bool:
    """Whether a file begins with a whole GGUF header. What follows may be missing."""
    start()
    gguf = init_from_file(os.fsencode(path), InitParams(no_alloc=True))
    logged_errors()
    if gguf:
        free(gguf)
    return bool(gguf)


@dataclass(frozen=True)
class _Header:
    metadata: dict[str, MetadataValue]
    array_lengths: dict[str, int]
    tensors: list[tuple[str, int, int, str]]
    data_offset: int


def _read_header(path: Path) -> _Header:
    check_model_file(path)
    logged_errors()
    gguf = init_from_file(os.fsencode(path), InitParams(no_alloc=True))
    if not gguf:
        why = "; ".join(re.sub(r"^\w+: ", "", line) for line in logged_errors()[:1])
        raise ModelError(f"{path} is a damaged or truncated GGUF file ({why or 'unreadable header'}); copy it again")
    try:
        keys = {_text(_key(gguf, i)): i for i in range(_n_kv(gguf))}
        values = {key: _value(gguf, i) for key, i in keys.items()}
        first = int(_data_offset(gguf))
        return _Header(
            {key: value for key, value in values.items() if value is not None},
            {key: int(_array_length(gguf, i)) for key, i in keys.items() if _kind(gguf, i) == _ARRAY},
            [
                (
                    _text(tensor_name(gguf, i)),
                    first + int(tensor_offset(gguf, i)),
                    int(_tensor_size(gguf, i)),
                    _text(type_name(_tensor_type(gguf, i))),
                )
                for i in range(n_tensors(gguf))
            ],
            first,
        )
    finally:
        free(gguf)


# GGUF's reader in ggml, which is many times as fast with vocabularies as one in Python.
class InitParams(ctypes.Structure):
    _fields_ = (("no_alloc", ctypes.c_bool), ("context", ctypes.c_void_p))


_gguf, _id = ctypes.c_void_p, ctypes.c_int64
init_from_file = ggml("gguf_init_from_file", _gguf, ctypes.c_char_p, InitParams)
free = ggml("gguf_free", None, _gguf)
_n_kv = ggml("gguf_get_n_kv", _id, _gguf)
_key = ggml("gguf_get_key", ctypes.c_char_p, _gguf, _id)
_kind = ggml("gguf_get_kv_type", ctypes.c_int, _gguf, _id)
_string = ggml("gguf_get_val_str", ctypes.c_char_p, _gguf, _id)
_array_length = ggml("gguf_get_arr_n", ctypes.c_size_t, _gguf, _id)
_array_kind = ggml("gguf_get_arr_type", ctypes.c_int, _gguf, _id)
_array_data = ggml("gguf_get_arr_data", ctypes.c_void_p, _gguf, _id)
_data_offset = ggml("gguf_get_data_offset", ctypes.c_size_t, _gguf)
n_tensors = ggml("gguf_get_n_tensors", _id, _gguf)
tensor_name = ggml("gguf_get_tensor_name", ctypes.c_char_p, _gguf, _id)
tensor_offset = ggml("gguf_get_tensor_offset", ctypes.c_size_t, _gguf, _id)
_tensor_size = ggml("gguf_get_tensor_size", ctypes.c_size_t, _gguf, _id)
_tensor_type = ggml("gguf_get_tensor_type", ctypes.c_int, _gguf, _id)
type_name = ggml("ggml_type_name", ctypes.c_char_p, ctypes.c_int)

_STRING, _ARRAY = 8, 9
_SCALARS = {
    kind: ggml(f"gguf_get_val_{name}", type_, _gguf, _id)
    for kind, name, type_ in (
        (0, "u8", ctypes.c_uint8),
        (1, "i8", ctypes.c_int8),
        (2, "u16", ctypes.c_uint16),
        (3, "i16", ctypes.c_int16),
        (4, "u32", ctypes.c_uint32),
        (5, "i32", ctypes.c_int32),
        (6, "f32", ctypes.c_float),
        (7, "bool", ctypes.c_bool),
        (10, "u64", ctypes.c_uint64),
        (11, "i64", ctypes.c_int64),
        (12, "f64", ctypes.c_double),
    )
}
_NUMBERS: dict[int, Any] = {4: ctypes.c_uint32, 5: ctypes.c_int32, 7: ctypes.c_bool}
"""Types of array elements that are read, by GGUF's type number: those of per-layer settings."""
_MOST_NUMBERS = 2 * _MAX_LAYERS


def _text(data: bytes) -> str:
    return data.decode("utf-8", "replace")


def _value(gguf: int, key: int) -> MetadataValue | None:
    """None for arrays of strings and floats, and for long arrays such as those of a vocabulary."""
    kind = _kind(gguf, key)
    if kind == _STRING:
        return _text(_string(gguf, key))
    if kind != _ARRAY:
        return cast(MetadataValue, _SCALARS[kind](gguf, key))
    n, number = int(_array_length(gguf, key)), _NUMBERS.get(_array_kind(gguf, key))
    if number is None or n > _MOST_NUMBERS:
        return None
    return tuple((number * n).from_address(_array_data(gguf, key))) if n else ()


def _siblings(path: Path, count: int) -> tuple[Path, ...]:
    match = _SPLIT_NAME.match(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(f"{path} is one of {count} parts, but is not named NAME-00001-of-{count:05d}.gguf")
    if int(match["no"]) != 1:
        raise ModelError(f"{path} is part {int(match['no'])} of {count}: give the first part as ", Setting("model"))
    return tuple(path.with_name(f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
