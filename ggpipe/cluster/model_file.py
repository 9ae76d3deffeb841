"""A model's files, and whether a file can be one, without libllama."""

from __future__ import annotations

import contextlib
import difflib
import stat
import sys
from pathlib import Path

import msgspec

from ggpipe.errors import ModelError

_VERSION = 3
"""GGUF's version, as llama.cpp writes it."""
_MOST_LIKELY = 0xFFFF
"""Larger versions are damaged, or have the other byte order."""


class ModelPart(msgspec.Struct, frozen=True):
    """One of a model's files."""

    name: str
    n_bytes: int
    header_bytes: int


def check_model_file(path: Path) -> None:
    """Raises ModelError if the kind of file, or its first bytes, show that it is not a GGUF file."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # opening it would block until there is a writer
            raise ModelError(f"cannot open model file {path}: it is a pipe, and a model is read more than once")
        with path.open("rb") as f:
            magic, version = f.read(4), int.from_bytes(f.read(4), sys.byteorder)
    except OSError as e:
        raise ModelError(f"cannot open model file {path}: {e.strerror}{_instead_of(path)}") from e
    except ValueError as e:  # the name contains NUL
        raise ModelError(f"cannot open model file {path}: {e}") from e
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file; convert the model with llama.cpp's convert_hf_to_gguf.py")
    if problem := _problem_of_version(version):
        raise ModelError(f"{path} {problem}")


def _problem_of_version(version: int) -> str:
    """Why llama.cpp cannot read a GGUF file of this version, as the rest of a sentence; empty if it may."""
    if _VERSION < version <= _MOST_LIKELY:
        return (
            f"is a GGUF file of version {version}, for a newer llama.cpp than ggpipe's, which reads versions up to "
            f"{_VERSION}: convert the model with an older convert_hf_to_gguf.py"
        )
    if version > _MOST_LIKELY and not version & _MOST_LIKELY:  # as llama.cpp tells
        other = "big" if sys.byteorder == "little" else "little"
        return (
            f"is {other}-endian, and this machine is {sys.byteorder}-endian: convert it with "
            "`gguf-convert-endian` of the Python package gguf"
        )
    return ""


def _instead_of(path: Path) -> str:
    """Advice for the message about a model file that cannot be opened."""
    if path.parts[:1] in (("https:",), ("http:",)):
        return "; download the file and name it, or name its repository on the Hugging Face Hub with -hf"
    if any(part.startswith("models--") for part in path.parts) and "snapshots" in path.parts:
        return f"; the model was downloaded on another machine: copy it, as in `rsync -L --mkpath HOST:{path} {path}`"
    if path.parts[:1] == ("~",):
        return "; ~ stands for your home folder only without quotes"
    with contextlib.suppress(OSError):
        if path.is_dir():
            return "; name a file in it" if any(path.glob("*.gguf")) else ""
        others = [file for file in path.parent.glob("*.gguf") if file.name != path.name]
        names = {form: file for file in others for form in (file.name, file.stem)}
        if similar := difflib.get_close_matches(path.name, names, 1, 0.8):
            return f"; did you mean {names[similar[0]]}?"
    return ""
