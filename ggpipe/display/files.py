"""Write files; one-line errors where that fails."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

from ggpipe.errors import UsageError


def check_writable(path: Path) -> None:
    """Check, before a long run, that a file can be written. Raises UsageError when it cannot."""
    try:
        if path.is_dir():
            raise UsageError(f"cannot write to {path}: it is a directory")
        if path.exists():
            ok = os.access(path, os.W_OK)
        elif path.parent.is_dir():
            ok = os.access(path.parent, os.W_OK | os.X_OK)
        else:
            raise UsageError(f"cannot write to {path}: there is no directory {path.parent}")
    except OSError as e:
        raise _cannot_write(path, e) from e
    if not ok:
        raise UsageError(f"cannot write to {path}: permission denied")


def make_folder(path: Path) -> None:
    """Make a folder before a long run. Raises UsageError when that fails, or it cannot be written to."""
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _cannot_write(path, e) from e
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {path}: permission denied")


def write_text(path: Path, text: str, mode: Literal["w", "a"] = "w") -> None:
    """Write the file, or append to it. Raises UsageError when it cannot be written."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as e:
        raise _cannot_write(path, e) from e


def write_bytes(path: Path, data: bytes) -> None:
    """Write the file. Raises UsageError when it cannot be written."""
    try:
        path.write_bytes(data)
    except OSError as e:
        raise _cannot_write(path, e) from e


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write to {path}: {error.strerror or error}")
