"""The tokenizer of a GGUF file as a small file of its own, for a machine that lacks the model."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from ggpipe.errors import ModelError

_MAGIC = b"GGUF"
_KEPT = ("general.architecture", "tokenizer.")
_SIZES = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}
"""Bytes of a value, by GGUF's numbers of types."""
_STRING, _ARRAY = 8, 9
_HEADER = struct.Struct("<4sIQQ")  # magic, version, tensors, keys


def tokenizer_of(path: Path) -> bytes:
    """A GGUF file with the tokenizer of this one and no weights.

    Raises ModelError if the file cannot be read.
    """
    try:
        with path.open("rb") as file:
            magic, version, _, n_keys = _HEADER.unpack(_read(file, _HEADER.size))
            if magic != _MAGIC:
                raise ModelError(f"{path} is no GGUF file")
            kept = [data for key, data in _values(file, n_keys) if key.startswith(_KEPT)]
    except (OSError, EOFError, KeyError) as e:
        raise ModelError(f"cannot read the tokenizer of {path}: {e}") from e
    return _HEADER.pack(_MAGIC, version, 0, len(kept)) + b"".join(kept)


def _values(file: BinaryIO, n_keys: int) -> Iterator[tuple[str, bytes]]:
    """Each key with its bytes in the file, and those of its value."""
    for _ in range(n_keys):
        start = file.tell()
        key = _read(file, _number(file, 8)).decode("utf-8", "replace")
        _skip(file, _number(file, 4))
        end = file.tell()
        file.seek(start)
        yield key, _read(file, end - start)


def _skip(file: BinaryIO, kind: int) -> None:
    if kind == _STRING:
        file.seek(_number(file, 8), 1)
    elif kind == _ARRAY:
        kind, n = _number(file, 4), _number(file, 8)
        if kind in _SIZES:
            file.seek(_SIZES[kind] * n, 1)
        else:
            for _ in range(n):
                _skip(file, kind)
    else:
        file.seek(_SIZES[kind], 1)


def _number(file: BinaryIO, size: int) -> int:
    return int.from_bytes(_read(file, size), "little")


def _read(file: BinaryIO, size: int) -> bytes:
    data = file.read(size)
    if len(data) < size:
        raise EOFError("it is truncated")
    return data
