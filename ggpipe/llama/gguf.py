"""A GGUF model on disk: what its header says, before anything is loaded."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from ggpipe.errors import ModelError
from ggpipe.llama.libllama import logged_errors, native, start

Value = int | float | str | bool | tuple[int, ...]
"""Of metadata."""

_MAX_LAYERS = 512  # libllama aborts the process at more
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
    metadata: Mapping[str, Value]
    """The first file's; long arrays, and those of texts, are left out."""
    array_lengths: Mapping[str, int]
    tensors: Mapping[str, TensorInfo]
    header_bytes: tuple[int, ...]

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
        if not model.architecture or model.n_layer < 1:
            raise ModelError(f"{path} holds no language model (its header names no architecture or no layers)")
        if model.n_layer > _MAX_LAYERS:
            raise ModelError(
                f"{path} is damaged: its header counts {model.n_layer} layers, "
                f"and libllama takes at most {_MAX_LAYERS}; copy it again"
            )
        return model

    @property
    def architecture(self) -> str:
        """`general.architecture`."""
        return str(self.metadata.get("general.architecture", ""))

    @property
    def n_layer(self) -> int:
        """Layers (blocks), those for multi-token prediction included; 0 when the header does not say."""
        count = self.metadata.get(f"{self.architecture}.block_count", 0)
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


@dataclass(frozen=True)
class _Header:
    metadata: dict[str, Value]
    array_lengths: dict[str, int]
    tensors: list[tuple[str, int, int, str]]
    data_offset: int


def _read_header(path: Path) -> _Header:
    try:
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise ModelError(f"cannot open model file {path}: {e.strerror}") from e
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file; convert the model with llama.cpp's convert_hf_to_gguf.py")
    logged_errors()
    header = native.gguf_header(os.fsencode(path))
    if header is None:
        why = "; ".join(re.sub(r"^\w+: ", "", line) for line in logged_errors()[:1])
        raise ModelError(f"{path} is a damaged or truncated GGUF file ({why or 'unreadable header'}); copy it again")
    return _Header(*header)


def _siblings(path: Path, count: int) -> tuple[Path, ...]:
    match = _SPLIT_NAME.match(path.name)
    if match is None or int(match["count"]) != count:
        raise ModelError(f"{path} is one of {count} parts, but is not named NAME-00001-of-{count:05d}.gguf")
    if int(match["no"]) != 1:
        raise ModelError(f"{path} is part {int(match['no'])} of {count}: give the first part as `model`")
    return tuple(path.with_name(f"{match['prefix']}-{i:05d}-of-{count:05d}.gguf") for i in range(1, count + 1))
