"""Checks whether a file can be a model, without libllama."""

from __future__ import annotations

import contextlib
import difflib
import stat
from pathlib import Path

from ggpipe.errors import ModelError


def check_model_file(path: Path) -> None:
    """Raises ModelError if the kind of file, or its first bytes, show that it is not a GGUF file."""
    try:
        if stat.S_ISFIFO(path.stat().st_mode):  # opening it would block until there is a writer
            raise ModelError(f"cannot open model file {path}: it is a pipe, and a model is read more than once")
        with path.open("rb") as f:
            magic = f.read(4)
    except OSError as e:
        raise ModelError(f"cannot open model file {path}: {e.strerror}{_instead_of(path)}") from e
    except ValueError as e:  # the name contains NUL
        raise ModelError(f"cannot open model file {path}: {e}") from e
    if magic != b"GGUF":
        raise ModelError(f"{path} is not a GGUF file; convert the model with llama.cpp's convert_hf_to_gguf.py")


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
        names = {form: file for file in path.parent.glob("*.gguf") for form in (file.name, file.stem)}
        if similar := difflib.get_close_matches(path.name, names, 1, 0.8):
            return f"; did you mean {names[similar[0]]}?"
    return ""
