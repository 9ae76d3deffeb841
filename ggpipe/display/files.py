"""Write files, with one-line errors if that fails."""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Literal

from ggpipe.errors import UsageError


def check_writable(*paths: Path | None) -> None:
    """Check, before a long run, that files can be written. Raises UsageError if one cannot."""
    for path in paths:
        if path is not None:
            _check_writable(path)


def _check_writable(path: Path) -> None:
    try:
        if path.is_dir():
            raise UsageError(f"cannot write to {path}: it is a directory")
        if path.exists():
            ok = os.access(path, os.W_OK)
        elif path.parent.is_dir():
            ok = os.access(path.parent, os.W_OK | os.X_OK)
        else:
            raise UsageError(f"cannot write to {path}: no directory {path.parent}")
    except OSError as e:
        raise _cannot_write(path, e) from e
    if not ok:
        raise UsageError(f"cannot write to {path}: permission denied")


def make_folder(path: Path) -> None:
    """Make a folder before a long run. Raises UsageError if that fails, or if it is not writable."""
    try:
        if path.exists() and not path.is_dir():
            raise UsageError(f"cannot write to {path}: it is a file; name a folder")
        path.mkdir(parents=True, exist_ok=True)
    except OSError as e:
        raise _cannot_write(path, e) from e
    if not os.access(path, os.W_OK | os.X_OK):
        raise UsageError(f"cannot write to {path}: permission denied")


def write_text(path: Path, text: str, mode: Literal["w", "a"] = "w") -> None:
    """Write or append to a file. Raises UsageError if that fails."""
    try:
        with path.open(mode, encoding="utf-8") as file:
            file.write(text)
    except OSError as e:
        raise _cannot_write(path, e) from e


def write_json(path: Path, value: object, indent: int = 1) -> None:
    """Write a file of JSON; values that JSON does not have become strings. Raises UsageError if that fails."""
    write_text(path, json.dumps(value, indent=indent, default=str) + "\n")


def csv_text(rows: Iterable[Iterable[object]]) -> str:
    """Rows as CSV."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows(rows)
    return text.getvalue()


def write_bytes(path: Path, data: bytes) -> None:
    """Write a file. Raises UsageError if that fails."""
    try:
        path.write_bytes(data)
    except OSError as e:
        raise _cannot_write(path, e) from e


def _cannot_write(path: Path, error: OSError) -> UsageError:
    return UsageError(f"cannot write to {path}: {error.strerror or error}")
